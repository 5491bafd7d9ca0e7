// Linear layers with bfloat16 weights for 1 to a few hundred tokens on a CPU.
//
// 1. Weights are read where they lie, [outputs, k]. A thread takes a strip of STRIP outputs, and of it a panel of PANEL
//    values of k at a time, which it transposes: then a word holds two values of k, and a vector LANES outputs.
// 2. Tiles of up to TALL rows pass over the panel while it is in the L1 cache, with a sum for every row and output in a
//    register. AVX512-BF16 multiplies and adds in pairs; elsewhere both are widened to fp32.
// 3. Meanwhile the next panel is prefetched. In a mixture, each expert's rows pass over its own weight.
//
// A row's result does not depend on the other rows, bit for bit: every sum runs over the pairs of k in their order, the
// second value of a pair first, rounded after every product. All processors give the same bits, except that AVX512-BF16
// takes numbers below 2^-126 as zeros.
// Trade-off: transposing in every call halves the speed of a single row over weights in the L2 cache; where they come
// from memory it costs nothing. Packed weights would be a second copy of weights that embeddings and training share.

#include "common.h"

#include <ATen/ops/constant_pad_nd.h>

#include <algorithm>

namespace linear {
namespace {

using Value = at::BFloat16;

// ------------------------------------------------------------------------------------------------- pairs
// dot: acc[i] += the products of two pairs of values. A tile is TALL rows times WIDE vectors of outputs.

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

constexpr int TALL = 6, WIDE = 4;
using Pairs = Ints;
inline Pairs pairs(Ints words) { return words; }
inline Floats dot(Pairs w, Pairs x, Floats acc) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));  // as for integers in common.h
  return acc;
}

#else

constexpr int TALL = 4, WIDE = 2;
struct Pairs {
  Floats low, high;
};
inline Pairs pairs(Ints words) { return {low_half(words), high_half(words)}; }
inline Floats dot(Pairs w, Pairs x, Floats acc) {
  return multiply_add(w.low, x.low, multiply_add(w.high, x.high, acc));  // in the order of the instruction above
}

#endif

constexpr int64_t STRIP = WIDE * LANES;  // outputs
constexpr int64_t PANEL = 128;           // k: up to 16 KB of weights
constexpr int64_t BLOCK = 2 * LANES;     // k that are transposed at a time
constexpr int64_t ROWS = 64;             // rows with their sums kept at a time
constexpr int64_t LINE = 32;             // values of a cache line
constexpr int64_t GRAIN = 1 << 19;       // bytes of weights, or as much work, that pay for a thread's wake-up

// ------------------------------------------------------------------------------------------------ panels

// Prefetches the next panel, [STRIP, PANEL] values with `stride` between outputs, one output after the other, in step
// with `parts` parts of the work on this panel. Prefetches past the last weight are harmless.
struct Ahead {
  const Value* w;
  int64_t stride, parts, done = 0, outputs = 0;
  void advance() {
    done++;
    for (; outputs * parts < STRIP * done; outputs++)
      for (int64_t i = 0; i < PANEL; i += LINE) __builtin_prefetch(w + outputs * stride + i);
  }
};

// Loads `count` values, padded with zeros.
inline Ints load_some(const Value* p, int64_t count) {
  Value values[BLOCK] = {};
  std::memcpy(values, p, count * sizeof(Value));
  return load((const uint8_t*)values);
}

// to[pair][output] = two values of w[output]; the last block of `count` values is padded with zeros.
void transpose_panel(const Value* const (&w)[STRIP], int64_t first, int64_t count, int32_t* to, Ahead& ahead) {
  for (int64_t v = 0; v < STRIP; v += LANES)
    for (int64_t i = 0; i < count; i += BLOCK) {
      ahead.advance();
      Ints words[LANES];
      if (count - i >= BLOCK)
        for (int l = 0; l < LANES; l++) words[l] = load((const uint8_t*)(w[v + l] + first + i));
      else
        for (int l = 0; l < LANES; l++) words[l] = load_some(w[v + l] + first + i, count - i);
      transpose(words);
      for (int l = 0; l < LANES; l++) store(to + (i / 2 + l) * STRIP + v, words[l]);
    }
}

struct Pass {  // of a tile over a panel
  const Value* const* x;  // its rows, at the panel's first k
  int64_t first, pairs;
  const int32_t* panel;
  float* sums;  // [M, STRIP], read and written
};

template <int M> void tile(const Pass& pass, Ahead& ahead) {
  const Value* x[M];
  Floats sums[M][WIDE];
  for (int m = 0; m < M; m++) {
    x[m] = pass.x[m] + pass.first;
    for (int v = 0; v < WIDE; v++) sums[m][v] = load(pass.sums + m * STRIP + v * LANES);
  }
  for (int64_t p = 0; p < pass.pairs;) {
    ahead.advance();
    for (const int64_t stop = std::min(p + BLOCK / 2, pass.pairs); p < stop; p++) {
      Pairs w[WIDE];
      for (int v = 0; v < WIDE; v++) w[v] = pairs(load((const uint8_t*)(pass.panel + p * STRIP + v * LANES)));
      for (int m = 0; m < M; m++) {
        int32_t two;
        std::memcpy(&two, x[m] + 2 * p, 4);
        const Pairs xs = pairs(splat(two));
        for (int v = 0; v < WIDE; v++) sums[m][v] = dot(w[v], xs, sums[m][v]);
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < WIDE; v++) store(pass.sums + m * STRIP + v * LANES, sums[m][v]);
}

template <int M = TALL> void tiles(int64_t rows, const Pass& pass, Ahead& ahead) {
  if constexpr (M > 1)
    if (rows < M) return tiles<M - 1>(rows, pass, ahead);
  tile<M>(pass, ahead);
}

// ------------------------------------------------------------------------------------------------ product

struct Layer {
  const Value *x, *w, *bias;   // [rows, stride], [experts, n, k], [experts, n] or null
  int64_t n, k, stride;        // stride: k, or one more where k is odd, and then a zero
  Order order;
};

// sums [rows, STRIP] = the rows `x` times a strip of outputs, its `weights`. next: the weights that follow the strip's
void strip_sums(const Layer& layer, const Value* weights, const Value* next, int64_t columns, const Value* const* x,
                int64_t rows, float* sums) {
  alignas(64) int32_t panel[PANEL / 2 * STRIP];
  const Value* w[STRIP];
  for (int64_t i = 0; i < STRIP; i++) w[i] = weights + std::min(i, columns - 1) * layer.k;
  std::fill(sums, sums + rows * STRIP, 0.0f);
  const int64_t count = (rows + TALL - 1) / TALL;  // tiles of nearly equal height
  for (int64_t first = 0; first < layer.k; first += PANEL) {
    const int64_t size = std::min(PANEL, layer.k - first), blocks = (size + BLOCK - 1) / BLOCK;
    Ahead ahead{first + size < layer.k ? weights + first + size : next, layer.k, blocks * (WIDE + count)};
    transpose_panel(w, first, size, panel, ahead);
    for (int64_t t = 0; t < count; t++) {
      const int64_t top = rows * t / count, height = rows * (t + 1) / count - top;
      tiles(height, {x + top, first, (size + 1) / 2, panel, sums + top * STRIP}, ahead);
    }
  }
}

template <class Out> void product(const Layer& layer, Out* y) {
  const int64_t n = layer.n, k = layer.k, strips = (n + STRIP - 1) / STRIP;
  int64_t work = 0;  // of a strip
  for (const Group& group : layer.order.groups) work += STRIP * k * sizeof(Value) * (1 + group.rows / 8);
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, work));
  parallel(strips, grain, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[ROWS * STRIP];
    const Value* x[ROWS];
    for (const Group& group : layer.order.groups)
      for (int64_t strip = begin; strip < end; strip++) {
        const int64_t column = strip * STRIP, columns = std::min(STRIP, n - column);
        const Value* weights = layer.w + (group.expert * n + column) * k;
        const Value* bias = layer.bias ? layer.bias + group.expert * n + column : nullptr;
        for (int64_t done = 0; done < group.rows; done += ROWS) {
          const int64_t rows = std::min(ROWS, group.rows - done);
          const int64_t* row = &layer.order.row[group.first + done];
          for (int64_t m = 0; m < rows; m++) x[m] = layer.x + row[m] * layer.stride;
          const Value* next = done + rows < group.rows ? weights : weights + STRIP * k;
          strip_sums(layer, weights, next, columns, x, rows, sums);
          for (int64_t m = 0; m < rows; m++) {
            if (bias)
              for (int64_t i = 0; i < columns; i++) sums[m * STRIP + i] += widen(bias[i]);
            put_row<STRIP>(y + row[m] * n + column, sums + m * STRIP, columns);
          }
        }
      }
  });
}

}  // namespace

// ----------------------------------------------------------------------------------------------- operator

// With `expert`, one int64 per row, weight and bias are stacked.
at::Tensor linear_bf16(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, bool wide,
                       const std::optional<at::Tensor>& expert) {
  const int64_t k = weight.size(-1), n = weight.size(-2);
  const auto is_bf16 = [](const at::Tensor& t) { return t.scalar_type() == at::kBFloat16; };
  TORCH_CHECK(is_bf16(x) && is_bf16(weight), "x and weight must be bfloat16");
  TORCH_CHECK(x.size(-1) == k, "an input of ", x.size(-1), " features does not fit weights for ", k);
  TORCH_CHECK(weight.is_contiguous(), "weights must lie in one piece");
  TORCH_CHECK(!bias || (is_bf16(*bias) && bias->is_contiguous() && bias->numel() * k == weight.numel()),
              "bias must hold one bfloat16 per output, in one piece");
  const at::Tensor rows = (k % 2 ? at::constant_pad_nd(x, {0, 1}) : x).contiguous();
  const at::Tensor y = empty_rows(x, n, wide ? at::kFloat : at::kBFloat16);
  static thread_local Layer layer;  // its memory is kept from call to call; threads get a reference
  layer.x = rows.const_data_ptr<Value>(), layer.w = weight.const_data_ptr<Value>();
  layer.bias = bias ? bias->const_data_ptr<Value>() : nullptr;
  layer.n = n, layer.k = k, layer.stride = rows.size(-1);
  const int64_t M = y.numel() / n, experts = count_experts(weight, 2, M, expert);
  group_rows(layer.order, expert ? expert->const_data_ptr<int64_t>() : nullptr, experts, M);
  fill(y, [&](auto* to) { product(layer, to); });
  return y;
}

}  // namespace linear
