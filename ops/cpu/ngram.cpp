// Lookup of continuations in the text so far on a CPU: the operators of extras/ngram_draft.py, which describes them.

#include "operands.h"
#include "operators.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace ngram {
namespace {

constexpr float FADING = .998f;  // weight of an outcome after the next one
constexpr float PRIOR = 3.f;     // outcomes that a rate before any outcome is worth
constexpr float MOST = .995f;    // largest rate

struct Text {  // of one sequence
  const int64_t* tokens;
  int64_t size, root;  // root: the last decided token; continuations follow it
};

class Texts {
 public:
  Texts(const at::Tensor& text, const at::Tensor& pos)
      : count(text.dim() == 2 ? text.size(0) : -1), size(text.size(-1)), text(text, {count, size}, "text"),
        pos(pos, {count}, "pos") {}
  Text operator[](int64_t b) const { return {text.data + b * size, size, within(pos[b], size, "the root")}; }
  const int64_t count, size;

 private:
  const Whole text, pos;
};

struct Match {
  int64_t place, length;  // length: tokens up to and including the place that equal the last ones of the text
};

// Returns the tokens that match; outcomes of matches in kept texts lie behind those of the M / 2 lengths in the text.
inline int64_t tokens_of(int64_t length, int64_t M) { return (length - 1) % (M / 2) + 1; }

// Kept texts with a text behind them, as one row of tokens. -1 stands behind every kept text and is no token.
class Places {
 public:
  Places(const int64_t* kept, int64_t kept_size, const Text& text) : kept(kept), first(kept_size), text(text) {}

  // Writes the places of the root's token before the root: those whose next token is one, and that match `least` tokens.
  void find(std::vector<Match>& found, int64_t least, int64_t longest) const {
    found.clear();
    search(found, kept, first, 0, least, longest);
    search(found, text.tokens, text.root, first, least, longest);
  }
  // Writes the tokens behind a place, 0 for -1. A copy that reaches the end of the text continues with itself.
  void copy(int64_t place, int64_t* chain, int64_t count) const {
    const int64_t last = first + text.root;
    int64_t from = place;
    for (int64_t step = 0; step < count; step++) {
      from = from < last ? from + 1 : place + 1;
      const int64_t source = std::min(from, first + text.size - 1);
      chain[step] = std::max<int64_t>(source < first ? kept[source] : text.tokens[source - first], 0);
    }
  }

 private:
  // Adds the matches among `size` tokens of one kind, the first at place `begin`.
  void search(std::vector<Match>& found, const int64_t* tokens, int64_t size, int64_t begin, int64_t least,
              int64_t longest) const {
    const int64_t* const root = text.tokens + text.root;
    for_each_equal(tokens, size, *root, [&](int64_t at) {
      const int64_t most = std::min({longest, at + 1, text.root + 1});
      int64_t length = 1;
      while (length < most && tokens[at - length] == root[-length]) length++;
      if (length >= least && tokens[at + 1] >= 0) found.push_back({begin + at, length});
    });
  }
  // Calls f(place) for every place of a token. Most blocks have none, which the compiler finds out with vectors.
  template <class F> static void for_each_equal(const int64_t* tokens, int64_t size, int64_t token, const F& f) {
    constexpr int64_t BLOCK = 32;
    for (int64_t i = 0; i < size; i += BLOCK) {
      const int64_t end = std::min(i + BLOCK, size);
      bool any = end < i + BLOCK;
      if (!any) {
        int64_t equal = 0;
        for (int64_t j = 0; j < BLOCK; j++) equal |= -int64_t(tokens[i + j] == token);
        any = equal != 0;
      }
      for (int64_t j = i; any && j < end; j++)
        if (tokens[j] == token) f(j);
    }
  }

  const int64_t* const kept;
  const int64_t first;  // place of the text
  const Text text;
};

// Chains of tokens behind a root, the best first, and how each was found.
struct Chains {
  int64_t K, L;
  int64_t *tokens, *lengths;  // [K, L]; [K], tokens that match, `longest` more in a kept text; 0: no continuation
};

// Writes the best continuations, pairwise different: the longest match first, of equal ones the latest. found: reused
inline void continuations(const Places& places, int64_t kept, int64_t least, int64_t longest, const Chains& chains,
                          std::vector<Match>& found) {
  const auto [K, L, tokens, lengths] = chains;
  places.find(found, least, longest);
  int64_t count = 0;  // of chains so far
  for (int64_t length = longest; length >= least && count < K; length--)
    for (auto match = found.rbegin(); match != found.rend() && count < K; ++match) {
      if (match->length != length) continue;
      int64_t* const next = tokens + count * L;
      places.copy(match->place, next, L);
      bool differs = true;
      for (int64_t k = 0; k < count && differs; k++) differs = !std::equal(next, next + L, tokens + k * L);
      const bool in_kept = match->place < kept;
      if (differs) lengths[count++] = length + in_kept * longest;
    }
  for (; count < K; count++) places.copy(0, tokens + count * L, L), lengths[count] = 0;
}

struct Kept {  // texts of earlier requests
  Kept(const std::optional<at::Tensor>& kept)
      : size(kept ? kept->numel() : 0), held(optional<int64_t>(kept, {size}, "kept")) {
    TORCH_CHECK(size == 0 || (*held)[size - 1] < 0, "no separator behind the kept texts");
  }
  Places before(const Text& text) const { return {held ? held->data : nullptr, size, text}; }
  const int64_t size;

 private:
  const std::optional<Whole> held;
};

// What is drafted for one sequence.
struct Drafted {
  Chains chains;
  int64_t* parents;   // [K L], as in `Candidates`
  float* values;      // [K L], log of the probability of every path; -inf: a chain before has its node, or there is none
  float* outcomes;    // [M, K, D, 2], accepted and tried candidates by length, rank and depth
  int64_t M, D;
  float* key(int64_t k, int64_t depth) const {
    const int64_t m = std::min(chains.lengths[k], M) - 1;
    return outcomes + ((m * chains.K + k) * D + std::min(depth, D - 1)) * 2;
  }
};

// Learns from the tokens that were decided. Writes: the outcomes. seen: reused
inline void learn(const Drafted& drafted, const int64_t* decided, int64_t count, std::vector<float>& seen) {
  const auto [K, L, tokens, lengths] = drafted.chains;
  const int64_t size = drafted.M * K * drafted.D * 2;
  seen.assign(size, 0.f);
  for (int64_t k = 0; k < K; k++)
    for (int64_t d = 0; lengths[k] > 0 && d < std::min(count, L); d++) {
      const int64_t i = k * L + d;
      const bool hit = tokens[i] == decided[d];
      float* const key = &seen[drafted.key(k, d) - drafted.outcomes];
      if (drafted.values[i] > -INFINITY) key[0] += hit, key[1] += 1;
      if (!hit) break;
    }
  for (int64_t i = 0; i < size; i += 2)
    if (seen[i + 1] > 0)
      for (int64_t j = i; j < i + 2; j++)
        drafted.outcomes[j] = drafted.outcomes[j] * std::pow(FADING, seen[i + 1]) + seen[j];
}

// Estimates how probable the continuations are. Writes: values, parents; expected
// [sizes], the sums of the largest `size - 1` probabilities. path: reused
inline void estimate(const Drafted& drafted, at::IntArrayRef sizes, float* expected, std::vector<float>& path) {
  const auto [K, L, tokens, lengths] = drafted.chains;
  path.assign(K * L, 0.f);
  int64_t most = 0;
  for (const int64_t size : sizes) most = std::max(most, std::min(size - 1, K * L));
  for (int64_t k = 0; k < K; k++) {
    int64_t above = -1;
    for (int64_t d = 0; d < L; d++) {
      int64_t owner = 0;  // the first chain that begins so
      while (owner < k && !(lengths[owner] > 0 && std::equal(tokens + k * L, tokens + k * L + d + 1, tokens + owner * L)))
        owner++;
      const int64_t node = k * L + d;
      drafted.parents[node] = above;
      if (owner == k && lengths[k] > 0) {
        const float* const key = drafted.key(k, d);
        // the first token is learnt from every cycle, so that little has to be hoped for
        const float hope = d == 0 ? .1f * float(std::min<int64_t>(tokens_of(lengths[k], drafted.M), 6)) : .6f;
        const float rate = std::min((key[0] + PRIOR * hope / float(1 + k)) / (key[1] + PRIOR), MOST);
        path[node] = (above < 0 ? 1.f : path[above]) * rate;
      }
      drafted.values[node] = path[node] > 0 ? std::log(path[node]) : -INFINITY;
      above = owner * L + d;
    }
  }
  std::partial_sort(path.begin(), path.begin() + most, path.end(), std::greater<float>());
  for (size_t s = 0; s < sizes.size(); s++)
    expected[s] = std::accumulate(path.begin(), path.begin() + std::min<int64_t>(std::max<int64_t>(sizes[s] - 1, 0), K * L), 0.f);
}

template <class T> T* written(const at::Tensor& t, at::IntArrayRef shape, const char* name) {
  TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
  const Operand<T> checked(t, shape, name);
  return t.mutable_data_ptr<T>();
}

}  // namespace

// Finds the best continuations in kept texts [C] and in each text, pairwise different. Returns: tokens [B, K, L]; the
// tokens that match, 0 where there is no continuation, [B, K], `longest` more in a kept text.
std::tuple<at::Tensor, at::Tensor> ngram_match(const at::Tensor& text, const at::Tensor& pos,
                                          const std::optional<at::Tensor>& kept, int64_t tokens, int64_t branches,
                                          int64_t least, int64_t longest) {
  TORCH_CHECK(0 < least && least <= longest, "a match has 1 token or more; it is ", least, " to ", longest);
  const Texts texts(text, pos);
  const Kept before(kept);
  const int64_t B = texts.count, K = branches, L = tokens;
  const at::Tensor chains = at::empty({B, K, L}, text.options()), matched = at::empty({B, K}, text.options());
  std::vector<Match> found;
  for (int64_t b = 0; b < B; b++) {
    const Chains one{K, L, chains.mutable_data_ptr<int64_t>() + b * K * L, matched.mutable_data_ptr<int64_t>() + b * K};
    continuations(before.before(texts[b]), before.size, least, longest, one, found);
  }
  return {chains, matched};
}

// Adds chains [B, K, L] below the root to a pool, [B, P] each. The value of chain k is -k, or -inf where its
// length [B, K] is 0. Where the pool has a chain's node, that is used and its value raised. Returns: the pool, [B, P + K L] each.
std::tuple<at::Tensor, at::Tensor, at::Tensor> add_chains(const at::Tensor& tokens, const at::Tensor& values,
                                                          const at::Tensor& parents, const at::Tensor& chains,
                                                          const at::Tensor& lengths) {
  TORCH_CHECK(tokens.dim() == 2 && chains.dim() == 3, "tokens must be [B, P], chains [B, K, L]");
  const int64_t B = tokens.size(0), P = tokens.size(1), K = chains.size(1), L = chains.size(2), size = P + K * L;
  const Whole token_of(tokens, {B, P}, "tokens"), parent_of(parents, {B, P}, "parents");
  const Whole drafted(chains, {B, K, L}, "chains");
  const Operand<float> value_of(values, {B, P}, "values");
  const Whole matched(lengths, {B, K}, "lengths");
  const at::Tensor new_tokens = at::empty({B, size}, tokens.options()), new_parents = at::empty_like(new_tokens);
  const at::Tensor new_values = at::empty({B, size}, values.options());
  for (int64_t b = 0; b < B; b++) {
    int64_t *token = new_tokens.mutable_data_ptr<int64_t>() + b * size;
    int64_t *parent = new_parents.mutable_data_ptr<int64_t>() + b * size;
    float* value = new_values.mutable_data_ptr<float>() + b * size;
    std::copy_n(token_of.data + b * P, P, token);
    std::copy_n(parent_of.data + b * P, P, parent);
    std::copy_n(value_of.data + b * P, P, value);
    int64_t end = P;
    for (int64_t k = 0; k < K; k++) {
      const float of_chain = matched[b * K + k] > 0 ? -float(k) : -INFINITY;
      int64_t above = -1;
      for (int64_t step = 0; step < L; step++, end++) {
        const int64_t next = drafted[(b * K + k) * L + step];
        int64_t same = 0;
        while (same < end && !(parent[same] == above && token[same] == next && value[same] > -INFINITY)) same++;
        if (same < end) value[same] = std::max(value[same], of_chain);
        token[end] = next, parent[end] = above, value[end] = same < end ? -INFINITY : of_chain;
        above = same;
      }
    }
  }
  return {new_tokens, new_values, new_parents};
}

// Learns from the tokens that were decided since the last call, looks up what may follow in kept texts [C] and the text, and
// estimates how probable that is. The other tensors are the state, as in `Lookup` of extras/ngram_estimates.py, and
// written. sizes: of trees
void ngram_draft(const at::Tensor& text, const at::Tensor& pos, const std::optional<at::Tensor>& kept,
             const at::Tensor& tokens, const at::Tensor& values, const at::Tensor& parents, const at::Tensor& lengths,
             const at::Tensor& root, const at::Tensor& outcomes, const at::Tensor& expected, int64_t least,
             int64_t longest, at::IntArrayRef sizes) {
  TORCH_CHECK(0 < least && least <= longest, "a match has 1 token or more; it is ", least, " to ", longest);
  TORCH_CHECK(outcomes.dim() == 5 && tokens.dim() == 2 && outcomes.size(1) > 1, "outcomes must be [B, M, K, D, 2]");
  const Texts texts(text, pos);
  const Kept before(kept);
  const int64_t B = texts.count, P = tokens.size(1), S = int64_t(sizes.size());
  const int64_t M = outcomes.size(1), K = outcomes.size(2), D = outcomes.size(3), L = P / std::max<int64_t>(K, 1);
  int64_t* const token = written<int64_t>(tokens, {B, K * L}, "tokens");
  int64_t* const parent = written<int64_t>(parents, {B, P}, "parents");
  int64_t* const length = written<int64_t>(lengths, {B, K}, "lengths");
  int64_t* const from = written<int64_t>(root, {B}, "root");
  float* const value = written<float>(values, {B, P}, "values");
  float* const counted = written<float>(outcomes, {B, M, K, D, 2}, "outcomes");
  float* const sums = written<float>(expected, {B, S}, "expected");
  std::vector<Match> found;
  std::vector<float> scratch;
  for (int64_t b = 0; b < B; b++) {
    const Text one = texts[b];
    const Chains chains{K, L, token + b * P, length + b * K};
    const Drafted drafted{chains, parent + b * P, value + b * P, counted + b * M * K * D * 2, M, D};
    if (from[b] >= 0 && from[b] < one.root)
      learn(drafted, one.tokens + from[b] + 1, one.root - from[b], scratch);
    continuations(before.before(one), before.size, least, longest, chains, found);
    estimate(drafted, sizes, sums + b * S, scratch);
    from[b] = one.root;
  }
}

// The results, empty, where steps are traced.
std::tuple<at::Tensor, at::Tensor> empty_match(const at::Tensor& text, const at::Tensor&,
                                                const std::optional<at::Tensor>&, int64_t tokens,
                                                int64_t branches, int64_t, int64_t) {
  const int64_t B = text.size(0);
  return {at::empty({B, branches, tokens}, text.options()),
          at::empty({B, branches}, text.options())};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> empty_pool(const at::Tensor& tokens,
                                                          const at::Tensor& values,
                                                          const at::Tensor& parents,
                                                          const at::Tensor& chains,
                                                          const at::Tensor&) {
  const int64_t size = tokens.size(1) + chains.size(1) * chains.size(2);
  return {empty_rows(tokens, size, at::kLong), empty_rows(values, size, at::kFloat),
          empty_rows(parents, size, at::kLong)};
}
void skip_draft(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                  const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                  const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, int64_t,
                  at::IntArrayRef) {}

OPERATORS(m) {
  m.def(
      "ngram_match(Tensor text, Tensor pos, Tensor? kept, int tokens, int branches, int least, "
      "int longest) -> (Tensor, Tensor)");
  m.impl("ngram_match", at::kCPU, ngram_match);
  m.impl("ngram_match", at::kMeta, empty_match);
  m.def(
      "ngram_draft(Tensor text, Tensor pos, Tensor? kept, Tensor(a!) tokens, Tensor(b!) values, "
      "Tensor(c!) parents, Tensor(d!) lengths, Tensor(e!) root, Tensor(f!) outcomes, "
      "Tensor(g!) expected, int least, int longest, int[] sizes) -> ()");
  m.impl("ngram_draft", at::kCPU, ngram_draft);
  m.impl("ngram_draft", at::kMeta, skip_draft);
  m.def(
      "add_chains(Tensor tokens, Tensor values, Tensor parents, Tensor chains, Tensor found) "
      "-> (Tensor, Tensor, Tensor)");
  m.impl("add_chains", at::kCPU, add_chains);
  m.impl("add_chains", at::kMeta, empty_pool);
}

}  // namespace ngram
