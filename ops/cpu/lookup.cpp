// Looking up continuations in the text so far on a CPU: the operators of extras/ngram_draft.py, which says what they do.

#include "common.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>

namespace lookup {
namespace {

// How many tokens up to place `at`, which is before `pos`, equal the last ones of the text, at most `longest`
int64_t match_length(const int64_t* text, int64_t pos, int64_t at, int64_t longest) {
  int64_t length = 0;
  while (length < longest && length <= at && text[at - length] == text[pos - length]) length++;
  return length;
}

// Step `step` of what place `at` continues with: a copy that reaches the end of the text runs on into itself
int64_t copied(const int64_t* text, int64_t S, int64_t pos, int64_t at, int64_t step) {
  const int64_t period = std::max<int64_t>(pos - at, 1);
  return text[std::min(at + 1 + step % period, S - 1)];
}

}  // namespace

// text: [B, S]; pos: [B]. Returns: [B, S] int64, 0 at the root itself and past it.
at::Tensor match_lengths(const at::Tensor& text, const at::Tensor& pos, int64_t longest) {
  const int64_t B = text.size(0), S = text.size(1);
  const at::Tensor length = at::zeros_like(text);
  for (int64_t b = 0; b < B; b++) {
    const int64_t *tokens = text.const_data_ptr<int64_t>() + b * S, root = pos.const_data_ptr<int64_t>()[b];
    for (int64_t at = 0; at < root; at++)
      length.mutable_data_ptr<int64_t>()[b * S + at] = match_length(tokens, root, at, longest);
  }
  return length;
}

// The best continuations, pairwise different. Returns: tokens [B, K, L]; which of them are there, [B, K].
std::tuple<at::Tensor, at::Tensor> lookup(const at::Tensor& text, const at::Tensor& pos, int64_t tokens,
                                          int64_t branches, int64_t least, int64_t longest) {
  const int64_t B = text.size(0), S = text.size(1), K = branches, L = tokens;
  const at::Tensor chains = at::empty({B, K, L}, text.options());
  const at::Tensor found = at::empty({B, K}, text.options().dtype(at::kBool));
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < B; b++) {
    const int64_t *of = text.const_data_ptr<int64_t>() + b * S, root = pos.const_data_ptr<int64_t>()[b];
    lengths.resize(root);
    for (int64_t at = 0; at < root; at++) lengths[at] = match_length(of, root, at, longest);
    for (int64_t k = 0; k < K; k++) {
      int64_t best = -1;  // the longest match, of equal ones the latest
      for (int64_t at = 0; at < root; at++)
        if (lengths[at] >= least && (best < 0 || lengths[at] >= lengths[best])) best = at;
      int64_t* chain = chains.mutable_data_ptr<int64_t>() + (b * K + k) * L;
      found.mutable_data_ptr<bool>()[b * K + k] = best >= 0;
      for (int64_t step = 0; step < L; step++) chain[step] = copied(of, S, root, std::max<int64_t>(best, 0), step);
      for (int64_t at = 0; at < root; at++) {  // another continuation must differ
        bool same = lengths[at] >= least;
        for (int64_t step = 0; step < L && same; step++) same = copied(of, S, root, at, step) == chain[step];
        if (same) lengths[at] = 0;
      }
    }
  }
  return {chains, found};
}

// Adds chains below the root to a pool, [B, P] each: chains [B, K, L], of value -k each, of which `found` [B, K] are
// there. Where the pool has a chain's node, that is used, and its value raised. Returns: the pool, [B, P + K L] each.
std::tuple<at::Tensor, at::Tensor, at::Tensor> add_chains(const at::Tensor& tokens, const at::Tensor& values,
                                                          const at::Tensor& parents, const at::Tensor& chains,
                                                          const at::Tensor& found) {
  const int64_t B = tokens.size(0), P = tokens.size(1), K = chains.size(1), L = chains.size(2), size = P + K * L;
  const at::Tensor new_tokens = at::empty({B, size}, tokens.options()), new_parents = at::empty_like(new_tokens);
  const at::Tensor new_values = at::empty({B, size}, values.options());
  for (int64_t b = 0; b < B; b++) {
    int64_t *token = new_tokens.mutable_data_ptr<int64_t>() + b * size;
    int64_t *parent = new_parents.mutable_data_ptr<int64_t>() + b * size;
    float* value = new_values.mutable_data_ptr<float>() + b * size;
    std::copy_n(tokens.const_data_ptr<int64_t>() + b * P, P, token);
    std::copy_n(parents.const_data_ptr<int64_t>() + b * P, P, parent);
    std::copy_n(values.const_data_ptr<float>() + b * P, P, value);
    int64_t end = P;
    for (int64_t k = 0; k < K; k++) {
      const float of_chain = found.const_data_ptr<bool>()[b * K + k] ? -float(k) : -INFINITY;
      int64_t above = -1;
      for (int64_t step = 0; step < L; step++, end++) {
        const int64_t drafted = chains.const_data_ptr<int64_t>()[(b * K + k) * L + step];
        int64_t same = end;  // where there is none
        for (int64_t i = 0; i < end && same == end; i++)
          if (parent[i] == above && token[i] == drafted && value[i] > -INFINITY) same = i;
        token[end] = drafted, parent[end] = above, value[end] = same < end ? -INFINITY : of_chain;
        if (same < end) value[same] = std::max(value[same], of_chain);
        above = same;
      }
    }
  }
  return {new_tokens, new_values, new_parents};
}

}  // namespace lookup
