// N-grams: the continuations of the text so far on a CPU. The operators of drafts/ngram_draft.py
// and drafts/ngram_estimates.py, which describe them.

#include "operands.h"
#include "operators.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <vector>

namespace ngram {
namespace {

// The text of one sequence.
struct Text {
  const int64_t* tokens;
  int64_t size;
  int64_t root;  // index of the last decided token; continuations follow it
};

class Texts {
 public:
  Texts(const at::Tensor& text, const at::Tensor& pos)
      : count(text.dim() == 2 ? text.size(0) : -1),
        size(text.size(-1)),
        text(text, {count, size}, "text"),
        pos(pos, {count}, "pos") {}
  Text operator[](int64_t b) const {
    return {text.data + b * size, size, within(pos[b], size, "the root")};
  }
  const int64_t count, size;

 private:
  const Whole text, pos;
};

struct Match {
  int64_t place;
  int64_t length;  // tokens up to and including the place that equal the last ones of the text
};

// The lengths of matches that are searched for.
struct Lengths {
  Lengths(int64_t least, int64_t longest) : least(least), longest(longest) {
    TORCH_CHECK(0 < least && least <= longest, "a match has 1 token or more; it is ", least, " to ",
                longest);
  }
  const int64_t least, longest;
};

// Kept texts with a text behind them, as one row of tokens. -1 stands behind every kept text and is
// no token.
class Places {
 public:
  Places(const int64_t* kept, int64_t kept_size, const Text& text)
      : kept(kept), first(kept_size), text(text) {}

  // Writes the places of the root's token before the root: those whose next token is one, and that
  // match enough tokens.
  void find(std::vector<Match>& found, const Lengths& lengths) const {
    found.clear();
    search(found, kept, first, 0, lengths);
    search(found, text.tokens, text.root, first, lengths);
  }
  // Writes the tokens behind a place, 0 for -1. A copy that reaches the end of the text continues
  // with itself.
  void copy(int64_t place, int64_t* chain, int64_t count) const {
    const int64_t last = first + text.root;
    int64_t from = place;
    for (int64_t step = 0; step < count; step++) {
      from = from < last ? from + 1 : place + 1;
      const int64_t source = std::min(from, first + text.size - 1);
      const int64_t token = source < first ? kept[source] : text.tokens[source - first];
      chain[step] = std::max<int64_t>(token, 0);
    }
  }

 private:
  // Adds the matches among `size` tokens of one kind, the first at place `begin`.
  void search(std::vector<Match>& found, const int64_t* tokens, int64_t size, int64_t begin,
              const Lengths& lengths) const {
    const int64_t* const root = text.tokens + text.root;
    for_each_equal(tokens, size, *root, [&](int64_t at) {
      const int64_t most = std::min({lengths.longest, at + 1, text.root + 1});
      int64_t length = 1;
      while (length < most && tokens[at - length] == root[-length]) length++;
      if (length >= lengths.least && tokens[at + 1] >= 0) found.push_back({begin + at, length});
    });
  }
  // Calls f(place) for every place of a token. Most blocks have none, which the compiler finds out
  // with vectors.
  template <class F>
  static void for_each_equal(const int64_t* tokens, int64_t size, int64_t token, const F& f) {
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

// Texts of earlier requests.
struct Kept {
  explicit Kept(const std::optional<at::Tensor>& kept)
      : size(kept ? kept->numel() : 0), held(optional<int64_t>(kept, {size}, "kept")) {
    TORCH_CHECK(size == 0 || (*held)[size - 1] < 0, "no separator behind the kept texts");
  }
  Places before(const Text& text) const { return {held ? held->data : nullptr, size, text}; }
  const int64_t size;

 private:
  const std::optional<Whole> held;
};

// Chains of tokens behind a root, the best first, and how each was found.
struct Chains {
  int64_t K, L;
  int64_t* tokens;   // [K, L]
  int64_t* lengths;  // [K], tokens that match, `longest` more in a kept text; 0: no continuation
};

// Writes the best continuations, pairwise different: the longest match first, of equal ones the
// latest. found: reused
void continuations(const Kept& kept, const Text& text, const Lengths& lengths, const Chains& chains,
                   std::vector<Match>& found) {
  const auto [K, L, tokens, matched] = chains;
  const Places places = kept.before(text);
  places.find(found, lengths);
  int64_t count = 0;  // of chains so far
  for (int64_t length = lengths.longest; length >= lengths.least && count < K; length--) {
    for (auto match = found.rbegin(); match != found.rend() && count < K; ++match) {
      if (match->length != length) continue;
      int64_t* const next = tokens + count * L;
      places.copy(match->place, next, L);
      bool differs = true;
      for (int64_t k = 0; k < count && differs; k++)
        differs = !std::equal(next, next + L, tokens + k * L);
      if (!differs) continue;
      const bool in_kept = match->place < kept.size;
      matched[count++] = length + in_kept * lengths.longest;
    }
  }
  for (; count < K; count++) {
    places.copy(0, tokens + count * L, L);
    matched[count] = 0;
  }
}

// The constants of `Rates` in drafts/ngram_estimates.py, in its order.
struct Rates {
  explicit Rates(at::ArrayRef<double> rates) {
    TORCH_CHECK(rates.size() == 6, "there are 6 constants of rates; these are ", rates.size());
    fading = float(rates[0]);
    prior = float(rates[1]);
    most = float(rates[2]);
    first_hope = float(rates[3]);
    hoped_tokens = int64_t(rates[4]);
    later_hope = float(rates[5]);
  }
  float fading, prior, most, first_hope, later_hope;
  int64_t hoped_tokens;
};

// The drafted chains of one sequence.
struct Drafted {
  Chains chains;
  int64_t* parents;  // [K L], as in `Candidates`
  // [K L], log of the probability of every path; -inf: a chain before has its node, or there is
  // none
  float* values;
  float* outcomes;  // [M, K, D, 2], accepted and tried candidates by length, rank and depth
  int64_t M, D;
  float* key(int64_t k, int64_t depth) const {
    const int64_t m = std::min(chains.lengths[k], M) - 1;
    return outcomes + ((m * chains.K + k) * D + std::min(depth, D - 1)) * 2;
  }
  // Returns the tokens that match; outcomes of matches in kept texts lie behind those of the M / 2
  // lengths in the text.
  int64_t tokens_of(int64_t length) const { return (length - 1) % (M / 2) + 1; }
};

// Learns from the tokens that were decided. Writes: the outcomes. seen: reused
void learn(const Drafted& drafted, const int64_t* decided, int64_t count, float fading,
           std::vector<float>& seen) {
  const auto [K, L, tokens, lengths] = drafted.chains;
  const int64_t size = drafted.M * K * drafted.D * 2;
  seen.assign(size, 0.0f);
  for (int64_t k = 0; k < K; k++) {
    for (int64_t d = 0; lengths[k] > 0 && d < std::min(count, L); d++) {
      const int64_t i = k * L + d;
      const bool hit = tokens[i] == decided[d];
      if (drafted.values[i] > -INFINITY) {
        float* const key = &seen[drafted.key(k, d) - drafted.outcomes];
        key[0] += hit;
        key[1] += 1;
      }
      if (!hit) break;
    }
  }
  for (int64_t i = 0; i < size; i += 2) {
    const float tried = seen[i + 1];
    if (tried == 0) continue;
    for (int64_t j = i; j < i + 2; j++)
      drafted.outcomes[j] = drafted.outcomes[j] * std::pow(fading, tried) + seen[j];
  }
}

// Returns the rate at which a candidate is accepted.
float rate_of(const Drafted& drafted, const Rates& rates, int64_t k, int64_t depth) {
  float hope = rates.later_hope;
  if (depth == 0) {  // it is learnt from every cycle, so that little has to be hoped for
    const int64_t matched = drafted.tokens_of(drafted.chains.lengths[k]);
    hope = rates.first_hope * float(std::min(matched, rates.hoped_tokens));
  }
  const float* const key = drafted.key(k, depth);
  const float rate = (key[0] + rates.prior * hope / float(1 + k)) / (key[1] + rates.prior);
  return std::min(rate, rates.most);
}

// Estimates how probable the continuations are. Writes: values, parents; expected [sizes], the sums
// of the largest `size - 1` probabilities. path: reused
void estimate(const Drafted& drafted, const Rates& rates, at::IntArrayRef sizes, float* expected,
              std::vector<float>& path) {
  const auto [K, L, tokens, lengths] = drafted.chains;
  path.assign(K * L, 0.0f);
  for (int64_t k = 0; k < K; k++) {
    int64_t above = -1;
    for (int64_t d = 0; d < L; d++) {
      const int64_t* const chain = tokens + k * L;
      int64_t owner = 0;  // the first chain that begins so
      while (owner < k &&
             !(lengths[owner] > 0 && std::equal(chain, chain + d + 1, tokens + owner * L)))
        owner++;
      const int64_t node = k * L + d;
      drafted.parents[node] = above;
      if (owner == k && lengths[k] > 0)
        path[node] = (above < 0 ? 1.0f : path[above]) * rate_of(drafted, rates, k, d);
      drafted.values[node] = path[node] > 0 ? std::log(path[node]) : -INFINITY;
      above = owner * L + d;
    }
  }
  int64_t most = 0;
  for (const int64_t size : sizes) most = std::max(most, std::min(size - 1, K * L));
  std::partial_sort(path.begin(), path.begin() + most, path.end(), std::greater<float>());
  for (size_t s = 0; s < sizes.size(); s++) {
    const int64_t count = std::clamp<int64_t>(sizes[s] - 1, 0, K * L);
    expected[s] = std::accumulate(path.begin(), path.begin() + count, 0.0f);
  }
}

template <class T> T* written(const at::Tensor& t, at::IntArrayRef shape, const char* name) {
  TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
  const Operand<T> checked(t, shape, name);
  return t.mutable_data_ptr<T>();
}

}  // namespace

// Finds the best continuations in kept texts [C] and in each text, pairwise different.
// Returns: tokens [B, K, L]; the tokens that match, 0 where there is no continuation, [B, K],
// `longest` more in a kept text.
Tensors<2> ngram_match(const at::Tensor& text, const at::Tensor& pos,
                       const std::optional<at::Tensor>& kept, int64_t tokens, int64_t branches,
                       int64_t least, int64_t longest) {
  const int64_t B = text.size(0);
  const int64_t K = branches;
  const int64_t L = tokens;
  const at::Tensor chains = at::empty({B, K, L}, text.options());
  const at::Tensor matched = at::empty({B, K}, text.options());
  const Lengths lengths(least, longest);
  const Texts texts(text, pos);
  const Kept before(kept);
  std::vector<Match> found;
  for (int64_t b = 0; b < B; b++) {
    int64_t* const to = chains.mutable_data_ptr<int64_t>() + b * K * L;
    const Chains one{K, L, to, matched.mutable_data_ptr<int64_t>() + b * K};
    continuations(before, texts[b], lengths, one, found);
  }
  return {chains, matched};
}

// Adds chains [B, K, L] below the root to a pool, [B, P] each. The value of chain k is -k, or -inf
// where its length [B, K] is 0. Where the pool has a chain's node, that is used and its value
// raised.
// Returns: the pool, [B, P + K L] each.
Tensors<3> add_chains(const at::Tensor& tokens, const at::Tensor& values, const at::Tensor& parents,
                      const at::Tensor& chains, const at::Tensor& lengths) {
  TORCH_CHECK(tokens.dim() == 2 && chains.dim() == 3, "tokens must be [B, P], chains [B, K, L]");
  const int64_t B = tokens.size(0);
  const int64_t P = tokens.size(1);
  const int64_t K = chains.size(1);
  const int64_t L = chains.size(2);
  const int64_t size = P + K * L;
  const at::Tensor new_tokens = at::empty({B, size}, tokens.options());
  const at::Tensor new_values = at::empty({B, size}, values.options());
  const at::Tensor new_parents = at::empty_like(new_tokens);
  const Whole token_of(tokens, {B, P}, "tokens");
  const Operand<float> value_of(values, {B, P}, "values");
  const Whole parent_of(parents, {B, P}, "parents");
  const Whole drafted(chains, {B, K, L}, "chains");
  const Whole matched(lengths, {B, K}, "lengths");
  for (int64_t b = 0; b < B; b++) {
    int64_t* token = new_tokens.mutable_data_ptr<int64_t>() + b * size;
    int64_t* parent = new_parents.mutable_data_ptr<int64_t>() + b * size;
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
        const auto is_same = [&](int64_t i) {
          return parent[i] == above && token[i] == next && value[i] > -INFINITY;
        };
        int64_t same = 0;
        while (same < end && !is_same(same)) same++;
        token[end] = next;
        parent[end] = above;
        value[end] = of_chain;
        if (same < end) {
          value[same] = std::max(value[same], of_chain);
          value[end] = -INFINITY;
        }
        above = same;
      }
    }
  }
  return {new_tokens, new_values, new_parents};
}

// Learns from the tokens that were decided since the last call, searches kept texts [C] and the
// text for what may follow, and estimates how probable that is. The other tensors are the state, as
// in `Lookup` of drafts/ngram_estimates.py, and written. sizes: of trees; rates: as in `Rates`
void ngram_draft(const at::Tensor& text, const at::Tensor& pos,
                 const std::optional<at::Tensor>& kept, const at::Tensor& tokens,
                 const at::Tensor& values, const at::Tensor& parents, const at::Tensor& lengths,
                 const at::Tensor& root, const at::Tensor& outcomes, const at::Tensor& expected,
                 int64_t least, int64_t longest, at::IntArrayRef sizes,
                 at::ArrayRef<double> rates) {
  TORCH_CHECK(outcomes.dim() == 5 && tokens.dim() == 2 && outcomes.size(1) > 1,
              "outcomes must be [B, M, K, D, 2]");
  const Lengths searched(least, longest);
  const Rates constants(rates);
  const Texts texts(text, pos);
  const Kept before(kept);
  const int64_t B = texts.count;
  const int64_t P = tokens.size(1);
  const int64_t S = int64_t(sizes.size());
  const int64_t M = outcomes.size(1);
  const int64_t K = outcomes.size(2);
  const int64_t D = outcomes.size(3);
  const int64_t L = P / std::max<int64_t>(K, 1);
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
    float* const own = counted + b * M * K * D * 2;
    const Drafted drafted{chains, parent + b * P, value + b * P, own, M, D};
    const int64_t seen = from[b];
    if (seen >= 0 && seen < one.root)
      learn(drafted, one.tokens + seen + 1, one.root - seen, constants.fading, scratch);
    continuations(before, one, searched, chains, found);
    estimate(drafted, constants, sizes, sums + b * S, scratch);
    from[b] = one.root;
  }
}

OPERATORS(m) {
  m.def(
      "ngram_match(Tensor text, Tensor pos, Tensor? kept, int tokens, int branches, int least, "
      "int longest) -> (Tensor, Tensor)", cpu(ngram_match));
  m.def(
      "ngram_draft(Tensor text, Tensor pos, Tensor? kept, Tensor(a!) tokens, Tensor(b!) values, "
      "Tensor(c!) parents, Tensor(d!) lengths, Tensor(e!) root, Tensor(f!) outcomes, "
      "Tensor(g!) expected, int least, int longest, int[] sizes, float[] rates) -> ()",
      cpu(ngram_draft));
  m.def(
      "add_chains(Tensor tokens, Tensor values, Tensor parents, Tensor chains, Tensor lengths) "
      "-> (Tensor, Tensor, Tensor)", cpu(add_chains));
}

}  // namespace ngram
