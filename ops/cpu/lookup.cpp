// Lookup of continuations in the text so far on a CPU: the operators of extras/ngram_draft.py, which describes them.

#include "common.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

namespace lookup {
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

}  // namespace

// Finds the best continuations in kept texts [C] and in each text, pairwise different. Returns: tokens [B, K, L]; the
// tokens that match, 0 where there is no continuation, [B, K], `longest` more in a kept text.
std::tuple<at::Tensor, at::Tensor> lookup(const at::Tensor& text, const at::Tensor& pos,
                                          const std::optional<at::Tensor>& kept, int64_t tokens, int64_t branches,
                                          int64_t least, int64_t longest) {
  TORCH_CHECK(0 < least && least <= longest, "a match has 1 token or more; it is ", least, " to ", longest);
  const Texts texts(text, pos);
  const int64_t B = texts.count, K = branches, L = tokens;
  const int64_t C = kept ? kept->numel() : 0;
  const auto before = optional<int64_t>(kept, {C}, "kept");
  TORCH_CHECK(C == 0 || (*before)[C - 1] < 0, "no separator behind the kept texts");
  const at::Tensor chains = at::empty({B, K, L}, text.options());
  const at::Tensor matched = at::zeros({B, K}, text.options());
  std::vector<Match> found;
  for (int64_t b = 0; b < B; b++) {
    const Places places(before ? before->data : nullptr, C, texts[b]);
    places.find(found, least, longest);
    int64_t* const chain = chains.mutable_data_ptr<int64_t>() + b * K * L;
    int64_t count = 0;  // of chains so far
    // the longest match first, of equal ones the latest
    for (int64_t length = longest; length >= least && count < K; length--)
      for (auto match = found.rbegin(); match != found.rend() && count < K; ++match) {
        if (match->length != length) continue;
        int64_t* const next = chain + count * L;
        places.copy(match->place, next, L);
        bool differs = true;
        for (int64_t k = 0; k < count && differs; k++) differs = !std::equal(next, next + L, chain + k * L);
        const bool in_kept = match->place < C;
        if (differs) matched.mutable_data_ptr<int64_t>()[b * K + count++] = length + in_kept * longest;
      }
    for (; count < K; count++) places.copy(0, chain + count * L, L);
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

// Learns from the tokens that were decided behind `root` [B], -1: none were looked up. tokens, values: [B, K L], the
// candidates; lengths: [B, K]; outcomes: [B, M, K, D, 2], accepted and tried candidates by length, rank and depth, written.
void learn(const at::Tensor& text, const at::Tensor& pos, const at::Tensor& tokens, const at::Tensor& values,
           const at::Tensor& lengths, const at::Tensor& root, const at::Tensor& outcomes) {
  const Texts texts(text, pos);
  TORCH_CHECK(outcomes.dim() == 5 && tokens.dim() == 2 && outcomes.is_contiguous(), "outcomes must be [B, M, K, D, 2]");
  const int64_t B = texts.count, M = outcomes.size(1), K = outcomes.size(2), D = outcomes.size(3), P = tokens.size(1);
  const int64_t L = P / std::max<int64_t>(K, 1);
  const Whole token(tokens, {B, P}, "tokens"), length(lengths, {B, K}, "lengths"), from(root, {B}, "root");
  const Operand<float> value(values, {B, P}, "values");
  const Operand<float> counted(outcomes, {B, M, K, D, 2}, "outcomes");
  std::vector<float> seen(M * K * D * 2);
  for (int64_t b = 0; b < B; b++) {
    const Text one = texts[b];
    if (from[b] < 0 || from[b] >= one.root) continue;
    const int64_t decided = std::min(one.root - from[b], L);
    std::fill(seen.begin(), seen.end(), 0.f);
    for (int64_t k = 0; k < K; k++)
      for (int64_t d = 0; length[b * K + k] > 0 && d < decided; d++) {
        const int64_t i = b * P + k * L + d, m = std::min(length[b * K + k], M) - 1;
        const bool hit = token[i] == one.tokens[from[b] + 1 + d];
        float* const key = &seen[((m * K + k) * D + std::min(d, D - 1)) * 2];
        if (value[i] > -INFINITY) key[0] += hit, key[1] += 1;
        if (!hit) break;
      }
    float* const sums = outcomes.mutable_data_ptr<float>() + b * M * K * D * 2;
    for (int64_t i = 0; i < M * K * D * 2; i++)
      if (seen[i | 1] > 0) sums[i] = sums[i] * std::pow(FADING, seen[i | 1]) + seen[i];
  }
}

// Estimates how probable continuations are. tokens: [B, K L]; lengths: [B, K]; outcomes: [B, M, K, D, 2]; sizes: of trees.
// Returns: the log of the probability of every path, -inf where a chain before has its node, [B, K L]; the parents
// [B, K L]; the sums of the largest `size - 1` probabilities, [B, sizes].
std::tuple<at::Tensor, at::Tensor, at::Tensor> estimate(const at::Tensor& tokens, const at::Tensor& lengths,
                                                        const at::Tensor& outcomes, at::IntArrayRef sizes) {
  TORCH_CHECK(outcomes.dim() == 5 && tokens.dim() == 2 && outcomes.size(1) > 1, "outcomes must be [B, M, K, D, 2]");
  const int64_t B = tokens.size(0), P = tokens.size(1);
  const int64_t M = outcomes.size(1), K = outcomes.size(2), D = outcomes.size(3), L = P / std::max<int64_t>(K, 1);
  const Whole token(tokens, {B, P}, "tokens"), length(lengths, {B, K}, "lengths");
  const Operand<float> counted(outcomes, {B, M, K, D, 2}, "outcomes");
  const at::Tensor values = at::empty({B, P}, outcomes.options()), parents = at::empty_like(tokens);
  const at::Tensor expected = at::empty({B, int64_t(sizes.size())}, outcomes.options());
  std::vector<float> path(P);  // probabilities
  for (int64_t b = 0; b < B; b++) {
    float* const value = values.mutable_data_ptr<float>() + b * P;
    int64_t* const parent = parents.mutable_data_ptr<int64_t>() + b * P;
    const int64_t* const drafted = token.data + b * P;
    for (int64_t k = 0; k < K; k++) {
      const int64_t match = length[b * K + k];
      int64_t above = -1;
      for (int64_t d = 0; d < L; d++) {
        int64_t owner = 0;  // the first chain that begins so
        while (owner < k && !(length[b * K + owner] > 0 &&
                              std::equal(drafted + k * L, drafted + k * L + d + 1, drafted + owner * L)))
          owner++;
        const int64_t node = k * L + d;
        parent[node] = above;
        path[node] = 0;
        if (owner == k && match > 0) {
          const float* const key = &counted.data[(((b * M + std::min(match, M) - 1) * K + k) * D + std::min(d, D - 1)) * 2];
          // the first token is learnt from every cycle, so that little has to be hoped for
          const float hope = d == 0 ? .1f * float(std::min<int64_t>(tokens_of(match, M), 6)) : .6f;
          const float rate = std::min((key[0] + PRIOR * hope / float(1 + k)) / (key[1] + PRIOR), MOST);
          path[node] = (above < 0 ? 1.f : path[above]) * rate;
        }
        value[node] = std::log(path[node]);
        above = owner * L + d;
      }
    }
    std::sort(path.begin(), path.end(), std::greater<float>());
    for (size_t s = 0; s < sizes.size(); s++) {
      float sum = 0;
      for (int64_t i = 0; i < std::min(sizes[s] - 1, P); i++) sum += path[i];
      expected.mutable_data_ptr<float>()[b * int64_t(sizes.size()) + int64_t(s)] = sum;
    }
  }
  return {values, parents, expected};
}

}  // namespace lookup
