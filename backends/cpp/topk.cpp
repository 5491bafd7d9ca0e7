// The best scores of rows on a CPU: the k best with the logsumexp, and the best one with noise.
//
// 1. `topk` keeps a sorted list of the k best so far and passes over the row in chunks. A chunk is
//    skipped if its largest score does not beat the last of the list, so a row costs about one
//    maximum per element. The second pass adds up the exponentials.
// 2. `best` adds the noise of a node's draw while it searches for the largest sum.
//
// A row's result does not depend on the other rows. Scores are not NaN.

#include "topk.h"

#include "exponential.h"
#include "operands.h"
#include "operators.h"
#include "threads.h"

#include <algorithm>
#include <cmath>

namespace topk {
namespace {

constexpr int64_t CHUNK = 64;       // scores that are passed over together
constexpr int64_t GRAIN = 1 << 15;  // elements that pay for a thread's wake-up

}  // namespace

void best_of(const float* x, int64_t n, int64_t k, float* best, int64_t* index) {
  int64_t held = 0;
  const auto offer = [&](int64_t i) {
    if (held == k && !(x[i] > best[k - 1])) return;
    int64_t place = held < k ? held++ : k - 1;
    for (; place > 0 && x[i] > best[place - 1]; place--) {
      best[place] = best[place - 1];
      index[place] = index[place - 1];
    }
    best[place] = x[i];
    index[place] = i;
  };
  int64_t i = 0;
  for (; i < k; i++) offer(i);
  for (; i + CHUNK <= n; i += CHUNK) {
    float lanes[LANES];
    for (int l = 0; l < LANES; l++) lanes[l] = x[i + l];
    for (int64_t j = i + LANES; j < i + CHUNK; j += LANES)
      for (int l = 0; l < LANES; l++) lanes[l] = x[j + l] > lanes[l] ? x[j + l] : lanes[l];
    bool beaten = false;
    for (int l = 0; l < LANES; l++) beaten |= lanes[l] > best[k - 1];
    if (beaten)
      for (int64_t j = i; j < i + CHUNK; j++) offer(j);
  }
  for (; i < n; i++) offer(i);
}

// Computes `topk` of reference.py.
Tensors<3> topk(const at::Tensor& scores, int64_t k) {
  TORCH_CHECK(scores.scalar_type() == at::kFloat, "scores must be float32");
  const at::Tensor rows = scores.contiguous();
  const int64_t n = rows.size(-1);
  TORCH_CHECK(0 < k && k <= n, "k must be 1 to ", n, "; it is ", k);
  const at::Tensor values = empty_rows(rows, k, at::kFloat);
  const at::Tensor index = empty_rows(rows, k, at::kLong);
  const at::Tensor total = empty_rows(rows, 1, at::kFloat);
  const float* x = rows.const_data_ptr<float>();
  float* best = values.mutable_data_ptr<float>();
  float* sum = total.mutable_data_ptr<float>();
  int64_t* where = index.mutable_data_ptr<int64_t>();
  each_row(rows.numel() / n, GRAIN / n, [&](int64_t r) {
    best_of(x + r * n, n, k, best + r * k, where + r * k);
    sum[r] = float(best[r * k] + std::log(exponential_sum(x + r * n, n, best[r * k])));
  });
  return {values, index, total};
}

// Computes `best` of reference.py. scores: [B, N, V]; noise: [B, R, V]; row: [B, N]
at::Tensor best(const at::Tensor& scores, const std::optional<at::Tensor>& noise,
                const std::optional<at::Tensor>& row) {
  const at::Tensor from = scores.contiguous();
  TORCH_CHECK(from.numel(), "there are no scores");
  const int64_t B = from.size(0);
  const int64_t N = from.size(1);
  const int64_t n = from.size(2);
  const int64_t draws = noise ? noise->size(1) : 0;
  const at::Tensor token = at::empty({B, N}, from.options().dtype(at::kLong));
  const at::Tensor added = noise ? noise->contiguous() : from;
  const at::Tensor which = row ? row->contiguous() : token;
  TORCH_CHECK(!noise || (row && which.numel() == B * N && added.size(0) == B && added.size(2) == n),
              "noise must be [B, R, V], and row [B, N]");
  const float* x = from.const_data_ptr<float>();
  const float* g = added.const_data_ptr<float>();
  const int64_t* of = which.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < B * N && noise; i++)
    TORCH_CHECK(of[i] >= 0 && of[i] < draws, "there is no row ", of[i], " of noise");
  int64_t* to = token.mutable_data_ptr<int64_t>();
  constexpr int64_t PIECE = 1024;
  each_row(B * N, GRAIN / n, [&](int64_t r) {
    const float* more = noise ? g + (r / N * draws + of[r]) * n : nullptr;
    float most = -INFINITY, sums[PIECE];
    to[r] = 0;
    for (int64_t first = 0; first < n; first += PIECE) {
      const int64_t size = std::min(PIECE, n - first);
      const float* s = x + r * n + first;
      if (more) {
        for (int64_t i = 0; i < size; i++) sums[i] = s[i] + more[first + i];
        s = sums;
      }
      const float top = largest(s, size);
      if (top > most) {
        most = top;
        to[r] = first + (std::find(s, s + size, top) - s);
      }
    }
  });
  return token;
}

OPERATORS(m) {
  m.def("topk(Tensor scores, int k) -> (Tensor, Tensor, Tensor)", cpu(topk));
  m.def("best(Tensor scores, Tensor? noise, Tensor? row) -> Tensor", cpu(best));
}

}  // namespace topk
