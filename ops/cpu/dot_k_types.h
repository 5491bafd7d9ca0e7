// The sums of dot.h for GGUF's K types, whose groups have integer scales and minima.
//
// Activations have one scale for a block of 128, so the sums of its groups times their scales are
// integers, exactly, and become floating point once a block instead of once a group. What an offset
// or minima add is the dot product of the scales or minima with the sums of the groups'
// activations. Codes of outliers have up to 13 bits here instead of 15. Source of the idea: Q8_K of
// llama.cpp, which has one scale for 256.
#pragma once

#include "activations.h"
#include "dot.h"
#include "numbers.h"
#include "simd.h"
#include "weight_layout.h"

#include <type_traits>

namespace matmul {
namespace {

// Returns two numbers of 16 bits in a word: those of `low` and of `high`.
inline Ints both_halves(Ints low, Ints high) { return choose(0xffff, low, raised<16>(high)); }

// Reads the integers of two groups. Byte: uint8_t, scales with minima behind them; int8_t, scales.
// bytes: [2 groups, scales and minima, STRIP]; times, pairs: as in the panel
template <class Byte>
inline void open_integers(const Byte* bytes, int32_t* times, int32_t* pairs) {
  constexpr bool LEAST = std::is_same_v<Byte, uint8_t>;
  constexpr int64_t OF_GROUP = LEAST ? 2 * STRIP : STRIP;
  for (int64_t i = 0; i < STRIP; i += LANES) {
    Ints by[2], of_sums[2];
    for (int g = 0; g < 2; g++) {
      const Byte* own = bytes + g * OF_GROUP + i;
      by[g] = ints_of(own);
      of_sums[g] = LEAST ? ints_of(own + STRIP) : by[g];
      store(times + g * STRIP + i, SUMS_IN_16_BITS ? both_halves(by[g], by[g]) : by[g]);
    }
    store(pairs + i, both_halves(of_sums[0], of_sums[1]));
  }
}

// Reads the header of a superblock of integer scales. first: its first k behind the panel's
void open_super(const Layout& layout, const uint8_t* header, int64_t first, Panel& panel) {
  const int64_t groups = layout.super / layout.group, before = first / layout.group;
  float *scale = panel.scale + first / layout.super * STRIP,
        *least = panel.least + first / layout.super * STRIP;
  const uint8_t* bytes = open_halves(layout, header, scale, least);
  int32_t *times = panel.times + before * STRIP, *pairs = panel.pairs + before / 2 * STRIP;
  for (int64_t i = 0; i < STRIP && layout.has_least; i++) least[i] = -least[i];
  for (int64_t g = 0; g < groups; g += 2, times += 2 * STRIP, pairs += STRIP) {
    if (layout.has_least)
      open_integers(bytes + g * 2 * STRIP, times, pairs);
    else
      open_integers((const int8_t*)bytes + g * STRIP, times, pairs);
  }
}

// sums [M][V] += a group's dot products times its scales. times: of the strip's outputs, from the
// tile's first on; HIGH: x are the high parts of outliers; outliers: the steps that have any, a bit
// each
template <int BITS, int STEPS, bool HIGH, int M, int V>
[[gnu::always_inline]] inline void add_times(const uint8_t* p, const int8_t* x, uint32_t outliers,
                                             const int32_t* times, Ints (&sums)[M][V]) {
  Ints by[V], of_group[M][V];
  for (int j = 0; j < V; j++) by[j] = load((const uint8_t*)(times + output_of<V>(j)));
  if constexpr (SUMS_IN_16_BITS && HIGH) return add_outliers<BITS>(p, x, outliers, by, sums);
  if constexpr (SUMS_IN_16_BITS) return fold_steps<BITS, 0, STEPS>(p, x, by, sums);
  clear(of_group);
  if (HIGH)
    add_outliers<BITS>(p, x, outliers, by, of_group);
  else
    dots<BITS, M, V>(p, x, STEPS, of_group);
  for (int m = 0; m < M; m++)
    for (int j = 0; j < V; j++) sums[m][j] = add(sums[m][j], multiply(of_group[m][j], by[j]));
}

// total [M, 32] += the sums of a block with M rows, from its integers, which lack what CORRECTION
// says: the minima, or the offset of all codes. PAIRS: of groups; super, pairs: places of the
// outputs in the panel
template <Correction CORRECTION, int PAIRS, int M, int V>
[[gnu::always_inline]] inline void add_block(const Ints (&sums)[M][V], int32_t offset,
                                             const Panel& panel, int64_t super, int64_t pairs,
                                             const RowInfo& info, float* total) {
  const bool split = info.outlier_steps(M);
  for (int j = 0; j < V; j++) {
    const int at = output_of<V>(j);
    const Floats scale = load(panel.scale + super + at);
    Ints by[PAIRS];
    for (int i = 0; i < PAIRS; i++)
      by[i] = load((const uint8_t*)(panel.pairs + pairs + i * STRIP + at));
    for (int m = 0; m < M; m++) {
      const int32_t *low = info.pairs + m * 2 * PAIRS, *high = low + PAIRS;
      const Floats of_row = splat(info.scales[m]);
      Ints sum = sums[m][j], rest = splat(0);
      if (CORRECTION != Correction::NOTHING) {
        if (split) {
          for (int i = 0; i < PAIRS; i++) rest = dot_pairs(rest, by[i], splat(high[i]));
          rest = raised<7>(rest);
        }
        for (int i = 0; i < PAIRS; i++) rest = dot_pairs(rest, by[i], splat(low[i]));
      }
      if (CORRECTION == Correction::START) sum = add(sum, multiply(rest, splat(-offset)));
      Floats of_output = add_scaled(sum, multiply(scale, of_row), load(total + m * STRIP + at));
      if (CORRECTION == Correction::LEAST)
        of_output = add_scaled(rest, multiply(load(panel.least + super + at), of_row), of_output);
      store(total + m * STRIP + at, of_output);
    }
  }
}

// As `tile`.
template <int BITS, int STEPS, int M, int V>
[[gnu::noinline]] void super_tile(const Activations& a, const Layout& layout, Panel& panel,
                                  int64_t row, int64_t first, float* sums) {
  constexpr int64_t GROUPS = BLOCK / 4 / STEPS, PAIRS = GROUPS / 2;
  constexpr int64_t BYTES = STEPS * Codes<BITS>::STEP_BYTES, OF_ROWS = STEPS * 4 * M;  // of a group
  const int64_t at = row * a.k + panel.first * M, size = panel.last - panel.first;
  const int8_t *x = &a.codes[at], *high = &a.highs[at];
  RowInfo info(a, row * a.blocks + panel.first / BLOCK * M);
  const int64_t share = layout.super_bytes() * BLOCK / layout.super * V / NV / panel.shares;
  const uint8_t* p = panel.weights + 4 * first;
  const int32_t* times = panel.times + first;
  for (int64_t k = 0; k < size; k += BLOCK) {
    if (k % layout.super == 0) p += layout.header_bytes;
    const uint32_t outliers = info.outlier_steps(M);
    Ints of_block[M][V];
    clear(of_block);
    if (outliers) {
      for (int64_t g = 0; g < GROUPS; g++)
        if (const uint32_t steps = outliers >> g * STEPS & ((1 << STEPS) - 1))
          add_times<BITS, STEPS, true>(p + g * BYTES, high + g * OF_ROWS, steps, times + g * STRIP,
                                       of_block);
      raise_sums(of_block);
    }
    for (int64_t g = 0; g < GROUPS; g++, p += BYTES, x += OF_ROWS, high += OF_ROWS, times += STRIP)
      add_times<BITS, STEPS, false>(p, x, 0, times, of_block);
    const int64_t super = k / layout.super * STRIP + first,
                  pairs = k / BLOCK * PAIRS * STRIP + first;
    if (layout.has_least)
      add_block<Correction::LEAST, PAIRS>(of_block, 0, panel, super, pairs, info, sums + first);
    else
      add_block<Correction::START, PAIRS>(of_block, layout.offset, panel, super, pairs, info,
                                          sums + first);
    info.next(M);
    info.pairs += M * 2 * PAIRS;
    panel.fetch(share);
  }
}

}  // namespace
}  // namespace matmul
