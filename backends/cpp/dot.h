// Integer dot products of rounded rows with a strip of weights: panels, codes, tiles, sums.
//
// A strip's k is cut into panels that stay in the L1 cache while tiles of up to MB rows pass over
// them. A tile of few rows reads a strip as one stream, headers and codes in the order of memory:
// some processors see it and fetch ahead, faster than by instructions that fetch (Zen 4), others read
// 1.3 times as fast by instructions (Zen 5); fetching.py measures it. The hardware multiplies unsigned by signed bytes, so codes are stored with an offset; integer sums
// start at -offset * sum(activations), which takes it out again, exactly. A minimum of a group of
// weights is multiplied by the sum of its activations, in floating point.
//
// Parameters of templates: BITS of a code, or FLOAT4; M rows of a tile; V vectors of outputs; STEPS
// of a group. dot_k_types.h: integer scales. dot_amx.h: tiles of the hardware.
#pragma once

#include "activations.h"
#include "numbers.h"
#include "simd.h"
#include "threads.h"
#include "weight_layout.h"

#include <algorithm>

namespace matmul {
namespace {

constexpr int64_t PANEL = 512;       // k per pass of the rows: 8 to 16 KB of weights
constexpr int NV = STRIP / LANES;    // vectors per strip
constexpr int FEW = 3;               // rows whose products wait for memory, not for arithmetic
bool fetches_for_few = false;        // whether instructions fetch for them; no result depends on it

// ------------------------------------------------------------------------------------------ panels
// A part of a strip's k, whole superblocks.

struct Panel {
  const uint8_t* weights;  // its first superblock
  // the line behind the panel to fetch next, and the end of what is to be fetched by now
  const uint8_t *ahead, *reach;
  int64_t shares;             // of what to fetch: one for each tile that passes over the panel
  int64_t first, last;        // k
  const float* output_scale;  // [32], where the headers have no scales
  void fetch(int64_t bytes) {
    for (reach += bytes; ahead < reach; ahead += 64) to_l2(ahead);
  }
};

// What a header says of LANES outputs. least, zero: where its layout has them
struct Numbers {
  Floats scale, least;
  Ints zero;
};

// Returns half the powers of two of LANES bytes, 2^(byte - 128), as products of two roots.
inline Floats half_powers(const uint8_t* bytes) {
  const auto power = [](Ints exponent) { return words_of(raised<23>(add(exponent, splat(63)))); };
  const Ints all = ints_of(bytes);
  return multiply(power(shifted<-1>(all)), power(shifted<-1>(add(all, splat(1)))));
}

// Reads a header's numbers of the outputs from `output` on. output_scale: as in `Panel`
inline Numbers read_numbers(const Layout& layout, const uint8_t* header, const float* output_scale,
                            int64_t output) {
  const uint16_t* halves = (const uint16_t*)header + output;
  Numbers of{splat(0.0f), splat(0.0f), splat(0)};
  switch (layout.header) {
    case Header::OUTPUT: of.scale = load(output_scale + output); break;
    case Header::BF16: of.scale = from_bf16(halves); break;
    case Header::WORDS: {
      const Ints words = load(header + 4 * output);
      of.scale = words_of(mask(words, ~511));
      of.zero = mask(words, 511);
      break;
    }
    case Header::POWER: of.scale = half_powers(header + output); break;
    default:
      of.scale = from_f16(halves);
      if (layout.has_least) of.least = from_f16(halves + STRIP);
  }
  return of;
}

// ------------------------------------------------------------------------------------------- codes
// The codes of a step, 4 values of k. A tile computes V of a strip's NV vectors of outputs:
// all of them, or vector `first` of both halves, so that it reads a byte of two halves once. Where
// SUMS_IN_16_BITS, a sum of dot products takes FOLD steps in 16 bits. S: of the steps at p. Where
// LINEAR, every step is the first one STEP_BYTES later.

// Returns the first output, behind the tile's first, of its vector j.
template <int V> constexpr int output_of(int j) {
  return (j % (V / 2) + j / (V / 2) * (NV / 2)) * LANES;
}

// Codes of 4 + HIGH bits.
template <int BITS> struct Codes {
  static constexpr int HIGH = BITS - 4;
  static constexpr int STEP_BYTES = BITS * STRIP / 2;
  // 8 * 2 * 15 * 127, 4 * 2 * 31 * 127 and 2 * 2 * 63 * 127 fit 16 bits
  static constexpr int FOLD = 8 >> HIGH;
  static constexpr bool SMALL = true, LINEAR = HIGH == 0;
  template <int S, int V> static inline void unpack(const uint8_t* p, Ints (&w)[V]) {
    for (int j = 0; j < V / 2; j++) {
      const uint8_t* at = p + S / 4 * 4 * STEP_BYTES + 4 * output_of<V>(j);
      const Ints both = load(at + S % 4 * 2 * STRIP);
      w[j] = low_nibbles(both);
      w[V / 2 + j] = high_nibbles(both);
      if constexpr (HIGH) {
        constexpr int bit = S % 4 * 2 * HIGH, fifth = HIGH == 1 ? 0x10101010 : 0x30303030;
        const Ints high = load(at + (4 + bit / 8) * 2 * STRIP);
        w[j] = join(fifth, shifted<4 - bit % 8>(high), w[j]);
        w[V / 2 + j] = join(fifth, shifted<4 - HIGH - bit % 8>(high), w[V / 2 + j]);
      }
    }
  }
};
template <> struct Codes<8> {
  static constexpr int STEP_BYTES = 128, FOLD = 1;
  static constexpr bool SMALL = false, LINEAR = true;
  template <int S, int V> static inline void unpack(const uint8_t* p, Ints (&w)[V]) {
    for (int j = 0; j < V; j++) w[j] = load(p + S * STEP_BYTES + 4 * output_of<V>(j));
  }
};

// In the place of BITS: codes of 4 bits that are MXFP4's numbers.
constexpr int FLOAT4 = 0;
template <> struct Codes<FLOAT4> {
  static constexpr int STEP_BYTES = Codes<4>::STEP_BYTES;
  static constexpr int FOLD = 4;  // 4 * 2 * 24 * 127 fits 16 bits
  static constexpr bool SMALL = true, LINEAR = true;
  template <int S, int V> static inline void unpack(const uint8_t* p, Ints (&w)[V]) {
    Codes<4>::unpack<S>(p, w);
    for (Ints& codes : w) codes = look_up(FLOAT4_BYTES, codes);
  }
};

inline Ints splat_word(const int8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return splat(word);
}

// Bytes of a row's codes for a step.
template <int BITS>
constexpr int ROW_BYTES = SUMS_IN_16_BITS && !Codes<BITS>::SMALL ? 8 : 4;

// Adds the dot products of N steps, from step S on, to U chains in turn. FIRST: step S sets
// its chain, in 16 bits. x: [steps, M, ROW_BYTES]
template <int BITS, int S, int N, bool FIRST, int U, int M, int V>
[[gnu::always_inline]] inline void add_steps(const uint8_t* p, const int8_t* x,
                                             Ints (&chains)[U][M][V]) {
  Ints(&into)[M][V] = chains[S % U];
  const int8_t* of_step = x + S * ROW_BYTES<BITS> * M;
  Ints w[V];
  Codes<BITS>::template unpack<S>(p, w);
  if constexpr (ROW_BYTES<BITS> == 4) {
    for (int m = 0; m < M; m++) {
      const Ints xs = splat_word(of_step + 4 * m);
      for (int j = 0; j < V; j++)
        into[m][j] = FIRST ? products(w[j], xs) : dot<Codes<BITS>::SMALL>(into[m][j], w[j], xs);
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
  if constexpr (N > 1) add_steps<BITS, S + 1, N - 1, false>(p, x, chains);
}

template <int M, int V> inline void clear(Ints (&sums)[M][V]) {
  for (int m = 0; m < M; m++)
    for (int j = 0; j < V; j++) sums[m][j] = splat(0);
}

template <int V> inline void ones(Ints (&halves)[V]) {
  for (Ints& both : halves) both = splat(two_halves(1, 1));
}

// sums [M][V] += N steps, from step S on, as sums in 16 bits of FOLD steps, each times that half of
// `times`.
template <int BITS, int S, int N, int M, int V>
[[gnu::always_inline]] inline void fold_steps(const uint8_t* p, const int8_t* x,
                                              const Ints (&times)[V], Ints (&sums)[M][V]) {
  constexpr int COUNT = std::min(N, Codes<BITS>::FOLD);
  Ints part[1][M][V];
  add_steps<BITS, S, COUNT, true>(p, x, part);
  for (int m = 0; m < M; m++)
    for (int j = 0; j < V; j++) sums[m][j] = fold(sums[m][j], part[0][m][j], times[j]);
  if constexpr (N > COUNT) fold_steps<BITS, S + COUNT, N - COUNT>(p, x, times, sums);
}

// Returns how many chains each of so many sums has, to hide the latency of `dot`.
constexpr int chains_of(int sums) { return sums * 4 <= CHAINS ? 4 : sums * 2 <= CHAINS ? 2 : 1; }

// A group of k: sums [M][V] += the dot products of `steps` steps. x: [steps, M, ROW_BYTES]
template <int BITS, int M, int V>
[[gnu::always_inline]] inline void dots(const uint8_t* p, const int8_t* x, int64_t steps,
                                        Ints (&sums)[M][V]) {
  constexpr int64_t BYTES = Codes<BITS>::STEP_BYTES, OF_ROWS = ROW_BYTES<BITS> * M;
  if constexpr (SUMS_IN_16_BITS && Codes<BITS>::FOLD > 1) {
    Ints once[V];
    ones(once);
    for (; steps >= 8; steps -= 8, p += 8 * BYTES, x += 8 * OF_ROWS)
      fold_steps<BITS, 0, 8>(p, x, once, sums);
    for (; steps >= 4; steps -= 4, p += 4 * BYTES, x += 4 * OF_ROWS)
      fold_steps<BITS, 0, 4>(p, x, once, sums);
    for (; steps > 0; steps--, p += BYTES, x += OF_ROWS) fold_steps<BITS, 0, 1>(p, x, once, sums);
  } else {
    constexpr int U = chains_of(M * V);
    Ints chains[U][M][V];
    for (Ints(&chain)[M][V] : chains) clear(chain);
    for (; steps >= 4; steps -= 4, p += 4 * BYTES, x += 4 * OF_ROWS)
      add_steps<BITS, 0, 4, false>(p, x, chains);
    for (; steps > 0; steps--, p += BYTES, x += OF_ROWS) add_steps<BITS, 0, 1, false>(p, x, chains);
    for (Ints(&chain)[M][V] : chains)
      for (int m = 0; m < M; m++)
        for (int j = 0; j < V; j++) sums[m][j] = add(sums[m][j], chain[m][j]);
  }
}

// Unpacks the codes of a step that is known at run time only.
template <int BITS, int V> inline void codes_of(const uint8_t* p, int64_t step, Ints (&w)[V]) {
  if constexpr (Codes<BITS>::LINEAR)
    return Codes<BITS>::template unpack<0>(p + step * Codes<BITS>::STEP_BYTES, w);
  p += step / 4 * 4 * Codes<BITS>::STEP_BYTES;
  switch (step % 4) {
    case 0: return Codes<BITS>::template unpack<0>(p, w);
    case 1: return Codes<BITS>::template unpack<1>(p, w);
    case 2: return Codes<BITS>::template unpack<2>(p, w);
    default: return Codes<BITS>::template unpack<3>(p, w);
  }
}

// sums [M][V] += the dot products of the high parts of outliers; where SUMS_IN_16_BITS, times
// `times` as in `fold_steps`. steps: those that have any, a bit each; high: [steps, M, 4]
template <int BITS, int M, int V>
[[gnu::always_inline]] inline void add_outliers(const uint8_t* p, const int8_t* high,
                                                uint32_t steps, const Ints (&times)[V],
                                                Ints (&sums)[M][V]) {
  for (; steps; steps &= steps - 1) {
    const int64_t step = __builtin_ctz(steps);
    Ints w[V];
    codes_of<BITS>(p, step, w);
    for (int m = 0; m < M; m++) {
      const Ints xs = splat_word(high + (step * M + m) * 4);
      for (int j = 0; j < V; j++)
        sums[m][j] = SUMS_IN_16_BITS ? fold(sums[m][j], products(w[j], xs), times[j])
                                     : dot<Codes<BITS>::SMALL>(sums[m][j], w[j], xs);
    }
  }
}

// sums *= 128, as of high parts
template <int M, int V> [[gnu::always_inline]] inline void raise_sums(Ints (&sums)[M][V]) {
  for (int m = 0; m < M; m++)
    for (int j = 0; j < V; j++) sums[m][j] = raised<7>(sums[m][j]);
}

// -------------------------------------------------------------------------------------------- sums
// The numbers of a tile's rows besides their codes: of a block, with the next rows' behind it.
struct RowInfo {
  const float *scales, *sums;
  const int32_t *starts, *pairs;
  const uint32_t* outliers;
  RowInfo(const Activations& a, int64_t block)
      : scales(&a.scales[block]), sums(&a.sums[block]), starts(&a.starts[block]),
        pairs(a.pair ? &a.pairs[block * 2 * BLOCK / a.pair] : nullptr),
        outliers(&a.outliers[block]) {}
  // Goes on to the next block of `rows` rows.
  void next(int rows) {
    scales += rows;
    sums += rows;
    starts += rows;
    outliers += rows;
  }
  // Returns the steps that have outliers in any of `rows` rows.
  uint32_t outlier_steps(int rows) const {
    uint32_t any = 0;
    for (int m = 0; m < rows; m++) any |= outliers[m];
    return any;
  }
};

// Numbers that a group's sums lack: nothing, its minima, the codes' offset, or zero points. Minima
// have no offset.
enum class Correction { NOTHING, LEAST, START, ZERO };

inline Correction correction_of(const Layout& layout) {
  if (layout.header == Header::WORDS) return Correction::ZERO;
  if (layout.has_least) return Correction::LEAST;
  return layout.offset ? Correction::START : Correction::NOTHING;
}

// total += a group's sums, scaled, of V vectors of outputs. numbers(j): the header's, of vector j
template <Correction CORRECTION, int M, int V, class Read>
[[gnu::always_inline]] inline void scale_sums(Ints (&sums)[M][V], const Read& numbers,
                                              const RowInfo& x, Floats (&total)[M][V]) {
  Numbers of[V];
  for (int j = 0; j < V; j++) of[j] = numbers(j);
  for (int m = 0; m < M; m++) {
    const Ints start = splat(x.starts[m]);
    const Floats of_row = splat(x.scales[m]), row_sum = splat(x.sums[m]);
    for (int j = 0; j < V; j++) {
      Ints sum = sums[m][j];
      if (CORRECTION == Correction::START) sum = add(sum, start);
      if (CORRECTION == Correction::ZERO) sum = add(sum, multiply(of[j].zero, start));
      total[m][j] = add_scaled(sum, multiply(of[j].scale, of_row), total[m][j]);
      if (CORRECTION == Correction::LEAST)
        total[m][j] = multiply_add(of[j].least, row_sum, total[m][j]);
    }
  }
}

// Adds a group's dot products with a tile's rows, scaled, to `total`.
template <int BITS, int M, int V, class Read>
[[gnu::always_inline]] inline void add_group(const uint8_t* p, const int8_t* x, const int8_t* high,
                                             int64_t steps, Correction correction,
                                             const Read& numbers, const RowInfo& info,
                                             Floats (&total)[M][V]) {
  Ints sums[M][V];
  clear(sums);
  const bool is_wide = ROW_BYTES<BITS> != 4;  // wide codes have no high parts
  if (const uint32_t outliers = is_wide ? 0 : info.outlier_steps(M)) {
    Ints once[V];
    ones(once);
    add_outliers<BITS>(p, high, outliers, once, sums);
    raise_sums(sums);
  }
  dots<BITS, M, V>(p, x, steps, sums);
  switch (correction) {
    case Correction::NOTHING: return scale_sums<Correction::NOTHING>(sums, numbers, info, total);
    case Correction::LEAST: return scale_sums<Correction::LEAST>(sums, numbers, info, total);
    case Correction::START: return scale_sums<Correction::START>(sums, numbers, info, total);
    case Correction::ZERO: return scale_sums<Correction::ZERO>(sums, numbers, info, total);
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

// One tile's pass over a panel, for V vectors of outputs. STEPS: of every group of k, so that its
// sums stay in registers; 0: any. first: of the vectors; sums: [M, 32], read and written
template <int BITS, int STEPS, int M, int V>
[[gnu::noinline]] void tile(const Activations& a, const Layout& layout, Panel& panel, int64_t row,
                            int64_t first, float* sums) {
  const int64_t at = (row * a.k + panel.first * M) / 4 * ROW_BYTES<BITS>;
  const int8_t *x = &a.codes[at], *high = a.highs.data() + at;
  RowInfo info(a, row * a.blocks + panel.first / a.block * M);
  // fetched by the processor
  const bool is_stream = M <= FEW && V == NV && panel.shares == 1 && !fetches_for_few;
  const int64_t share = is_stream ? 0 : layout.super_bytes() * V / NV / panel.shares;
  const int64_t last = panel.last;
  const float* output_scale = panel.output_scale;
  const Correction correction = correction_of(layout);
  const uint8_t *header = panel.weights, *ahead = panel.ahead, *reach = panel.reach;
  Floats total[M][V];
  load_sums(sums + first, total);
  for (int64_t k = panel.first; k < last; k += layout.group) {
    const int64_t steps = STEPS ? STEPS : std::min(layout.group, last - k) / 4;
    const auto read = [&](int j) {
      return read_numbers(layout, header, output_scale, first + output_of<V>(j));
    };
    Numbers before[V];  // the codes: in the order of memory
    for (int j = 0; j < V && M <= FEW; j++) before[j] = read(j);
    const auto numbers = [&](int j) { return M <= FEW ? before[j] : read(j); };
    const uint8_t* p = header + layout.header_bytes + 4 * first;
    add_group<BITS>(p, x, high, steps, correction, numbers, info, total);
    header += layout.header_bytes + steps * Codes<BITS>::STEP_BYTES;
    x += steps * ROW_BYTES<BITS> * M;
    high += steps * ROW_BYTES<BITS> * M;
    info.next(M);
    for (reach += share; ahead < reach; ahead += 64) to_l2(ahead);
  }
  store_sums(total, sums + first);
  panel.ahead = ahead;
  panel.reach = reach;
}

// ------------------------------------------------------------------------------------------ strips

// The strips of a part of a layer's outputs, and the rows that they are multiplied with.
struct Strips {
  Layout layout;
  const Activations* a;
  const uint8_t* data;  // of the first expert
  int64_t expert_bytes;
  int64_t first, n;  // outputs of the layer
  int64_t count() const { return count_strips(n); }
  // Returns the scales of a strip's outputs, [32], where its layout has no headers.
  const float* output_scale(int64_t expert, int64_t strip) const {
    if (layout.header != Header::OUTPUT) return nullptr;
    const uint8_t* behind = data + expert * expert_bytes + codes_bytes(layout, n, a->k);
    return (const float*)behind + strip * STRIP;
  }
};

// Begins the matmul of a group with a strip: `acc` [rows, 32] is 0, and the panel lies before the
// strip's first weights.
void begin_strip(const Strips& strips, const Group& group, int64_t strip, Panel& panel,
                 float* acc) {
  std::fill(acc, acc + group.rows * STRIP, 0.0f);
  panel.weights = strips.data + group.expert * strips.expert_bytes +
                  strip * strips.layout.strip_bytes(strips.a->k);
  panel.output_scale = strips.output_scale(group.expert, strip);
}

}  // namespace
}  // namespace matmul
