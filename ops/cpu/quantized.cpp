// Linear layers with int8 or int4 weights for 1 to a few hundred tokens on a CPU, in integer dot products.
//
// 1. Activations are rounded to int8 with one scale per row and block of k (the weights' group for int4, else BLOCK8),
//    so that an outlier costs precision in its own block only.
// 2. Weights lie in strips of 32 outputs (layout.py), one contiguous stream each. Codes are stored with an offset (8 or
//    128), because the hardware multiplies unsigned by signed bytes; integer sums start at -offset * sum(activations),
//    which takes it out again, exactly. A zero point of a group of int4 is one more offset.
// 3. Threads share the strips. Within a strip, k is cut into panels that stay in the L1 cache while tiles of up to MB
//    rows pass over them. In a mixture, each expert's rows pass over its own strips; idle experts are not read.
//
// A row's result does not depend on the other rows, bit for bit: integer sums are exact, and the sum in floating point
// runs over the blocks of k in their order. Plain references: ops/quantized.py. Sources of the idea: Q8_0 x Q4_0
// products of llama.cpp (blockwise activations); VNNI packing of oneDNN.

#include "common.h"

namespace quantized {
namespace {

constexpr int64_t STRIP = 32;    // outputs whose weights are interleaved
constexpr int64_t BLOCK8 = 128;  // k per activation scale of the int8 format
constexpr int64_t PANEL = 512;   // k per pass over the tokens: 8 or 16 KB of weights
constexpr int64_t GRAIN = 1 << 19;  // multiply-adds (and bytes) that pay for a thread's wake-up

constexpr int NV = STRIP / LANES;  // vectors per strip

// ------------------------------------------------------------------------------------------- activations

// A group's rows go through the product in tiles of up to MB, of nearly equal height; within a tile, the rows' values
// for a step lie side by side.
struct Tile {
  int64_t first, height;  // rows first .. first + height - 1
};
inline int64_t count_tiles(const Group& group) { return (group.rows + MB - 1) / MB; }
inline Tile tile_of(const Group& group, int64_t t) {
  const int64_t count = count_tiles(group), first = group.rows * t / count;
  return {group.first + first, group.rows * (t + 1) / count - first};
}
struct Activations {
  int64_t rows, k, block, blocks;
  Order order;
  std::vector<int8_t> codes;    // per tile of T rows: [K / 4, T, 4]
  std::vector<float> scales;    // per tile: [blocks, T]
  std::vector<int32_t> starts;  // per tile: [blocks, T], -offset * sum of the block's codes
};

template <class T> void round_block(const T* x, int64_t n, int offset, int8_t* codes, float* scale, int32_t* start) {
  uint32_t most = 0;  // of the magnitudes' bits, which order like the magnitudes, NaN last
  for (int64_t i = 0; i < n; i++) {
    float v = widen(x[i]);
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float magnitude;
  std::memcpy(&magnitude, &most, 4);
  const float to_code = magnitude > 1e-30f ? 127.0f / magnitude : 0.0f;
  int32_t sum = 0;
  for (int64_t i = 0; i < n; i++) {
    float shifted = widen(x[i]) * to_code + 12582912.0f;  // 1.5 * 2^23: rounds to nearest even into the low bits
    int32_t code;
    std::memcpy(&code, &shifted, 4);
    code -= 0x4b400000;
    codes[i] = int8_t(code);
    sum += int8_t(code);
  }
  *scale = magnitude / 127.0f;
  *start = -offset * sum;
}

template <class T> void round_rows(Activations& a, const T* x, int offset) {
  a.codes.resize(a.rows * a.k);
  a.scales.resize(a.rows * a.blocks);
  a.starts.resize(a.rows * a.blocks);
  std::vector<Tile> tiles;
  for (const Group& group : a.order.groups)
    for (int64_t t = 0; t < count_tiles(group); t++) tiles.push_back(tile_of(group, t));
  parallel(tiles.size(), std::max<int64_t>(1, GRAIN / 16 / (MB * a.k)), [&](int64_t begin, int64_t end) {
    std::vector<int8_t> codes(a.block);
    for (int64_t t = begin; t < end; t++) {
      const auto [first, height] = tiles[t];
      for (int64_t b = 0; b < a.blocks; b++)
        for (int64_t m = 0; m < height; m++) {
          const int64_t n = std::min(a.block, a.k - b * a.block), i = first * a.blocks + b * height + m;
          const T* from = x + a.order.row[first + m] * a.k + b * a.block;
          round_block(from, n, offset, codes.data(), &a.scales[i], &a.starts[i]);
          int8_t* to = &a.codes[first * a.k + b * a.block * height + 4 * m];
          for (int64_t s = 0; s < n / 4; s++) std::memcpy(to + 4 * height * s, &codes[4 * s], 4);
        }
    }
  });
}

// ---------------------------------------------------------------------------------------------- formats
// A block of a strip: `codes` and, for int4, the 32 scales in front of them: bf16, or with ZEROS words of join_zeros
// (ops/quantized.py). start: of the integer sums, for an activation sum times -OFFSET.

template <bool ZEROS> struct Int4 {
  static constexpr bool SMALL = true;
  static constexpr int OFFSET = ZEROS ? 1 : 8, STEP_BYTES = 64;  // a byte: output i low, output i + 16 high
  static constexpr int HEADER = (ZEROS ? 4 : 2) * STRIP;
  static inline Ints words(const uint8_t* block, int j) { return load(block + j * 4 * LANES); }
  static inline Ints start(const uint8_t* block, int j, int32_t sum) {
    return ZEROS ? multiply(mask(words(block, j), 31), splat(sum)) : splat(sum);
  }
  static inline void codes(const uint8_t* p, Ints (&w)[NV]) {
    for (int j = 0; j < NV / 2; j++) {
      Ints both = load(p + j * 4 * LANES);
      w[j] = low_nibbles(both);
      w[j + NV / 2] = high_nibbles(both);
    }
  }
  static inline Floats scale(const uint8_t* block, int j) {
    return ZEROS ? words_of(mask(words(block, j), ~31)) : from_bf16((const uint16_t*)block + j * LANES);
  }
};

struct Int8 {
  static constexpr bool SMALL = false;
  static constexpr int OFFSET = 128, STEP_BYTES = 128;
  static constexpr int HEADER = 0;  // one scale per output, applied at the end
  static inline Ints start(const uint8_t*, int, int32_t sum) { return splat(sum); }
  static inline void codes(const uint8_t* p, Ints (&w)[NV]) {
    for (int j = 0; j < NV; j++) w[j] = load(p + j * 4 * LANES);
  }
  static inline Floats scale(const uint8_t*, int) { return splat(1.0f); }
};

// One tile's pass over a panel: the blocks first .. last of a strip.
struct Pass {
  int64_t row, first, last;
  const uint8_t* w;      // the first block
  const uint8_t* ahead;  // this pass's share of the next panel, fetched meanwhile ...
  int64_t stride;        // ... at so many bytes per step
  float* acc;            // [M, 32], read and written
};

template <class F, int M> void tile(const Activations& a, Pass pass) {
  constexpr int U = M * NV >= 8 ? 1 : M * NV >= 4 ? 2 : 4;  // steps at a time: independent sums hide dot's latency
  const auto [row, first, last, panel, next, stride, acc] = pass;
  const uint8_t *w = panel, *ahead = next;
  const int8_t* x = &a.codes[row * a.k + first * a.block * M];
  for (int64_t b = first; b < last; b++) {
    const int64_t steps = std::min(a.block, a.k - b * a.block) / 4;
    const int32_t* starts = &a.starts[row * a.blocks + b * M];
    const float* scales = &a.scales[row * a.blocks + b * M];
    const uint8_t* p = w + F::HEADER;
    Ints dots[U][M][NV];
    for (int u = 0; u < U; u++)
      for (int m = 0; m < M; m++)
        for (int j = 0; j < NV; j++) dots[u][m][j] = u ? splat(0) : F::start(w, j, starts[m]);
    const auto step = [&](Ints(&sums)[M][NV]) {
      Ints codes[NV];
      F::codes(p, codes);
      for (int i = 0; i < F::STEP_BYTES; i += 64) __builtin_prefetch(ahead + i);
      for (int m = 0; m < M; m++) {
        int32_t four;
        std::memcpy(&four, x + 4 * m, 4);
        const Ints xs = splat(four);
        for (int j = 0; j < NV; j++) sums[m][j] = dot<F::SMALL>(sums[m][j], codes[j], xs);
      }
      p += F::STEP_BYTES, x += 4 * M, ahead += stride;
    };
    int64_t s = 0;
    for (; s + U <= steps; s += U)
      for (int u = 0; u < U; u++) step(dots[u]);
    for (; s < steps; s++) step(dots[0]);
    for (int j = 0; j < NV; j++) {
      const Floats scale = F::scale(w, j);
      for (int m = 0; m < M; m++) {
        Ints total = dots[0][m][j];
        for (int u = 1; u < U; u++) total = add(total, dots[u][m][j]);
        float* sum = acc + m * STRIP + j * LANES;
        store(sum, add_scaled(total, multiply(scale, splat(scales[m])), load(sum)));
      }
    }
    w = p;
  }
}

template <class F, int M = MB> void tiles(int64_t height, const Activations& a, const Pass& pass) {
  if constexpr (M > 1)
    if (height < M) return tiles<F, M - 1>(height, a, pass);
  tile<F, M>(a, pass);
}

// y[M, n] = x . w. packed: [experts, strips, ...]; scale: [experts, n] per output, or null
template <class F, class Out>
void product(const Activations& a, const uint8_t* packed, int64_t n, const float* scale, Out* y) {
  const int64_t panel = std::max<int64_t>(1, PANEL / a.block), strips = (n + STRIP - 1) / STRIP;
  const int64_t block_bytes = F::HEADER + a.block / 4 * F::STEP_BYTES;
  const int64_t strip_bytes = a.blocks * F::HEADER + a.k / 4 * F::STEP_BYTES;
  int64_t most = 0, work = 0;  // rows of a group; of a strip
  for (const Group& group : a.order.groups) {
    most = std::max(most, group.rows);
    work += STRIP * a.k * std::max<int64_t>(1, group.rows / 4);
  }
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, work));
  parallel(strips, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> acc(most * STRIP);
    for (const Group& group : a.order.groups)
      for (int64_t strip = begin; strip < end; strip++) {
        const int64_t T = count_tiles(group);
        const uint8_t* weights = packed + (group.expert * strips + strip) * strip_bytes;
        std::fill(acc.begin(), acc.begin() + group.rows * STRIP, 0.0f);
        for (int64_t first = 0; first < a.blocks; first += panel) {
          const uint8_t *w = weights + first * block_bytes, *next = w + panel * block_bytes;
          for (int64_t t = 0; t < T; t++) {
            const auto [row, height] = tile_of(group, t);
            tiles<F>(height, a, {row, first, std::min(first + panel, a.blocks), w, next + t * panel * block_bytes / T,
                                 (F::STEP_BYTES + T - 1) / T, &acc[(row - group.first) * STRIP]});
          }
        }
        const int64_t column = strip * STRIP, columns = std::min(STRIP, n - column);
        const float* scales = scale ? scale + group.expert * n + column : nullptr;
        for (int64_t m = 0; m < group.rows; m++) {
          float* sums = &acc[m * STRIP];
          if (scales)
            for (int64_t i = 0; i < columns; i++) sums[i] *= scales[i];
          put_row<STRIP>(y + a.order.row[group.first + m] * n + column, sums, columns);
        }
      }
  });
}

// block: k per activation scale; scale: as for product
struct Layer {
  const at::Tensor &x, &packed;
  const std::optional<at::Tensor>& expert;
  int64_t n, block, dims;
  const float* scale;
  bool wide;
};

template <class F> at::Tensor multiply(const Layer& layer) {
  const at::Tensor rows = layer.x.contiguous();
  const int64_t k = rows.size(-1), M = rows.numel() / k;
  TORCH_CHECK(k % 4 == 0, "in_features must be a multiple of 4; it is ", k);
  const bool narrow = rows.scalar_type() == at::kBFloat16;
  TORCH_CHECK(narrow || rows.scalar_type() == at::kFloat, "activations must be bfloat16 or float32");
  const at::Tensor y = empty_rows(rows, layer.n, layer.wide || !narrow ? at::kFloat : at::kBFloat16);
  static thread_local Activations a;  // its memory is kept from call to call; threads get a reference
  a.rows = M, a.k = k, a.block = layer.block, a.blocks = (k + layer.block - 1) / layer.block;
  const int64_t experts = count_experts(layer.packed, layer.dims, M, layer.expert);
  const int64_t strips = (layer.n + STRIP - 1) / STRIP, whole = a.blocks * F::HEADER + k / 4 * F::STEP_BYTES;
  TORCH_CHECK(layer.packed.numel() == experts * strips * whole, "an input of ", k, " features does not fit weights of ",
              layer.packed.numel(), " bytes and ", layer.n, " outputs");
  group_rows(a.order, layer.expert ? layer.expert->const_data_ptr<int64_t>() : nullptr, experts, M);
  if (narrow) round_rows(a, rows.const_data_ptr<at::BFloat16>(), F::OFFSET);
  else round_rows(a, rows.const_data_ptr<float>(), F::OFFSET);
  const uint8_t* w = layer.packed.const_data_ptr<uint8_t>();
  fill(y, [&](auto* to) { product<F>(a, w, layer.n, layer.scale, to); });
  return y;
}

}  // namespace

// ---------------------------------------------------------------------------------------------- operators

at::Tensor w4a8(const at::Tensor& x, const at::Tensor& packed, int64_t n, bool wide,
                const std::optional<at::Tensor>& expert) {
  const int64_t size = packed.size(-1), group = size / 512 * 32, header = size % 512;  // as in layout.py
  TORCH_CHECK(group && (header == Int4<false>::HEADER || header == Int4<true>::HEADER), "weights in blocks of ", size,
              " bytes do not fit; pack_int4_strips lays them out");
  const Layer layer{x, packed, expert, n, group, 3, nullptr, wide};
  return header == Int4<true>::HEADER ? multiply<Int4<true>>(layer) : multiply<Int4<false>>(layer);
}

at::Tensor w8a8(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scale, bool wide,
                const std::optional<at::Tensor>& expert) {
  return multiply<Int8>({x, packed, expert, scale.size(-1), BLOCK8, 4, scale.const_data_ptr<float>(), wide});
}

}  // namespace quantized
