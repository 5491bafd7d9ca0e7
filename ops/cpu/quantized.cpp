// Linear layers with weights of 4 or 8 bits for 1 to a few hundred tokens on a CPU, in integer dot products.
//
// 1. Activations are rounded to int8 with one scale per row and block of k: the weights' group, or 128 where that has no
//    scale in floating point (int8 with a scale per output, K types). A row has outliers, numbers far above its root mean
//    square, which would take the precision from all others of their block. So the scale is that of the others, and an
//    outlier's code has up to 15 bits: the low part lies among the codes, the high part in a second plane of codes, of
//    which only the few steps of k that have one are read.
// 2. Weights lie in strips of 32 outputs, one contiguous stream each: superblocks of k, each a header with the scales,
//    then codes (layout.py, blocks.cpp). The hardware multiplies unsigned by signed bytes, so codes are stored with an
//    offset; integer sums start at -offset * sum(activations), which takes it out again, exactly. A minimum of a group
//    of weights is multiplied by the sum of its activations, in floating point. K types: super_sums.h.
// 3. Threads share the strips. Within a strip, k is cut into panels that stay in the L1 cache while tiles of up to MB
//    rows pass over them; a panel's scales become fp32 once. In a mixture, each expert's rows pass over its own strips;
//    idle experts are not read.
//
// A row's result does not depend on the other rows, bit for bit: integer sums are exact, and the sums in floating point
// run over the blocks of k in their order. Plain references: ops/qmatmul.py. Sources of the idea: Q8_0 x Q4_0 products
// of llama.cpp (blockwise activations); VNNI packing of oneDNN; LLM.int8 (outliers apart).

#include "experts.h"
#include "matmul.h"
#include "operands.h"
#include "simd.h"
#include "threads.h"
#include "strips.h"
#include "tiles.h"

#include <algorithm>
#include <limits>

namespace quantized {
namespace {

constexpr int64_t BLOCK = 128;  // k per activation scale, at most
constexpr int64_t LEAST_GROUP = 32;  // k per weight scale in floating point
constexpr int64_t PANEL = 512;   // k per pass over the tokens: 8 or 16 KB of weights
constexpr int64_t GRAIN = 1 << 16;  // multiply-adds (and bytes) that pay for a thread's wake-up
constexpr float OUTLIER = 4;    // root mean squares of the row above which a magnitude sets no scale
constexpr float FARTHEST = 128;  // an outlier's code is at most this many times 127
constexpr float FARTHEST_OF_SUPER = 32;  // the same beside integer scales: the sums of a block fit 32 bits

constexpr int NV = STRIP / LANES;  // vectors per strip

// ------------------------------------------------------------------------------------------- activations

// A group's rows go through the product in tiles of up to MB, of nearly equal height; within a tile, the rows' values
// for a step lie side by side.
struct Tile {
  int64_t first, height;  // rows first .. first + height - 1
  bool on_amx;            // in tile_sums.h; its codes are [blocks, T, block]
};
inline int64_t count_tiles(const Group& group, bool on_amx = false) {
  const int64_t most = on_amx ? amx::ROWS : MB;
  return (group.rows + most - 1) / most;
}
inline Tile tile_of(const Group& group, int64_t t, bool on_amx = false) {
  const int64_t count = count_tiles(group, on_amx), first = group.rows * t / count;
  return {group.first + first, group.rows * (t + 1) / count - first, on_amx};
}
struct Share {  // rows of a tile that a thread rounds: an AMX tile's lie apart, so several threads share it
  Tile tile;
  int64_t first, last;
};
struct Outlier {  // a step of a tile's row
  int32_t block, high;  // high: parts of the four codes
  uint8_t row, step;    // of the tile, of the block
};
struct Activations {
  int64_t rows, k, block = 0, blocks;
  int32_t offset;  // of the weights' codes
  bool wide;       // codes of 16 bits, which need no plane of high parts: for a step x0, x2, x1, x3
  Order order;
  std::vector<Share> shares;
  std::vector<int8_t, amx::AtLine<int8_t>> codes;  // per tile of T rows: [K / 4, T, 4 or 8] bytes
  std::vector<int8_t, amx::AtLine<int8_t>> highs;  // the same, of outliers: a code is 128 * high larger than in `codes`
  std::vector<float> scales;       // per tile: [blocks, T]
  std::vector<int32_t> starts;     // per tile: [blocks, T], -offset * sum of the block's codes
  std::vector<float> sums;         // per tile: [blocks, T], of the block's codes times their scale
  std::vector<uint32_t> outliers;  // per tile: [blocks, T], the steps of a block that have any, a bit each
  std::vector<Outlier> listed;     // of AMX tiles, by block; a tile's begin at [first * k / 4]
  std::vector<int64_t> list_ends;  // per AMX tile: [blocks + 1] from [first * (blocks + 1)] on, where a block's begin
  int64_t pair;                    // k of two groups of integer scales; 0: there are none
  std::vector<int32_t> pairs;      // per tile: [blocks, T, 2, BLOCK / pair], two groups' sums of low, and of high codes
  static constexpr int64_t NEVER = std::numeric_limits<int64_t>::max();
  int64_t amx_from = NEVER;  // rows of a group that goes through AMX tiles
  bool on_amx(const Group& group) const { return group.rows >= amx_from; }
  int64_t step_bytes() const { return wide ? 8 : 4; }
};

// Returns the magnitude above which a row's numbers are outliers.
template <class T> float outlier_above(const T* x, int64_t k) {
  constexpr int64_t SUMS = 32;  // side by side, on all processors
  float sums[SUMS] = {}, total = 0;
  int64_t i = 0;
  for (; i + SUMS <= k; i += SUMS)
    for (int64_t s = 0; s < SUMS; s++) sums[s] += widen(x[i + s]) * widen(x[i + s]);
  for (; i < k; i++) sums[0] += widen(x[i]) * widen(x[i]);
  for (float sum : sums) total += sum;
  return OUTLIER * std::sqrt(total / float(k));
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

// Rounds n numbers, of a block of N, and writes the codes of their steps `height` steps apart. The high parts of
// outliers, above `limit`, go to a plane of their own, or are part of the WIDE codes. pair, pairs: of `Activations`
template <int N, bool WIDE, class T>
Rounded round_block(const T* x, int64_t n, int64_t height, float limit, int64_t pair, int8_t* to, int8_t* highs,
                    int32_t* pairs) {
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
    const float shifted = numbers[i] * to_code + 12582912.0f;  // 1.5 * 2^23: rounds to nearest even into the low bits
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    codes[i] = int16_t(bits), block.sum += codes[i];
  }
  alignas(64) int8_t low[N], high[N] = {};
  const bool splits = !WIDE && most > unit;
  for (int i = 0; i < N; i++) low[i] = int8_t(codes[i]);
  if (splits)
    for (int i = 0; i < N; i++) {
      const int16_t above = codes[i] < -127 || codes[i] > 127 ? int16_t((codes[i] + 64) >> 7) : int16_t(0);
      high[i] = int8_t(above), low[i] = int8_t(codes[i] - 128 * above);
    }
  for (int64_t i = 0; i < n; i += 4, to += (WIDE ? 8 : 4) * height) {
    const int16_t wide[4] = {codes[i], codes[i + 2], codes[i + 1], codes[i + 3]};
    if (WIDE) std::memcpy(to, wide, 8);
    else std::memcpy(to, low + i, 4);
  }
  for (int64_t i = 0; splits && i < n; i += 4, highs += 4 * height) {
    uint32_t any;
    std::memcpy(&any, high + i, 4), std::memcpy(highs, high + i, 4);
    block.outliers |= uint32_t(any != 0) << i / 4;
  }
  if constexpr (N == BLOCK) {
    if (pair == 32) add_pairs<N, 16>(low, pairs), add_pairs<N, 16>(high, pairs + N / 32);
    if (pair == 64) add_pairs<N, 32>(low, pairs), add_pairs<N, 32>(high, pairs + N / 64);
  }
  return block;
}

template <class T>
using Round = Rounded (*)(const T* x, int64_t n, int64_t height, float limit, int64_t pair, int8_t* to, int8_t* highs,
                          int32_t* pairs);

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

template <class T> void round_rows(Activations& a, const T* x) {
  a.blocks = (a.k + a.block - 1) / a.block;
  a.codes.resize((a.rows * a.k + BLOCK) / 4 * a.step_bytes());  // AMX reads a row behind the last
  for (auto* numbers : {&a.scales, &a.sums}) numbers->resize(a.rows * a.blocks);
  a.starts.resize(a.rows * a.blocks), a.outliers.resize(a.rows * a.blocks);
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
      for (int64_t m = 0; m < tile.height; m += rows) a.shares.push_back({tile, m, std::min(m + rows, tile.height)});
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
          const int64_t n = std::min(a.block, a.k - b * a.block), i = first * a.blocks + b * height + m;
          const int64_t at = (first * a.k + b * a.block * height + (on_amx ? a.block : 4) * m) / 4 * a.step_bytes();
          const Rounded block = round(row + b * a.block, n, on_amx ? 1 : height, limit, a.pair, &a.codes[at],
                                      a.highs.data() + at, a.pairs.data() + i * pairs);
          a.scales[i] = block.scale, a.sums[i] = block.scale * float(block.sum);
          a.starts[i] = -a.offset * block.sum, a.outliers[i] = block.outliers;
        }
      }
    }
  });
  if (on_tiles.empty()) return;
  a.listed.resize(a.rows * a.k / 4), a.list_ends.resize(a.rows * (a.blocks + 1));
  parallel(on_tiles.size(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) list_outliers(a, on_tiles[t]);
  });
}

// ------------------------------------------------------------------------------------------------- panels
// A part of a strip's k, whole superblocks, and its scales in fp32.

struct Panel {
  const uint8_t* weights;        // its first superblock
  const uint8_t *ahead, *reach;  // the line behind the panel to fetch next, and the end of what is to be fetched by now
  int64_t shares;                // of what to fetch: one for each tile that passes over the panel
  int64_t first, last;           // k
  alignas(64) float scale[PANEL / LEAST_GROUP * STRIP];  // per group of k, or superblock of integer scales
  alignas(64) float least[PANEL / LEAST_GROUP * STRIP];  // minima
  alignas(64) int32_t zero[PANEL / LEAST_GROUP * STRIP];
  alignas(64) int32_t times[PANEL / 16 * STRIP];  // integer scales per group; where FOLDS, twice in a word
  alignas(64) int32_t pairs[PANEL / 32 * STRIP];  // two groups' factors of the sums of their activations' codes
  void fetch(int64_t bytes) {
    for (reach += bytes; ahead < reach; ahead += 64) to_l2(ahead);
  }
};

// Reads the float16 numbers of a header, scales [32], and minima [32] if there are any. Returns: what lies behind.
inline const uint8_t* open_halves(const Layout& layout, const uint8_t* header, float* scale, float* least) {
  const uint16_t* halves = (const uint16_t*)header;
  for (int64_t j = 0; j < STRIP; j += LANES) store(scale + j, from_f16(halves + j));
  if (!layout.has_least) return header + 2 * STRIP;
  for (int64_t j = 0; j < STRIP; j += LANES) store(least + j, from_f16(halves + STRIP + j));
  return header + 4 * STRIP;
}

void open_super(const Layout& layout, const uint8_t* header, int64_t first, Panel& panel);  // super_sums.h

// Reads the headers of a panel. output_scale: of the strip's outputs, where the header has none
void open_panel(const Layout& layout, const float* output_scale, Panel& panel) {
  const uint8_t* header = panel.weights;
  int64_t g = 0;
  for (int64_t k = panel.first; k < panel.last; k += layout.super, header += layout.super_bytes()) {
    if (layout.header == Header::SUPER) {
      open_super(layout, header, k - panel.first, panel);
      continue;
    }
    for (int64_t i = 0; i < layout.super && k + i < panel.last; i += layout.group, g += STRIP) {
      float *scale = panel.scale + g, *least = panel.least + g;
      switch (layout.header) {
        case Header::OUTPUT:
          for (int64_t j = 0; j < STRIP; j++) scale[j] = output_scale[j];
          break;
        case Header::BF16:
          for (int64_t j = 0; j < STRIP; j += LANES) store(scale + j, from_bf16((const uint16_t*)header + j));
          break;
        case Header::WORDS:
          for (int64_t j = 0; j < STRIP; j += LANES) {
            const Ints words = load(header + 4 * j);
            store(scale + j, words_of(mask(words, ~511)));
            store(panel.zero + g + j, mask(words, 511));
          }
          break;
        default:
          open_halves(layout, header, scale, least);
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------- codes
// The codes of a step, 4 values of k. A tile computes V of a strip's NV vectors of outputs: all of them, or vector
// `first` of both halves, so that it reads a byte of two halves once. Where FOLDS, a sum of dot products takes FOLD
// steps in 16 bits. S: of the steps at p. Where LINEAR, every step is the first one STEP_BYTES later.
// FEW: the tile has few rows, whose products wait for memory.

// Returns the first output, behind the tile's first, of its vector j.
template <int V> constexpr int output_of(int j) { return (j % (V / 2) + j / (V / 2) * (NV / 2)) * LANES; }

template <int HIGH> struct Halves {  // codes of 4 + HIGH bits
  static constexpr int STEP_BYTES = (4 + HIGH) * STRIP / 2;
  static constexpr int FOLD = 8 >> HIGH;  // 8 * 2 * 15 * 127, 4 * 2 * 31 * 127 and 2 * 2 * 63 * 127 fit 16 bits
  static constexpr bool SMALL = true, LINEAR = HIGH == 0;
  template <int S, bool FEW = false, int V> static inline void codes(const uint8_t* p, Ints (&w)[V]) {
    for (int j = 0; j < V / 2; j++) {
      const uint8_t* at = p + S / 4 * 4 * STEP_BYTES + 4 * output_of<V>(j);
      const Ints both = load(at + S % 4 * 2 * STRIP);
      w[j] = low_nibbles(both), w[V / 2 + j] = high_nibbles(both);
      if constexpr (HIGH) {
        constexpr int bit = S % 4 * 2 * HIGH, fifth = HIGH == 1 ? 0x10101010 : 0x30303030;
        const Ints high = load(at + (4 + bit / 8) * 2 * STRIP);
        w[j] = join(fifth, shifted<4 - bit % 8>(high), w[j]);
        w[V / 2 + j] = join(fifth, shifted<4 - HIGH - bit % 8>(high), w[V / 2 + j]);
      }
    }
  }
};
struct Bytes {
  static constexpr int STEP_BYTES = 128, FOLD = 1;
  static constexpr bool SMALL = false, LINEAR = true;
  template <int S, bool FEW = false, int V> static inline void codes(const uint8_t* p, Ints (&w)[V]) {
    for (int j = 0; j < V; j++) {
      const uint8_t* at = p + S * STEP_BYTES + 4 * output_of<V>(j);
      w[j] = FEW ? load_halves(at) : load(at);
    }
  }
};

inline Ints splat_word(const int8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return splat(word);
}

template <class F> constexpr int STEP = FOLDS && !F::SMALL ? 8 : 4;  // bytes of a row's activations

// Adds the dot products of N steps, from step S on, to U chains in turn. FIRST: step S sets its chain, in 16 bits.
// x: [steps, M, STEP]
template <class F, int S, int N, bool FIRST, int U, int M, int V>
[[gnu::always_inline]] inline void add_steps(const uint8_t* p, const int8_t* x, Ints (&chains)[U][M][V]) {
  Ints(&into)[M][V] = chains[S % U];
  const int8_t* of_step = x + S * STEP<F> * M;
  Ints w[V];
  F::template codes<S, M <= 3>(p, w);
  if constexpr (STEP<F> == 4) {
    for (int m = 0; m < M; m++) {
      const Ints xs = splat_word(of_step + 4 * m);
      for (int j = 0; j < V; j++)
        into[m][j] = FIRST ? products(w[j], xs) : dot<F::SMALL>(into[m][j], w[j], xs);
    }
  } else {
    for (int odd = 0; odd < 2; odd++) {
      Ints of_w[V];
      for (int j = 0; j < V; j++) of_w[j] = odd ? odd_bytes(w[j]) : even_bytes(w[j]);
      for (int m = 0; m < M; m++) {
        const Ints xs = splat_word(of_step + 8 * m + 4 * odd);
        for (int j = 0; j < V; j++) into[m][j] = dot<false>(into[m][j], of_w[j], xs);
      }
    }
  }
  if constexpr (N > 1) add_steps<F, S + 1, N - 1, false>(p, x, chains);
}

template <int M, int V> inline void clear(Ints (&sums)[M][V]) {
  for (int m = 0; m < M; m++)
    for (int j = 0; j < V; j++) sums[m][j] = splat(0);
}

template <int V> inline void ones(Ints (&halves)[V]) {
  for (Ints& both : halves) both = splat(two_halves(1, 1));
}

// sums [M][V] += N steps, from step S on, as sums in 16 bits of FOLD steps, each times that half of `times`.
template <class F, int S, int N, int M, int V>
[[gnu::always_inline]] inline void fold_steps(const uint8_t* p, const int8_t* x, const Ints (&times)[V],
                                              Ints (&sums)[M][V]) {
  constexpr int COUNT = std::min(N, F::FOLD);
  Ints part[1][M][V];
  add_steps<F, S, COUNT, true>(p, x, part);
  for (int m = 0; m < M; m++)
    for (int j = 0; j < V; j++) sums[m][j] = fold(sums[m][j], part[0][m][j], times[j]);
  if constexpr (N > COUNT) fold_steps<F, S + COUNT, N - COUNT>(p, x, times, sums);
}

// A group of k: sums [M][V] += the dot products of `steps` steps. x: [steps, M, STEP]
template <class F, int M, int V>
[[gnu::always_inline]] inline void dots(const uint8_t* p, const int8_t* x, int64_t steps, Ints (&sums)[M][V]) {
  constexpr int64_t BYTES = F::STEP_BYTES, OF_ROWS = STEP<F> * M;
  if constexpr (FOLDS && F::FOLD > 1) {
    Ints once[V];
    ones(once);
    for (; steps >= 8; steps -= 8, p += 8 * BYTES, x += 8 * OF_ROWS) fold_steps<F, 0, 8>(p, x, once, sums);
    for (; steps >= 4; steps -= 4, p += 4 * BYTES, x += 4 * OF_ROWS) fold_steps<F, 0, 4>(p, x, once, sums);
    for (; steps > 0; steps--, p += BYTES, x += OF_ROWS) fold_steps<F, 0, 1>(p, x, once, sums);
  } else {
    constexpr int U = M * V * 4 <= CHAINS ? 4 : M * V * 2 <= CHAINS ? 2 : 1;  // they hide the latency of dot
    Ints chains[U][M][V];
    for (Ints(&chain)[M][V] : chains) clear(chain);
    for (; steps >= 4; steps -= 4, p += 4 * BYTES, x += 4 * OF_ROWS) add_steps<F, 0, 4, false>(p, x, chains);
    for (; steps > 0; steps--, p += BYTES, x += OF_ROWS) add_steps<F, 0, 1, false>(p, x, chains);
    for (Ints(&chain)[M][V] : chains)
      for (int m = 0; m < M; m++)
        for (int j = 0; j < V; j++) sums[m][j] = add(sums[m][j], chain[m][j]);
  }
}

// The same for a step that is known at run time only.
template <class F, int V> inline void codes_of(const uint8_t* p, int64_t step, Ints (&w)[V]) {
  if constexpr (F::LINEAR) return F::template codes<0>(p + step * F::STEP_BYTES, w);
  p += step / 4 * 4 * F::STEP_BYTES;
  switch (step % 4) {
    case 0: return F::template codes<0>(p, w);
    case 1: return F::template codes<1>(p, w);
    case 2: return F::template codes<2>(p, w);
    default: return F::template codes<3>(p, w);
  }
}

// sums [M][V] += the dot products of the high parts of outliers; where FOLDS, times `times` as in `fold_steps`.
// steps: those that have any, a bit each; high: [steps, M, 4]
template <class F, int M, int V>
[[gnu::always_inline]] inline void add_outliers(const uint8_t* p, const int8_t* high, uint32_t steps,
                                                const Ints (&times)[V], Ints (&sums)[M][V]) {
  for (; steps; steps &= steps - 1) {
    const int64_t step = __builtin_ctz(steps);
    Ints w[V];
    codes_of<F>(p, step, w);
    for (int m = 0; m < M; m++) {
      const Ints xs = splat_word(high + (step * M + m) * 4);
      for (int j = 0; j < V; j++)
        sums[m][j] = FOLDS ? fold(sums[m][j], products(w[j], xs), times[j]) : dot<F::SMALL>(sums[m][j], w[j], xs);
    }
  }
}

template <int M, int V> [[gnu::always_inline]] inline void raise_sums(Ints (&sums)[M][V]) {
  for (int m = 0; m < M; m++)
    for (int j = 0; j < V; j++) sums[m][j] = raised<7>(sums[m][j]);
}

// What the rounded numbers of a tile's rows are besides their codes: of a block, with the next rows' behind it.
struct Ends {
  const float *scales, *sums;
  const int32_t *starts, *pairs;
  const uint32_t* outliers;
  Ends(const Activations& a, int64_t block)
      : scales(&a.scales[block]), sums(&a.sums[block]), starts(&a.starts[block]),
        pairs(a.pair ? &a.pairs[block * 2 * BLOCK / a.pair] : nullptr), outliers(&a.outliers[block]) {}
  // Returns the steps that have outliers in any of `rows` rows.
  uint32_t outlier_steps(int rows) const {
    uint32_t any = 0;
    for (int m = 0; m < rows; m++) any |= outliers[m];
    return any;
  }
};

// Numbers that a group's sums lack: nothing, its minima, the codes' offset, or zero points. Minima have no offset.
enum class Adds { NOTHING, LEAST, START, ZERO };

inline Adds adds_of(const Layout& layout) {
  if (layout.header == Header::WORDS) return Adds::ZERO;
  if (layout.has_least) return Adds::LEAST;
  return layout.offset ? Adds::START : Adds::NOTHING;
}

// total += a group's sums, scaled, of V vectors of outputs. g: place of its scales in the panel
template <Adds ADDS, int M, int V>
[[gnu::always_inline]] inline void scale_sums(Ints (&sums)[M][V], const Panel& panel, int64_t g, const Ends& x,
                                              Floats (&total)[M][V]) {
  for (int m = 0; m < M; m++) {
    const Ints start = splat(x.starts[m]);
    const Floats of_row = splat(x.scales[m]), row_sum = splat(x.sums[m]);
    for (int j = 0; j < V; j++) {
      const int at = output_of<V>(j);
      Ints sum = sums[m][j];
      if (ADDS == Adds::START) sum = add(sum, start);
      if (ADDS == Adds::ZERO) sum = add(sum, multiply(load((const uint8_t*)(panel.zero + g + at)), start));
      total[m][j] = add_scaled(sum, multiply(load(panel.scale + g + at), of_row), total[m][j]);
      if (ADDS == Adds::LEAST) total[m][j] = multiply_add(load(panel.least + g + at), row_sum, total[m][j]);
    }
  }
}

// Adds a group's dot products with a tile's rows, scaled, to `total`.
template <class F, int M, int V>
[[gnu::always_inline]] inline void add_group(const uint8_t* p, const int8_t* x, const int8_t* high, int64_t steps,
                                             Adds adds, const Panel& panel, int64_t g, const Ends& ends,
                                             Floats (&total)[M][V]) {
  Ints sums[M][V];
  clear(sums);
  if (const uint32_t outliers = STEP<F> == 4 ? ends.outlier_steps(M) : 0) {  // wide codes are whole
    Ints once[V];
    ones(once);
    add_outliers<F>(p, high, outliers, once, sums);
    raise_sums(sums);
  }
  dots<F, M, V>(p, x, steps, sums);
  switch (adds) {
    case Adds::NOTHING: return scale_sums<Adds::NOTHING>(sums, panel, g, ends, total);
    case Adds::LEAST: return scale_sums<Adds::LEAST>(sums, panel, g, ends, total);
    case Adds::START: return scale_sums<Adds::START>(sums, panel, g, ends, total);
    case Adds::ZERO: return scale_sums<Adds::ZERO>(sums, panel, g, ends, total);
  }
}

template <int M, int V> inline void load_sums(const float* acc, Floats (&total)[M][V]) {
  for (int m = 0; m < M; m++)
    for (int j = 0; j < V; j++) total[m][j] = load(acc + m * STRIP + output_of<V>(j));
}
template <int M, int V> inline void store_sums(const Floats (&total)[M][V], float* acc) {
  for (int m = 0; m < M; m++)
    for (int j = 0; j < V; j++) store(acc + m * STRIP + output_of<V>(j), total[m][j]);
}

// One tile's pass over a panel, for V vectors of outputs. STEPS: of every group of k, so that its sums stay in
// registers; 0: any. first: of the vectors; sums: [M, 32], read and written
template <class F, int STEPS, int M, int V>
[[gnu::noinline]] void tile(const Activations& a, const Layout& layout, Panel& panel, int64_t row, int64_t first,
                            float* sums) {
  const int64_t at = (row * a.k + panel.first * M) / 4 * STEP<F>;
  const int8_t *x = &a.codes[at], *high = a.highs.data() + at;
  Ends ends(a, row * a.blocks + panel.first / a.block * M);
  const int64_t size = layout.group, last = panel.last;
  const int64_t share = layout.super_bytes() * size / layout.super * V / NV / panel.shares;
  const Adds adds = adds_of(layout);
  const uint8_t *p = panel.weights + 4 * first, *ahead = panel.ahead, *reach = panel.reach;
  int64_t g = first;
  Floats total[M][V];
  load_sums(sums + first, total);
  for (int64_t k = panel.first; k < last;) {
    const int64_t end = std::min(k + layout.super, last);
    for (p += layout.header_bytes; k < end; k += size, g += STRIP) {
      const int64_t steps = STEPS ? STEPS : std::min(size, end - k) / 4;
      add_group<F>(p, x, high, steps, adds, panel, g, ends, total);
      p += steps * F::STEP_BYTES, x += steps * STEP<F> * M, high += steps * STEP<F> * M;
      ends.scales += M, ends.sums += M, ends.starts += M, ends.outliers += M;
      for (reach += share; ahead < reach; ahead += 64) to_l2(ahead);
    }
  }
  store_sums(total, sums + first);
  panel.ahead = ahead, panel.reach = reach;
}

}  // namespace
}  // namespace quantized

#include "super_sums.h"  // the same for integer scales

namespace quantized {
namespace {

template <class F, int STEPS, bool SUPER, int M = MB>
void tiles(int64_t height, const Activations& a, const Layout& layout, Panel& panel, int64_t row, float* sums) {
  if constexpr (M > 1)
    if (height < M) return tiles<F, STEPS, SUPER, M - 1>(height, a, layout, panel, row, sums);
  constexpr int V = M * NV <= MOST_SUMS ? NV : 2;
  for (int64_t first = 0; first < STRIP / V; first += LANES)
    if constexpr (SUPER) super_tile<F, STEPS, M, V>(a, layout, panel, row, first, sums);
    else tile<F, STEPS, M, V>(a, layout, panel, row, first, sums);
}

// ------------------------------------------------------------------------------------------------ product

struct Part {  // outputs of one layout
  Layout layout;
  const Activations* a;
  const uint8_t* packed;  // [experts, ...]
  int64_t expert_bytes;
  int64_t first, n;        // outputs of the layer
  const float* scale;      // [experts, n] per output, or null
  int64_t strips() const { return (n + STRIP - 1) / STRIP; }
};

// Begins the product of a group with a strip of a part: `acc` [rows, 32] is 0, and the panel lies before the strip's
// first weights. output_scale: [32], written where the part has scales per output
void begin_strip(const Part& part, const Group& group, int64_t strip, Panel& panel, float* output_scale, float* acc) {
  const int64_t column = strip * STRIP;
  if (part.scale)
    std::copy_n(part.scale + group.expert * part.n + column, std::min(STRIP, part.n - column), output_scale);
  std::fill(acc, acc + group.rows * STRIP, 0.0f);
  panel.weights = part.packed + group.expert * part.expert_bytes + strip * part.layout.strip_bytes(part.a->k);
}

// acc [rows of the group, 32] = x . w for a strip of a part
template <class F, int STEPS, bool SUPER = false>
void strip_sums(const Part& part, const Group& group, int64_t strip, Panel& panel, float* acc) {
  const Activations& a = *part.a;
  const Layout& layout = part.layout;
  const int64_t T = count_tiles(group), supers = std::max<int64_t>(1, PANEL / layout.super);
  alignas(64) float output_scale[STRIP] = {};
  begin_strip(part, group, strip, panel, output_scale, acc);
  for (panel.first = 0; panel.first < a.k; panel.first = panel.last) {
    panel.last = std::min(a.k, panel.first + supers * layout.super);
    open_panel(layout, output_scale, panel);
    const uint8_t* next = panel.weights + supers * layout.super_bytes();
    panel.ahead = panel.reach = next, panel.shares = T;
    for (int64_t t = 0; t < T; t++) {
      const auto [row, height, on_amx] = tile_of(group, t);
      tiles<F, STEPS, SUPER>(height, a, layout, panel, row, acc + (row - group.first) * STRIP);
    }
    panel.weights = next;
  }
}

}  // namespace
}  // namespace quantized

#include "tile_sums.h"  // the same sums on AMX tiles

namespace quantized {
namespace {

using Sums = void (*)(const Part& part, const Group& group, int64_t strip, Panel& panel, float* acc);

// Returns the `strip_sums` of a layout, or its `tile_sums`.
Sums sums_of(const Layout& layout, int64_t k, bool on_amx) {
  const bool super = layout.header == Header::SUPER;
  if (on_amx && super) {
    if (layout.bits == 6) return super_tile_sums<Halves<2>, BytesOfProduct, 1>;
    if (layout.bits == 5) return super_tile_sums<Halves<1>, PartsOfScale, BLOCK / 64>;
    if (!layout.has_least) return super_tile_sums<Halves<0>, BytesOfProduct, 1>;
    return layout.group == 32 ? super_tile_sums<Halves<0>, PartsOfScale, BLOCK / 64>
                              : super_tile_sums<Halves<0>, PartsOfScale, BLOCK / 32>;
  }
  if (on_amx)
    return layout.bits == 8 ? tile_sums<Bytes> : layout.bits == 5 ? tile_sums<Halves<1>> : tile_sums<Halves<0>>;
  const int64_t steps = k % layout.group ? 0 : layout.group / 4;
  switch (layout.bits) {
    case 4:
      if (super) return steps == 8 ? strip_sums<Halves<0>, 8, true> : strip_sums<Halves<0>, 4, true>;
      return steps == 8 ? strip_sums<Halves<0>, 8> : strip_sums<Halves<0>, 0>;
    case 5: return super ? strip_sums<Halves<1>, 8, true> : strip_sums<Halves<1>, 8>;
    case 6: return strip_sums<Halves<2>, 4, true>;
    default: return steps == 8 ? strip_sums<Bytes, 8> : strip_sums<Bytes, 0>;
  }
}

// y [M, n] = x . w, of all parts
template <class Out> void product(const std::vector<Part>& parts, int64_t n, Out* y) {
  const Order& order = parts[0].a->order;
  int64_t most = 0, work = 0, strips = 0;  // rows of a group; work of a strip
  for (const Group& group : order.groups) {
    most = std::max(most, group.rows);
    work += STRIP * parts[0].a->k * std::max<int64_t>(1, group.rows / 4);
  }
  for (const Part& part : parts) strips += part.strips();
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, work));
  parallel(strips, grain, [&](int64_t begin, int64_t end) {
    static thread_local std::vector<float> acc;  // kept from call to call
    static thread_local Panel panel;
    if (int64_t(acc.size()) < most * STRIP) acc.resize(most * STRIP);
    int64_t before = 0;  // strips of the parts before
    for (const Part& part : parts) {
      const int64_t from = std::max(begin - before, int64_t(0)), to = std::min(end - before, part.strips());
      before += part.strips();
      for (const Group& group : order.groups) {
        const TileShape shape(part, group);
        const auto sum = sums_of(part.layout, part.a->k, shape.on);
        for (int64_t strip = from; strip < to; strip++) {
          sum(part, group, strip, panel, acc.data());
          const int64_t column = strip * STRIP, columns = std::min(STRIP, part.n - column);
          for (int64_t m = 0; m < group.rows; m++)
            put_row<STRIP>(y + order.row[group.first + m] * n + part.first + column, &acc[m * STRIP], columns);
        }
      }
    }
  });
}

// Rounds x once for every block size of the parts, and multiplies.
at::Tensor multiply(const at::Tensor& x, std::vector<Part>& parts, int64_t n, bool wide, int64_t experts,
                    const std::optional<at::Tensor>& expert) {
  const at::Tensor rows = x.contiguous();
  const int64_t k = rows.size(-1), M = rows.numel() / k;
  const bool narrow = rows.scalar_type() == at::kBFloat16;
  TORCH_CHECK(narrow || rows.scalar_type() == at::kFloat, "activations must be bfloat16 or float32");
  const at::Tensor y = empty_rows(rows, n, wide || !narrow ? at::kFloat : at::kBFloat16);
  static thread_local std::vector<Activations> kept;  // their memory is kept from call to call
  if (kept.size() < parts.size()) kept.resize(parts.size());
  for (Activations& a : kept) a.block = 0;
  for (Part& part : parts) {
    const Layout& by = part.layout;
    const bool in_16_bits = FOLDS && by.bits == 8, super = by.header == Header::SUPER;
    const int64_t block = super ? BLOCK : by.group, pair = super ? 2 * by.group : 0;
    const int64_t amx_from = in_16_bits ? Activations::NEVER : rows_for_tiles(by, k);
    Activations& a = *std::find_if(kept.begin(), kept.end(), [&](const Activations& of) {
      return !of.block || (of.block == block && of.pair == pair && of.offset == by.offset && of.wide == in_16_bits &&
                            of.amx_from == amx_from);
    });
    part.a = &a;
    if (a.block) continue;  // rounded for a part before
    a.rows = M, a.k = k, a.block = block, a.pair = pair, a.offset = by.offset, a.wide = in_16_bits;
    a.amx_from = amx_from;
    group_rows(a.order, expert ? expert->const_data_ptr<int64_t>() : nullptr, experts, M);
    if (narrow) round_rows(a, rows.const_data_ptr<at::BFloat16>());
    else round_rows(a, rows.const_data_ptr<float>());
  }
  fill(y, [&](auto* to) { product(parts, n, to); });
  return y;
}

// The same for weights of one layout. dims: dimensions of an expert's layout
at::Tensor multiply(const at::Tensor& x, const at::Tensor& packed, const Layout& layout, int64_t n, const float* scale,
                    bool wide, int64_t dims, const std::optional<at::Tensor>& expert) {
  const int64_t k = x.size(-1), bytes = (n + STRIP - 1) / STRIP * layout.strip_bytes(k);
  TORCH_CHECK(k % 4 == 0, "in_features must be a multiple of 4; it is ", k);
  const int64_t experts = count_experts(packed, dims, x.numel() / k, expert);
  TORCH_CHECK(packed.numel() == experts * bytes, "an input of ", k, " features does not fit weights of ", packed.numel(),
              " bytes and ", n, " outputs");
  TORCH_CHECK(packed.itemsize() == 1, "weights must be packed in bytes");
  const uint8_t* weights = static_cast<const uint8_t*>(packed.const_data_ptr());
  std::vector<Part> parts{{layout, nullptr, weights, bytes, 0, n, scale}};
  return multiply(x, parts, n, wide, experts, expert);
}

}  // namespace

// ---------------------------------------------------------------------------------------------- operators

// Weights with a scale per group of k, as layout.py packs them: 8 bits in int8, 4 bits in uint8.
at::Tensor grouped(const at::Tensor& x, const at::Tensor& packed, int64_t n, bool wide,
                   const std::optional<at::Tensor>& expert) {
  const bool bytes = packed.scalar_type() == at::kChar;
  const int64_t size = packed.size(-1), header = size % 512, group = (size - header) / (bytes ? STRIP : STRIP / 2);
  const bool words = header == 4 * STRIP;
  const bool fits = group >= LEAST_GROUP && group <= BLOCK && (words || header == 2 * STRIP);
  TORCH_CHECK(fits, "weights in groups of ", size, " bytes do not fit; layout.py packs them");
  const int32_t offset = words ? 1 : bytes ? 128 : 8;
  const Layout layout{bytes ? 8 : 4, words ? Header::WORDS : Header::BF16, group, group, offset, header, false};
  return multiply(x, packed, layout, n, nullptr, wide, 3, expert);
}

at::Tensor w8a8(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scale, bool wide,
                const std::optional<at::Tensor>& expert) {
  const Layout layout{8, Header::OUTPUT, BLOCK, BLOCK, 128, 0, false};
  return multiply(x, packed, layout, scale.size(-1), scale.const_data_ptr<float>(), wide, 4, expert);
}

// Weights of blocks of GGUF types. packed: [bytes], from pack_blocks; table: [3 + 3 parts], see blocks.cpp
at::Tensor blocks(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& table, bool wide,
                  const std::optional<at::Tensor>& expert) {
  const BlockTable of(table, packed);
  TORCH_CHECK(x.size(-1) == of.k, "an input of ", x.size(-1), " features does not fit weights for ", of.k);
  const int64_t experts = count_experts(packed, 1, x.numel() / of.k, expert);
  std::vector<Part> parts;
  for (const BlockTable::Part& part : of.parts)
    parts.push_back({part.layout, nullptr, packed.const_data_ptr<uint8_t>() + part.offset, of.bytes, part.first, part.n,
                     nullptr});
  return multiply(x, parts, of.n, wide, experts, expert);
}

}  // namespace quantized

#include "operators.h"

namespace quantized {

// The results, empty, where steps are traced.
at::Tensor empty_grouped(const at::Tensor& x, const at::Tensor&, int64_t n, bool fp32_out,
                         const std::optional<at::Tensor>&) {
  return empty_rows(x, n, fp32_out ? at::kFloat : x.scalar_type());
}
at::Tensor empty_w8a8(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scale,
                      bool fp32_out, const std::optional<at::Tensor>& expert) {
  return empty_grouped(x, packed, scale.size(-1), fp32_out, expert);
}

OPERATORS(m) {
  m.def("grouped(Tensor x, Tensor packed, int n, bool fp32_out, Tensor? expert=None) -> Tensor");
  m.impl("grouped", at::kCPU, grouped);
  m.impl("grouped", at::kMeta, empty_grouped);
  m.def(
      "w8a8(Tensor x, Tensor packed, Tensor scale, bool fp32_out, Tensor? expert=None) -> Tensor");
  m.impl("w8a8", at::kCPU, w8a8);
  m.impl("w8a8", at::kMeta, empty_w8a8);
  m.def(
      "blocks(Tensor x, Tensor packed, Tensor table, bool fp32_out, Tensor? expert=None) "
      "-> Tensor");
  m.impl("blocks", at::kCPU, blocks);
  m.def("use_tiles(str name) -> bool", amx::use_tiles);
  m.def("tiles() -> (str, int, int)", amx::tiles);
}

}  // namespace quantized
