// Lookup of continuations in the text so far on a CPU: the operators of extras/ngram_draft.py, which describes them.

#include "common.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>

namespace lookup {
namespace {

struct Text {  // of one sequence
  const int64_t* tokens;
  int64_t size, root;  // root: the last decided token; continuations follow it

  // Returns how many tokens up to place `at`, before the root, equal the last ones, at most `longest`.
  int64_t match_length(int64_t at, int64_t longest) const {
    int64_t length = 0;
    while (length < longest && length <= at && tokens[at - length] == tokens[root - length]) length++;
    return length;
  }
  // Returns token `step` after place `at`; a copy that reaches the end of the text continues with itself.
  int64_t copied(int64_t at, int64_t step) const {
    const int64_t period = std::max<int64_t>(root - at, 1);
    return tokens[std::min(at + 1 + step % period, size - 1)];
  }
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

}  // namespace

// Checks that an earlier place matches at least the last `least` tokens of a text. text: [B, S]; pos: [B].
// Returns: [B] int64, 0 or 1.
at::Tensor has_match(const at::Tensor& text, const at::Tensor& pos, int64_t least, int64_t longest) {
  const Texts texts(text, pos);
  const at::Tensor found = at::zeros_like(pos);
  for (int64_t b = 0; b < texts.count; b++) {
    const Text one = texts[b];
    int64_t& any = found.mutable_data_ptr<int64_t>()[b];
    for (int64_t at = 0; at < one.root && !any; at++) any = one.match_length(at, longest) >= least;
  }
  return found;
}

// Finds the best continuations, pairwise different. Returns: tokens [B, K, L]; found [B, K] bool.
std::tuple<at::Tensor, at::Tensor> lookup(const at::Tensor& text, const at::Tensor& pos, int64_t tokens,
                                          int64_t branches, int64_t least, int64_t longest) {
  const Texts texts(text, pos);
  const int64_t B = texts.count, K = branches, L = tokens;
  const at::Tensor chains = at::empty({B, K, L}, text.options());
  const at::Tensor found = at::empty({B, K}, text.options().dtype(at::kBool));
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < B; b++) {
    const Text one = texts[b];
    lengths.resize(one.root);
    for (int64_t at = 0; at < one.root; at++) lengths[at] = one.match_length(at, longest);
    for (int64_t k = 0; k < K; k++) {
      int64_t best = -1;  // the longest match, of equal ones the latest
      for (int64_t at = 0; at < one.root; at++)
        if (lengths[at] >= least && (best < 0 || lengths[at] >= lengths[best])) best = at;
      int64_t* chain = chains.mutable_data_ptr<int64_t>() + (b * K + k) * L;
      found.mutable_data_ptr<bool>()[b * K + k] = best >= 0;
      for (int64_t step = 0; step < L; step++) chain[step] = one.copied(std::max<int64_t>(best, 0), step);
      for (int64_t at = 0; at < one.root; at++) {  // another continuation must differ
        bool same = lengths[at] >= least;
        for (int64_t step = 0; step < L && same; step++) same = one.copied(at, step) == chain[step];
        if (same) lengths[at] = -1;
      }
    }
  }
  return {chains, found};
}

// Adds chains [B, K, L] below the root to a pool, [B, P] each. The value of chain k is -k, or -inf where `found` [B, K]
// is false. Where the pool has a chain's node, that is used and its value raised. Returns: the pool, [B, P + K L] each.
std::tuple<at::Tensor, at::Tensor, at::Tensor> add_chains(const at::Tensor& tokens, const at::Tensor& values,
                                                          const at::Tensor& parents, const at::Tensor& chains,
                                                          const at::Tensor& found) {
  TORCH_CHECK(tokens.dim() == 2 && chains.dim() == 3, "tokens must be [B, P], chains [B, K, L]");
  const int64_t B = tokens.size(0), P = tokens.size(1), K = chains.size(1), L = chains.size(2), size = P + K * L;
  const Whole token_of(tokens, {B, P}, "tokens"), parent_of(parents, {B, P}, "parents");
  const Whole drafted(chains, {B, K, L}, "chains");
  const Operand<float> value_of(values, {B, P}, "values");
  const Truth there(found, {B, K}, "found");
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
      const float of_chain = there[b * K + k] ? -float(k) : -INFINITY;
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

}  // namespace lookup
