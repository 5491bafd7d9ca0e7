// Row operations between a model's products on a CPU: top-k with the normalizer, the rotary embedding, moves of rows
// within a cache. PyTorch's operators and the compiler's loops do this work several times.
//
// 1. `topk` keeps a sorted list of the k best so far and passes over the row in chunks. A chunk whose largest score
//    does not beat the last of the list is skipped, so a row costs about one maximum per element. The second pass adds
//    up the exponentials.
// 2. `rotary` turns the heads of queries and keys. Its cosines and sines come as tensors: a compiler that fuses them
//    computes them again for every head of every layer.
// 3. `angles` computes cosines and sines, once for all layers.
// 4. `move_rows` touches the rows that do move, which are few: often only the tail of a path moves.
//
// Products are rounded before they are added, as PyTorch's operators do, so that the bits of eager code come out.

#include "common.h"

#include <algorithm>
#include <cmath>

namespace rows {
namespace {

constexpr int64_t CHUNK = 64;       // scores that are passed over together
constexpr int64_t GRAIN = 1 << 15;  // elements that pay for a thread's wake-up

// ------------------------------------------------------------------------------------------------- top-k

// The k best of x [n], best first, of equal ones the lower index first.
void best_of(const float* x, int64_t n, int64_t k, float* best, int64_t* index) {
  int64_t held = 0;
  const auto offer = [&](int64_t i) {
    if (held == k && !(x[i] > best[k - 1])) return;
    int64_t place = held < k ? held++ : k - 1;
    for (; place > 0 && x[i] > best[place - 1]; place--) best[place] = best[place - 1], index[place] = index[place - 1];
    best[place] = x[i], index[place] = i;
  };
  int64_t i = 0;
  for (; i < k; i++) offer(i);
  for (; i + CHUNK <= n; i += CHUNK) {
    float lanes[LANES];
    for (int l = 0; l < LANES; l++) lanes[l] = x[i + l];
    for (int64_t j = LANES; j < CHUNK; j += LANES)
      for (int l = 0; l < LANES; l++) lanes[l] = x[i + j + l] > lanes[l] ? x[i + j + l] : lanes[l];
    bool beaten = false;
    for (int l = 0; l < LANES; l++) beaten |= lanes[l] > best[k - 1];
    if (beaten)
      for (int64_t j = i; j < i + CHUNK; j++) offer(j);
  }
  for (; i < n; i++) offer(i);
}

// `topk_logsumexp` of ops/rows.py.
std::tuple<at::Tensor, at::Tensor, at::Tensor> topk(const at::Tensor& scores, int64_t k) {
  TORCH_CHECK(scores.scalar_type() == at::kFloat, "scores must be float32");
  const at::Tensor rows = scores.contiguous();
  const int64_t n = rows.size(-1), count = rows.numel() / n;
  TORCH_CHECK(0 < k && k <= n, "k must be 1 to ", n, "; it is ", k);
  const at::Tensor values = empty_rows(rows, k, at::kFloat), index = empty_rows(rows, k, at::kLong);
  const at::Tensor total = empty_rows(rows, 1, at::kFloat);
  const float* x = rows.const_data_ptr<float>();
  float *best = values.mutable_data_ptr<float>(), *sum = total.mutable_data_ptr<float>();
  int64_t* where = index.mutable_data_ptr<int64_t>();
  parallel(count, std::max<int64_t>(1, GRAIN / n), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      best_of(x + r * n, n, k, best + r * k, where + r * k);
      sum[r] = float(best[r * k] + std::log(exponential_sum(x + r * n, n, best[r * k])));
    }
  });
  return {values, index, total};
}

// ------------------------------------------------------------------------------------------------ rotary

template <class T>
void rotate_rows(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& q,
                 const at::Tensor& k, T* to_q) {
  const int64_t rows = qkv.size(0) * qkv.size(1), all = qkv.size(2), e = qkv.size(3);
  const int64_t heads = q.size(2), kv_heads = k.size(2);
  const T* x = qkv.const_data_ptr<T>();
  T* to_k = k.mutable_data_ptr<T>();
  const float *c = cos.const_data_ptr<float>(), *s = sin.const_data_ptr<float>();
  parallel(rows, std::max<int64_t>(1, GRAIN / (all * e)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      for (int64_t h = 0; h < heads + kv_heads; h++) {
        T* y = h < heads ? to_q + (r * heads + h) * e : to_k + (r * kv_heads + h - heads) * e;
        rotate(x + (r * all + h) * e, c + r * e, s + r * e, e, y);
      }
  });
}

}  // namespace

// `rotary` of ops/attention.py, for bfloat16 and float32.
std::tuple<at::Tensor, at::Tensor> rotary(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                                          int64_t heads, int64_t kv_heads) {
  const int64_t B = qkv.size(0), T = qkv.size(1), e = qkv.size(3);
  TORCH_CHECK(e % 2 == 0 && heads + kv_heads <= qkv.size(2), heads, " + ", kv_heads, " heads of ", e,
              " elements are not in ", qkv.size(2), " heads");
  TORCH_CHECK(cos.numel() == B * T * e && sin.numel() == B * T * e,
              "cos and sin must hold an angle per row and element");
  const at::Tensor x = qkv.contiguous(), c = cos.contiguous(), s = sin.contiguous();
  const at::Tensor q = at::empty({B, T, heads, e}, qkv.options()), k = at::empty({B, T, kv_heads, e}, qkv.options());
  fill(q, [&](auto* to_q) { rotate_rows(x, c, s, q, k, to_q); });
  return {q, k};
}

// `rope_angles` of ops/attention.py: cosines and sines of positions [B, T] int64 times freq [E/2] fp32, times factor;
// both [B, T, 1, E] fp32.
std::tuple<at::Tensor, at::Tensor> angles(const at::Tensor& freq, const at::Tensor& positions, double factor) {
  const at::Tensor at_row = positions.contiguous(), of = freq.contiguous();
  const int64_t rows = at_row.numel(), half = of.numel();
  const at::Tensor cos = at::empty({positions.size(0), positions.size(1), 1, 2 * half}, of.options());
  const at::Tensor sin = at::empty(cos.sizes(), of.options());
  const float* f = of.const_data_ptr<float>();
  const int64_t* position = at_row.const_data_ptr<int64_t>();
  float *c = cos.mutable_data_ptr<float>(), *s = sin.mutable_data_ptr<float>();
  parallel(rows, std::max<int64_t>(1, GRAIN / (64 * half)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * half; i < end * half; i++) {
      const int64_t r = i / half, j = i % half, to = 2 * r * half + j;
      const float angle = float(position[r]) * f[j];
      c[to] = c[to + half] = std::cos(angle) * float(factor), s[to] = s[to + half] = std::sin(angle) * float(factor);
    }
  });
  return {cos, sin};
}

// ------------------------------------------------------------------------------------------------- moves

// `compact` of ops/attention.py, for any dtype. buffers: each [B, H, S, E]; start: [B]; path: [B, D+1]
void move_rows(at::TensorList buffers, const at::Tensor& start, const at::Tensor& path) {
  const int64_t B = buffers[0].size(0), H = buffers[0].size(1), S = buffers[0].size(2), count = path.size(1);
  const int64_t row = buffers[0].size(3) * buffers[0].element_size();  // bytes
  const at::Tensor begin = start.contiguous(), from = path.contiguous();
  for (const at::Tensor& buffer : buffers)
    TORCH_CHECK(buffer.is_contiguous() && buffer.sizes() == buffers[0].sizes(),
                "buffers must be alike, each in one piece");
  const int64_t *firsts = begin.const_data_ptr<int64_t>(), *sources = from.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < B * count; i++) {
    const int64_t first = firsts[i / count], slot = first + sources[i];
    TORCH_CHECK(first >= 0 && first + count <= S && slot >= 0 && slot < S, "a cache of ", S, " slots has no slot ",
                slot);
  }
  const int64_t grain = std::max<int64_t>(1, GRAIN / (B * H * count * row));
  parallel(int64_t(buffers.size()), grain, [&](int64_t first, int64_t last) {
    std::vector<char> held(count * row);
    for (int64_t i = first * B * H; i < last * B * H; i++) {
      const int64_t b = i / H % B, *source = sources + b * count;
      char* buffer = static_cast<char*>(buffers[i / (B * H)].data_ptr());
      char* slots = buffer + (i % (B * H) * S + firsts[b]) * row;
      for (int64_t d = 0; d < count; d++)
        if (source[d] != d) std::memcpy(&held[d * row], slots + source[d] * row, row);
      for (int64_t d = 0; d < count; d++)
        if (source[d] != d) std::memcpy(slots + d * row, &held[d * row], row);
    }
  });
}

}  // namespace rows
