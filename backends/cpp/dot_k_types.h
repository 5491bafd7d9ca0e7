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

// A superblock's header. Byte: of the groups' integers; uint8_t: scales and behind them minima,
// int8_t: scales alone
template <class Byte> struct SuperHeader {
  static constexpr bool LEAST = std::is_same_v<Byte, uint8_t>;
  static constexpr int64_t OF_GROUP = LEAST ? 2 * STRIP : STRIP;
  const uint8_t* at;
  // Returns the scale and the minimum, times -1, that the groups of LANES outputs share.
  Numbers halves(const Layout& layout, int64_t output) const {
    Numbers of = read_numbers(layout, at, nullptr, output);
    of.least = multiply(of.least, splat(-1.0f));
    return of;
  }
  // Returns a group's scales; where SUMS_IN_16_BITS, twice in a word.
  Ints times(int64_t group, int64_t output) const {
    const Ints by = ints_of(integers(group) + output);
    return SUMS_IN_16_BITS ? both_halves(by, by) : by;
  }
  // Returns two groups' factors of the sums of their activations' codes.
  Ints pairs(int64_t group, int64_t output) const {
    const Byte* first = integers(group) + (LEAST ? STRIP : 0) + output;
    return both_halves(ints_of(first), ints_of(first + OF_GROUP));
  }

 private:
  const Byte* integers(int64_t group) const {
    return (const Byte*)(at + 2 * OF_GROUP) + group * OF_GROUP;
  }
};

// What a block's sums are multiplied with, for LANES outputs.
template <int PAIRS> struct SuperNumbers {
  Floats scale, least;
  Ints pairs[PAIRS];
};

// sums [M][V] += a group's dot products times its scales. times(j): of vector j; HIGH: x are the
// high parts of outliers; outliers: the steps that have any, a bit each
template <int BITS, int STEPS, bool HIGH, int M, int V, class Read>
[[gnu::always_inline]] inline void add_times(const uint8_t* p, const int8_t* x, uint32_t outliers,
                                             const Read& times, Ints (&sums)[M][V]) {
  Ints by[V], of_group[M][V];
  for (int j = 0; j < V; j++) by[j] = times(j);
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
// says: the minima, or the offset of all codes. numbers(j): `SuperNumbers` of vector j
template <Correction CORRECTION, int M, int V, class Read>
[[gnu::always_inline]] inline void add_block(const Ints (&sums)[M][V], int32_t offset,
                                             const Read& numbers, const RowInfo& info,
                                             float* total) {
  const bool split = info.outlier_steps(M);
  for (int j = 0; j < V; j++) {
    const auto of = numbers(j);
    constexpr int PAIRS = std::extent_v<decltype(of.pairs)>;
    for (int m = 0; m < M; m++) {
      const int32_t *low = info.pairs + m * 2 * PAIRS, *high = low + PAIRS;
      const Floats of_row = splat(info.scales[m]);
      Ints sum = sums[m][j], rest = splat(0);
      if (CORRECTION != Correction::NOTHING) {
        if (split) {
          for (int i = 0; i < PAIRS; i++) rest = dot_pairs(rest, of.pairs[i], splat(high[i]));
          rest = raised<7>(rest);
        }
        for (int i = 0; i < PAIRS; i++) rest = dot_pairs(rest, of.pairs[i], splat(low[i]));
      }
      if (CORRECTION == Correction::START) sum = add(sum, multiply(rest, splat(-offset)));
      float* at = total + m * STRIP + output_of<V>(j);
      Floats of_output = add_scaled(sum, multiply(of.scale, of_row), load(at));
      if (CORRECTION == Correction::LEAST)
        of_output = add_scaled(rest, multiply(of.least, of_row), of_output);
      store(at, of_output);
    }
  }
}

// A `super_tile` whose headers have this Byte.
template <int BITS, int STEPS, class Byte, int M, int V>
[[gnu::always_inline]] inline void super_pass(const Activations& a, const Layout& layout,
                                              Panel& panel, int64_t row, int64_t first,
                                              float* sums) {
  constexpr int64_t GROUPS = BLOCK / 4 / STEPS, PAIRS = GROUPS / 2;
  constexpr int64_t BYTES = STEPS * Codes<BITS>::STEP_BYTES, OF_ROWS = STEPS * 4 * M;  // of a group
  constexpr Correction CORRECTION =
      SuperHeader<Byte>::LEAST ? Correction::LEAST : Correction::START;
  const int64_t at = row * a.k + panel.first * M, size = panel.last - panel.first;
  const int8_t *x = &a.codes[at], *high = &a.highs[at];
  RowInfo info(a, row * a.blocks + panel.first / BLOCK * M);
  const int64_t share = layout.super_bytes() * BLOCK / layout.super * V / NV / panel.shares;
  SuperHeader<Byte> header{panel.weights};
  const uint8_t* p = panel.weights + layout.header_bytes + 4 * first;
  int64_t group = 0;  // of the superblock
  for (int64_t k = 0; k < size; k += BLOCK) {
    if (group * layout.group == layout.super) {
      header.at += layout.super_bytes();
      p += layout.header_bytes;
      group = 0;
    }
    const uint32_t outliers = info.outlier_steps(M);
    Ints of_block[M][V];
    clear(of_block);
    const auto times_of = [&](int64_t g) {
      return [&, g](int j) { return header.times(group + g, first + output_of<V>(j)); };
    };
    if (outliers) {
      for (int64_t g = 0; g < GROUPS; g++)
        if (const uint32_t steps = outliers >> g * STEPS & ((1 << STEPS) - 1))
          add_times<BITS, STEPS, true>(p + g * BYTES, high + g * OF_ROWS, steps, times_of(g),
                                       of_block);
      raise_sums(of_block);
    }
    for (int64_t g = 0; g < GROUPS; g++, p += BYTES, x += OF_ROWS, high += OF_ROWS)
      add_times<BITS, STEPS, false>(p, x, 0, times_of(g), of_block);
    const auto numbers = [&](int j) {
      const int64_t output = first + output_of<V>(j);
      const Numbers halves = header.halves(layout, output);
      SuperNumbers<PAIRS> of{halves.scale, halves.least, {}};
      for (int i = 0; i < PAIRS; i++) of.pairs[i] = header.pairs(group + 2 * i, output);
      return of;
    };
    add_block<CORRECTION>(of_block, layout.offset, numbers, info, sums + first);
    group += GROUPS;
    info.next(M);
    info.pairs += M * 2 * PAIRS;
    panel.fetch(share);
  }
}

// As `tile`.
template <int BITS, int STEPS, int M, int V>
[[gnu::noinline]] void super_tile(const Activations& a, const Layout& layout, Panel& panel,
                                  int64_t row, int64_t first, float* sums) {
  if (layout.has_least)
    super_pass<BITS, STEPS, uint8_t, M, V>(a, layout, panel, row, first, sums);
  else
    super_pass<BITS, STEPS, int8_t, M, V>(a, layout, panel, row, first, sums);
}

}  // namespace
}  // namespace matmul
