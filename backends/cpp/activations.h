// Activations, rounded to int8 for the integer dot products of matmul.cpp.
//
// A row has one scale per block of k. Outliers, numbers far above the row's root mean square, would
// take the precision from all others of their block. So the scale is that of the others, and an
// outlier's code has up to 15 bits: the low part lies among the codes, the high part in a second
// plane of codes, of which only the few steps of k that have one are read. Source: LLM.int8.
#pragma once

#include "amx.h"
#include "experts.h"
#include "numbers.h"
#include "simd.h"
#include "threads.h"
#include "weight_layout.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

namespace matmul {
namespace {

constexpr int64_t GRAIN = 1 << 16;  // multiply-adds (and bytes) that pay for a thread's wake-up
// as in quantize.py
constexpr float OUTLIER = 4;  // root mean squares of the row above which a magnitude sets no scale
constexpr float FARTHEST = 128;  // an outlier's code is at most this many times 127
constexpr float FARTHEST_OF_SUPER = 32;  // beside integer scales: sums of a block fit 32 bits

// A group's rows are multiplied in tiles of up to MB, of nearly equal height; within a tile, the
// rows' codes of a step lie side by side.
struct Tile {
  int64_t first, height;  // rows first .. first + height - 1
  bool on_amx;            // in dot_amx.h; its codes are [blocks, T, block]
};
inline int64_t count_tiles(const Group& group, bool on_amx = false) {
  const int64_t most = on_amx ? amx::ROWS : MB;
  return (group.rows + most - 1) / most;
}
inline Tile tile_of(const Group& group, int64_t t, bool on_amx = false) {
  const int64_t count = count_tiles(group, on_amx), first = group.rows * t / count;
  return {group.first + first, group.rows * (t + 1) / count - first, on_amx};
}
// Rows of a tile that a thread rounds: an AMX tile's lie apart, so several threads share it.
struct Share {
  Tile tile;
  int64_t first, last;
};
struct Outlier {        // a step of a tile's row
  int32_t block, high;  // high: parts of the four codes
  uint8_t row, step;    // of the tile, of the block
};
// Rounded rows. Most lists hold one tile of T rows after the other.
struct Activations {
  int64_t rows, k, block = 0, blocks;  // k of a scale; how many there are in a row
  int32_t offset;                      // of the weights' codes
  bool wide;  // codes of 16 bits, which need no plane of high parts: for a step x0, x2, x1, x3
  Order order;
  std::vector<Share> shares;
  // [k / 4, T, 4 or 8] bytes; on AMX [blocks, T, block]
  std::vector<int8_t, amx::AtLine<int8_t>> codes;
  // the same, of outliers: a code is 128 * high larger than in `codes`
  std::vector<int8_t, amx::AtLine<int8_t>> highs;
  std::vector<float> scales;       // [blocks, T]
  std::vector<int32_t> starts;     // [blocks, T], -offset * sum of the block's codes
  std::vector<float> sums;         // [blocks, T], of the block's codes times their scale
  std::vector<uint32_t> outliers;  // [blocks, T], the steps of a block that have any, a bit each
  // of AMX tiles, by block; a tile's begin at first * k / 4
  std::vector<Outlier> listed;
  // of AMX tiles, where a block's begin in `listed`: [blocks + 1] from first * (blocks + 1) on
  std::vector<int64_t> list_ends;
  int64_t pair;  // k of two groups of integer scales; 0: there are none
  // [blocks, T, 2, BLOCK / pair], two groups' sums of low, and of high codes
  std::vector<int32_t> pairs;
  static constexpr int64_t NEVER = std::numeric_limits<int64_t>::max();
  int64_t amx_from = NEVER;  // rows of a group that goes through AMX tiles
  bool on_amx(const Group& group) const { return group.rows >= amx_from; }
  int64_t step_bytes() const { return wide ? 8 : 4; }
};

// Returns the magnitude above which a row's numbers are outliers.
template <class T> float outlier_above(const T* x, int64_t k) {
  return OUTLIER * std::sqrt(sum_of_squares(x, k) / float(k));
}

struct Rounded {  // a block
  float scale;
  int32_t sum;        // of the codes
  uint32_t outliers;  // the steps that have any, a bit each
};

// to [N / (2 GROUP)] = the sums of groups of codes, two in a word.
template <int N, int GROUP> void add_pairs(const int8_t* codes, int32_t* to) {
  for (int i = 0; i < N; i += 2 * GROUP, to++) {
    int32_t sums[2] = {};
    for (int g = 0; g < 2; g++)
      for (int j = 0; j < GROUP; j++) sums[g] += codes[i + g * GROUP + j];
    *to = two_halves(sums[0], sums[1]);
  }
}

// Rounds n numbers, of a block of N, and writes the codes of their steps `height` steps apart. The
// high parts of outliers, above `limit`, go to a plane of their own, or are part of the WIDE codes.
// pair, pairs: of `Activations`
template <int N, bool WIDE, class T>
Rounded round_block(const T* x, int64_t n, int64_t height, float limit, int64_t pair, int8_t* to,
                    int8_t* highs, int32_t* pairs) {
  T padded[N] = {};
  if (n < N) x = std::copy_n(x, n, padded) - n;
  alignas(64) float numbers[N];
  alignas(64) uint32_t magnitudes[N];  // their bits, which order like the magnitudes, NaN last
  uint32_t limit_bits, most_bits = 0, inlier_bits = 0;
  std::memcpy(&limit_bits, &limit, 4);
  for (int i = 0; i < N; i++) numbers[i] = widen(x[i]);
  std::memcpy(magnitudes, numbers, sizeof numbers);
  for (int i = 0; i < N; i++) magnitudes[i] &= 0x7fffffff;
  for (int i = 0; i < N; i++) most_bits = std::max(most_bits, magnitudes[i]);
  for (int i = 0; i < N; i++) magnitudes[i] = magnitudes[i] <= limit_bits ? magnitudes[i] : 0;
  for (int i = 0; i < N; i++) inlier_bits = std::max(inlier_bits, magnitudes[i]);
  float most, inlier;
  std::memcpy(&most, &most_bits, 4);
  std::memcpy(&inlier, &inlier_bits, 4);
  const float least = most / (pair ? FARTHEST_OF_SUPER : FARTHEST);
  const float unit = least <= inlier ? inlier : least;  // has the code 127; NaN if there is one
  const float to_code = unit > 1e-30f ? 127.0f / unit : 0.0f;
  Rounded block{unit / 127.0f, 0, 0};
  alignas(64) int16_t codes[N];
  for (int i = 0; i < N; i++) {
    // 1.5 * 2^23: rounds to nearest even into the low bits
    const float shifted = numbers[i] * to_code + 12582912.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    codes[i] = int16_t(bits);
    block.sum += codes[i];
  }
  alignas(64) int8_t low[N], high[N] = {};
  const bool splits = !WIDE && most > unit;
  for (int i = 0; i < N; i++) low[i] = int8_t(codes[i]);
  if (splits)
    for (int i = 0; i < N; i++) {
      const int16_t above =
          codes[i] < -127 || codes[i] > 127 ? int16_t((codes[i] + 64) >> 7) : int16_t(0);
      high[i] = int8_t(above);
      low[i] = int8_t(codes[i] - 128 * above);
    }
  for (int64_t i = 0; i < n; i += 4, to += (WIDE ? 8 : 4) * height) {
    const int16_t wide[4] = {codes[i], codes[i + 2], codes[i + 1], codes[i + 3]};
    if (WIDE)
      std::memcpy(to, wide, 8);
    else
      std::memcpy(to, low + i, 4);
  }
  for (int64_t i = 0; splits && i < n; i += 4, highs += 4 * height) {
    uint32_t any;
    std::memcpy(&any, high + i, 4);
    std::memcpy(highs, high + i, 4);
    block.outliers |= uint32_t(any != 0) << i / 4;
  }
  if constexpr (N == BLOCK) {
    if (pair == 32) {
      add_pairs<N, 16>(low, pairs);
      add_pairs<N, 16>(high, pairs + N / 32);
    }
    if (pair == 64) {
      add_pairs<N, 32>(low, pairs);
      add_pairs<N, 32>(high, pairs + N / 64);
    }
  }
  return block;
}

// A `round_block`.
template <class T>
using Round = Rounded (*)(const T* x, int64_t n, int64_t height, float limit, int64_t pair,
                          int8_t* to, int8_t* highs, int32_t* pairs);

// Returns the `round_block` of a block size.
template <bool WIDE, class T> Round<T> round_of(int64_t block) {
  if (block == 32) return round_block<32, WIDE, T>;
  return block == 64 ? round_block<64, WIDE, T> : round_block<128, WIDE, T>;
}

// Lists the outliers of an AMX tile.
void list_outliers(Activations& a, const Tile& tile) {
  Outlier* to = a.listed.data() + tile.first * a.k / 4;
  int64_t* ends = &a.list_ends[tile.first * (a.blocks + 1)];
  *ends = tile.first * a.k / 4;
  for (int64_t b = 0, i = tile.first * a.blocks; b < a.blocks; b++, *++ends = to - a.listed.data())
    for (int64_t m = 0; m < tile.height; m++, i++)
      for (uint32_t steps = a.outliers[i]; steps; steps &= steps - 1, to++) {
        const int step = __builtin_ctz(steps);
        *to = {int32_t(b), 0, uint8_t(m), uint8_t(step)};
        std::memcpy(&to->high, &a.highs[i * a.block + 4 * step], 4);
      }
}

// Rounds the rows x [rows, k], in the order of their groups.
template <class T> void round_rows(Activations& a, const T* x) {
  a.blocks = (a.k + a.block - 1) / a.block;
  a.codes.resize((a.rows * a.k + BLOCK) / 4 * a.step_bytes());  // AMX reads a row behind the last
  for (auto* numbers : {&a.scales, &a.sums}) numbers->resize(a.rows * a.blocks);
  a.starts.resize(a.rows * a.blocks);
  a.outliers.resize(a.rows * a.blocks);
  a.highs.assign(a.wide ? 0 : a.codes.size(), 0);
  const int64_t pairs = a.pair ? 2 * BLOCK / a.pair : 0;  // of a block
  a.pairs.resize(a.rows * a.blocks * pairs);
  a.shares.clear();
  std::vector<Tile> on_tiles;
  for (const Group& group : a.order.groups)
    for (int64_t t = 0; t < count_tiles(group, a.on_amx(group)); t++) {
      const Tile tile = tile_of(group, t, a.on_amx(group));
      if (tile.on_amx) on_tiles.push_back(tile);
      const int64_t rows = tile.on_amx ? MB : tile.height;
      for (int64_t m = 0; m < tile.height; m += rows)
        a.shares.push_back({tile, m, std::min(m + rows, tile.height)});
    }
  const int64_t grain = std::max<int64_t>(1, GRAIN / 16 / (MB * a.k));
  parallel(a.shares.size(), grain, [&](int64_t begin, int64_t end) {
    const Round<T> round = a.wide ? round_of<true, T>(a.block) : round_of<false, T>(a.block);
    for (int64_t s = begin; s < end; s++) {
      const auto [first, height, on_amx] = a.shares[s].tile;
      for (int64_t m = a.shares[s].first; m < a.shares[s].last; m++) {
        const T* row = x + a.order.row[first + m] * a.k;
        const float limit = outlier_above(row, a.k);
        for (int64_t b = 0; b < a.blocks; b++) {
          const int64_t n = std::min(a.block, a.k - b * a.block),
                        i = first * a.blocks + b * height + m;
          const int64_t at = (first * a.k + b * a.block * height + (on_amx ? a.block : 4) * m) / 4 *
                             a.step_bytes();
          const Rounded block =
              round(row + b * a.block, n, on_amx ? 1 : height, limit, a.pair, &a.codes[at],
                    a.highs.data() + at, a.pairs.data() + i * pairs);
          a.scales[i] = block.scale;
          a.sums[i] = block.scale * float(block.sum);
          a.starts[i] = -a.offset * block.sum;
          a.outliers[i] = block.outliers;
        }
      }
    }
  });
  if (on_tiles.empty()) return;
  a.listed.resize(a.rows * a.k / 4);
  a.list_ends.resize(a.rows * (a.blocks + 1));
  parallel(on_tiles.size(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) list_outliers(a, on_tiles[t]);
  });
}

}  // namespace
}  // namespace matmul
