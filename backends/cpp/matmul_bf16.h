// Matmuls with bfloat16 weights, for 1 to a few hundred rows (matmul.cpp).
//
// 1. Weights are read where they lie, [outputs, k], as streams of a few outputs at a time. A word
//    holds two values of k, and a vector LANES words of one output: nothing is packed.
// 2. A tile multiplies up to TALL rows by a few outputs, with a register of sums for each pair of
//    them. AVX512-BF16 multiplies and adds in pairs; elsewhere both are widened to fp32. Long k is
//    cut into panels, so that the rows of a tile stay in the L1 cache.
// 3. Meanwhile the weights behind are fetched into L2: of up to TALL rows some KB ahead, in the
//    order of memory; else those behind the strip, a share in every tile. In a mixture, each
//    expert's rows pass over its own weight.
//
// A row's result does not depend on the other rows, bit for bit: an output has CHAINS sums on all
// processors, sum c of pairs c, c + CHAINS, ... of k in their order, the second value of a pair
// first, rounded after every product. In the end sums half of them apart are added, until one is
// left. All processors give the same bits, except that AVX512-BF16 takes numbers below 2^-126 as
// zeros, and that amx.h has another order.
// Trade-off: adding the sums of lanes costs a long prompt 2 to 8 %; weights packed in transposed
// panels would have none to add.
#pragma once

#include "amx.h"
#include "experts.h"
#include "operands.h"
#include "simd.h"
#include "threads.h"

#include <algorithm>

namespace matmul::bf16 {
namespace {

using Value = at::BFloat16;

// ------------------------------------------------------------------------------------------- pairs
// dot: acc[i] += the products of two pairs of values. A tile alone has up to TALL rows, one of
// several up to SHORT.

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

constexpr int TALL = 8, SHORT = 6;
using Pairs = Ints;
inline Pairs pairs(Ints words) { return words; }
inline Floats dot(Pairs w, Pairs x, Floats acc) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));  // as for integers in simd.h
  return acc;
}

#else

constexpr int TALL = 4, SHORT = 4;
struct Pairs {
  Floats low, high;
};
inline Pairs pairs(Ints words) { return {low_half(words), high_half(words)}; }
inline Floats dot(Pairs w, Pairs x, Floats acc) {
  // in the order of the instruction above
  return multiply_add(w.low, x.low, multiply_add(w.high, x.high, acc));
}

#endif

constexpr int64_t CHAINS = 16;         // sums of an output
constexpr int64_t BLOCK = 2 * CHAINS;  // k of a step: a cache line of weights
constexpr int HALVES = CHAINS / LANES;
constexpr int64_t STRIP = 16;    // outputs
constexpr int64_t PANEL = 2048;  // k, at most: 16 KB of four rows
constexpr int64_t AHEAD = 8192;  // k of a stream that is prefetched: 16 KB
constexpr int64_t ROWS = 16;     // rows with their sums kept at a time
// bytes of weights, or as much work, that pay for a thread's wake-up
constexpr int64_t GRAIN = 1 << 19;

// Returns the outputs of a tile of so many rows, by the registers.
constexpr int outputs_of(int rows) {
  if (LANES == 16) return rows == 1 ? 8 : rows <= 6 ? 4 : 2;
  return rows == 1 ? 4 : rows == 2 ? 3 : 2;
}
// halves of the sums that fit the registers
template <int M> constexpr int AT_ONCE = M == TALL ? 1 : HALVES;

// ------------------------------------------------------------------------------------------- tiles

struct Pass {  // of some rows over a panel of a strip
  const Value* const* x;
  const Value *w, *next;   // [STRIP, k] each, at the panel's first k; next is prefetched
  int64_t k, first, size;  // of the panel: its first k, and how many
  int64_t passes, pass;    // over the panel, and which this one is
  float* sums;  // [rows, STRIP, CHAINS], read where the panel is not the first, and written
};

// Multiplies M rows by O outputs, H halves of the sums at a time.
template <int M, int O> [[gnu::noinline]] void tile(const Pass& pass, int64_t output) {
  constexpr int H = AT_ONCE<M>;
  const int64_t k = pass.k, whole = pass.size / BLOCK * BLOCK;
  const Value *x[M], *w[O];
  for (int m = 0; m < M; m++) x[m] = pass.x[m] + pass.first;
  for (int o = 0; o < O; o++) w[o] = pass.w + (output + o) * k;
  // rows in one pass read memory as a stream; else the tile's share of the next weights: some of
  // their outputs
  const bool streams = pass.passes == 1 && pass.size == k;
  const int64_t share = STRIP * pass.pass + output, fetched = share / pass.passes,
                end = (share + O) / pass.passes;
  for (int h = 0; h < HALVES; h += H) {
    const auto place = [&](int i, int m, int o) {
      return pass.sums + (m * STRIP + output + o) * CHAINS + (h + i) * LANES;
    };
    Floats sums[H][M][O];
    for (int i = 0; i < H; i++)
      for (int m = 0; m < M; m++)
        for (int o = 0; o < O; o++) sums[i][m][o] = splat(0.0f);
    if (pass.first)
      for (int i = 0; i < H; i++)
        for (int m = 0; m < M; m++)
          for (int o = 0; o < O; o++) sums[i][m][o] = load(place(i, m, o));
    const auto step = [&](const Value* const(&ws)[O], const Value* const(&xs)[M], int64_t from) {
      for (int i = 0; i < H; i++) {
        const int64_t at = from + (h + i) * 2 * LANES;
        Pairs of_w[O];
        for (int o = 0; o < O; o++) of_w[o] = pairs(load((const uint8_t*)(ws[o] + at)));
        for (int m = 0; m < M; m++) {
          const Pairs of_x = pairs(load((const uint8_t*)(xs[m] + at)));
          for (int o = 0; o < O; o++) sums[i][m][o] = dot(of_w[o], of_x, sums[i][m][o]);
        }
      }
    };
    for (int64_t i = 0; i < whole; i += BLOCK) {
      if (h == 0 && streams)
        for (int64_t o = 0; o < O; o++) to_l2(w[0] + i * O + AHEAD + o * BLOCK);
      else if (h == 0)
        for (int64_t o = fetched; o < end; o++) to_l2(pass.next + o * k + i);
      step(w, x, i);
    }
    if (whole < pass.size) {  // the last block, padded with zeros
      const int64_t bytes = (pass.size - whole) * sizeof(Value);
      Value padded[O + M][BLOCK] = {};
      const Value *last_x[M], *last_w[O];
      for (int o = 0; o < O; o++) last_w[o] = (Value*)std::memcpy(padded[o], w[o] + whole, bytes);
      for (int m = 0; m < M; m++)
        last_x[m] = (Value*)std::memcpy(padded[O + m], x[m] + whole, bytes);
      step(last_w, last_x, 0);
    }
    for (int i = 0; i < H; i++)
      for (int m = 0; m < M; m++)
        for (int o = 0; o < O; o++) store(place(i, m, o), sums[i][m][o]);
  }
}

// Multiplies `rows` rows by the strip's outputs.
template <int M = TALL> void tiles(int64_t rows, int64_t columns, const Pass& pass) {
  if constexpr (M > 1)
    if (rows < M) return tiles<M - 1>(rows, columns, pass);
  constexpr int O = outputs_of(M);
  int64_t output = 0;
  for (; output + O <= columns; output += O) tile<M, O>(pass, output);
  for (; output < columns; output++) tile<M, 1>(pass, output);
}

inline Floats plus(Floats a, Floats b) { return multiply_add(a, splat(1.0f), b); }

// sums [STRIP, CHAINS] -> to [STRIP], the sums of an output added.
void add_chains(const float* sums, float* to) {
  for (int64_t output = 0; output < STRIP; output += LANES) {
    Ints words[LANES];
    for (int l = 0; l < LANES; l++) {
      const float* of = sums + (output + l) * CHAINS;
      const Floats sum = HALVES == 1 ? load(of) : plus(load(of), load(of + CHAINS / 2));
      std::memcpy(&words[l], &sum, sizeof sum);
    }
    transpose(words);
    Floats parts[LANES];
    for (int l = 0; l < LANES; l++) parts[l] = words_of(words[l]);
    for (int apart = LANES / 2; apart; apart /= 2)
      for (int l = 0; l < apart; l++) parts[l] = plus(parts[l], parts[l + apart]);
    store(to + output, parts[0]);
  }
}

// ------------------------------------------------------------------------------------------ matmul

// A part of a linear layer, or of a stack of them.
struct Layer {
  const Value *x, *w, *bias;  // [rows, k], [experts, n, k], [experts, outputs] or null
  int64_t n, k;
  int64_t expert_values;   // from an expert's weight to the next one's
  int64_t outputs, first;  // of the layer; of them, the part's first
  const Order& order;
  const Value* weight(int64_t expert, int64_t output) const {
    return w + expert * expert_values + output * k;
  }
  const Value* bias_of(int64_t expert, int64_t output) const {
    return bias ? bias + expert * outputs + first + output : nullptr;
  }
  // Returns the place in the result of an output of a row.
  int64_t place(int64_t row, int64_t output) const { return row * outputs + first + output; }
};

// sums [rows, STRIP, CHAINS] = the rows `x` times a strip of outputs, its `weights`. next: the
// weights behind them
void strip_sums(const Layer& layer, const Value* weights, const Value* next, int64_t columns,
                const Value* const* x, int64_t rows, float* sums) {
  const int64_t k = layer.k, panels = (k + PANEL - 1) / PANEL;
  const int64_t panel = (k + panels * BLOCK - 1) / (panels * BLOCK) * BLOCK;
  // tiles of nearly equal height
  const int64_t count = rows <= TALL ? 1 : (rows + SHORT - 1) / SHORT;
  for (int64_t first = 0; first < k; first += panel) {
    const Value* ahead = first + panel < k ? weights + first + panel : next;
    for (int64_t t = 0; t < count; t++) {
      const int64_t top = rows * t / count, height = rows * (t + 1) / count - top;
      tiles(height, columns,
            {x + top, weights + first, ahead, k, first, std::min(panel, k - first), count, t,
             sums + top * STRIP * CHAINS});
    }
  }
}

// As `multiply`, on the tiles of amx.h.
template <class Out> void multiply_on_tiles(const Layer& layer, Out* y) {
  const auto put_sums = [&](const Group& group, int64_t place, int64_t output, const float* sums,
                            int64_t stride, int64_t count) {
    Out* to = y + layer.place(layer.order.row[place], output);
    const Value* bias = layer.bias_of(group.expert, output);
    for (int64_t i = 0; i < count; i++)
      put(to + i, bias ? sums[i * stride] + widen(bias[i]) : sums[i * stride]);
  };
  amx::multiply_bf16({layer.x, layer.w, layer.n, layer.k, layer.expert_values}, layer.order,
                     put_sums);
}

// Writes the part's columns of y.
template <class Out> void multiply(const Layer& layer, Out* y) {
  if (amx::in_use()) return multiply_on_tiles(layer, y);
  const int64_t n = layer.n, k = layer.k, strips = (n + STRIP - 1) / STRIP;
  int64_t work = 0;  // of a strip
  for (const Group& group : layer.order.groups)
    work += STRIP * k * sizeof(Value) * (1 + group.rows / 8);
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, work));
  parallel(strips, grain, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[ROWS * STRIP * CHAINS], total[STRIP];
    const Value* x[ROWS];
    for (const Group& group : layer.order.groups)
      for (int64_t strip = begin; strip < end; strip++) {
        const int64_t column = strip * STRIP, columns = std::min(STRIP, n - column);
        const Value* weights = layer.weight(group.expert, column);
        const Value* bias = layer.bias_of(group.expert, column);
        if (columns < STRIP)
          std::fill(sums, sums + ROWS * STRIP * CHAINS, 0.0f);  // outputs that do not exist
        for (int64_t done = 0; done < group.rows; done += ROWS) {
          const int64_t rows = std::min(ROWS, group.rows - done);
          const int64_t* row = &layer.order.row[group.first + done];
          for (int64_t m = 0; m < rows; m++) x[m] = layer.x + row[m] * k;
          const Value* next = done + rows < group.rows ? weights : weights + STRIP * k;
          strip_sums(layer, weights, next, columns, x, rows, sums);
          for (int64_t m = 0; m < rows; m++) {
            add_chains(sums + m * STRIP * CHAINS, total);
            if (bias)
              for (int64_t i = 0; i < columns; i++) total[i] += widen(bias[i]);
            put_row<STRIP>(y + layer.place(row[m], column), total, columns);
          }
        }
      }
  });
}

// Returns rows in bfloat16, rounded if they are in fp32. rows: in one piece
at::Tensor rounded(const at::Tensor& rows) {
  if (rows.scalar_type() == at::kBFloat16) return rows;
  const int64_t k = rows.size(-1);
  const at::Tensor y = empty_rows(rows, k, at::kBFloat16);
  const float* from = rows.const_data_ptr<float>();
  Value* to = y.mutable_data_ptr<Value>();
  parallel(rows.numel() / k, GRAIN / 16 / k, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * k; i < end * k; i++) put(to + i, from[i]);
  });
  return y;
}

}  // namespace
}  // namespace matmul::bf16
