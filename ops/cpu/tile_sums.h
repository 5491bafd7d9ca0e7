// The sums of quantized.cpp on AMX tiles, bit for bit, for groups of some rows. quantized.cpp includes this file.
//
// The codes of a panel are unpacked to bytes, then tiles of up to 16 rows pass over it: the integer sums of a few groups
// of k are stored, the listed outliers are added, and `scale_sums` adds them in floating point as on other processors.
// The tile unit hides products, not the work in floating point, which bounds groups of 32. Integer scales of K types are
// multiplied into the weights instead, in two planes of bytes, so that tiles add up a whole block.
#pragma once

#include "tiles.h"

namespace quantized {
namespace {

constexpr int64_t TILE_PANEL = 256;  // k that is unpacked at a time
constexpr int64_t CHUNK = 4;         // groups of k, or planes, at most, whose sums wait in L1: more leave it
constexpr int64_t CHUNK_K = 256;     // their k, at most
constexpr int64_t AHEAD = 12288;     // bytes of weights that are fetched

// Returns the rows of a group of rows from which on a prototype of the tiles was faster on an Emerald Rapids. It did not
// have the planes of K types: theirs is an estimate.
int64_t rows_for_tiles(const Layout& layout, int64_t k) {
  const int64_t size = layout.group;
  if (!amx::in_use() || k % size || (size != 16 && size != 32 && size != 64 && size != 128)) return Activations::NEVER;
  return size >= 64 ? 8 : 12;
}

// The configuration of this thread for a group of rows, if they go through tiles.
class TileShape {
 public:
  TileShape(const Part& part, const Group& group) : on(part.a->on_amx(group)) {
    if (!on) return;
    const int64_t count = count_tiles(group, true), tallest = (group.rows + count - 1) / count;
    amx::with_unit([&](auto unit) { unit.configure(amx::shape_of_groups(tallest, part.a->block)); });
  }
  ~TileShape() {
    if (on) amx::with_unit([](auto unit) { unit.release(); });
  }
  const bool on;
};

struct TileScratch {  // of a thread: 24 KB
  alignas(64) uint8_t codes[2 * TILE_PANEL * STRIP];  // one plane, or two for each block
  Ints sums[CHUNK][amx::ROWS][NV];
  const uint8_t* of_group[TILE_PANEL / 16];  // the codes of each group of k
};

// Unpacks four steps, from step S on, to bytes in the order of `Bytes`.
template <class F, int S = 0> void unpack_four(const uint8_t* p, uint8_t* to) {
  Ints w[NV];
  F::template codes<S>(p, w);
  for (int j = 0; j < NV; j++) store((int32_t*)(to + S * Bytes::STEP_BYTES + 4 * output_of<NV>(j)), w[j]);
  if constexpr (S < 3) unpack_four<F, S + 1>(p, to);
}

// Finds the codes of a panel's groups, unpacked.
template <class F> void open_codes(const Layout& layout, const Panel& panel, TileScratch& scratch) {
  const uint8_t** of_group = scratch.of_group;
  const uint8_t* p = panel.weights;
  uint8_t* to = scratch.codes;
  for (int64_t k = panel.first; k < panel.last; k += layout.super) {
    p += layout.header_bytes;
    for (int64_t i = 0; i < layout.super; i += layout.group) {
      *of_group++ = F::SMALL ? to : p;
      for (int64_t step = 0; step < layout.group / 4; step += 4, p += 4 * F::STEP_BYTES)
        if (F::SMALL) unpack_four<F>(p, to), to += 4 * Bytes::STEP_BYTES;
    }
  }
}

// sums += 128 times the dot products of the high parts of the outliers in `count` blocks of k. codes, sums: of the
// blocks, in PLANES each
template <int PLANES>
void add_listed(const Activations& a, const Tile& tile, int64_t block, int64_t count, const uint8_t* const* codes,
                Ints (*sums)[amx::ROWS][NV]) {
  const int64_t* ends = &a.list_ends[tile.first * (a.blocks + 1) + block];
  const Outlier *outlier = a.listed.data() + ends[0], *last = a.listed.data() + ends[count];
  Ints once[NV];
  ones(once);
  for (; outlier < last; outlier++)
    for (int64_t i = (outlier->block - block) * PLANES, end = i + PLANES; i < end; i++) {
      Ints w[NV], (&sum)[NV] = sums[i][outlier->row];
      Bytes::codes<0>(codes[i] + outlier->step * Bytes::STEP_BYTES, w);
      const Ints x = splat(outlier->high);
      for (int j = 0; j < NV; j++) {
        const Ints zero = splat(0), four = FOLDS ? fold(zero, products(w[j], x), once[j]) : dot<true>(zero, w[j], x);
        sum[j] = add(sum[j], times_128(four));
      }
    }
}

// total [M, 32] += the sums of `count` groups of k with M rows, scaled. sums: from row m on; g: the first group
template <Adds ADDS, int M>
[[gnu::always_inline]] inline void scale_rows(const Ints (*sums)[amx::ROWS][NV], int64_t g, int64_t count,
                                              const Panel& panel, const Ends& ends, int64_t height, int64_t m,
                                              float* acc) {
  Floats total[M][NV];
  load_sums(acc + m * STRIP, total);
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = (g + i) * height + m;
    Ints rows[M][NV];
    for (int r = 0; r < M; r++)
      for (int j = 0; j < NV; j++) rows[r][j] = sums[i][m + r][j];
    Ends of_rows = ends;
    of_rows.scales += at, of_rows.sums += at, of_rows.starts += at;
    scale_sums<ADDS, M, NV>(rows, panel, (g + i) * STRIP, of_rows, total);
  }
  store_sums(total, acc + m * STRIP);
}

// The same for all rows of a tile; calls fetch() once in four rows.
template <Adds ADDS, class Fetch>
void scale_tile(const Ints (*sums)[amx::ROWS][NV], int64_t g, int64_t count, const Panel& panel, const Ends& ends,
                int64_t height, const Fetch& fetch, float* acc) {
  int64_t m = 0;
  for (; m + 4 <= height; m += 4, fetch()) scale_rows<ADDS, 4>(sums, g, count, panel, ends, height, m, acc);
  for (; m < height; m++) scale_rows<ADDS, 1>(sums, g, count, panel, ends, height, m, acc);
}

// A tile's pass over a panel. acc: [height, 32], read and written
void tile_panel(const Activations& a, const Layout& layout, Panel& panel, TileScratch& scratch, const Tile& tile,
                float* acc) {
  const int64_t height = tile.height, groups = (panel.last - panel.first) / a.block;
  const int64_t line = a.block / 4 * a.step_bytes();
  const int64_t block = tile.first * a.blocks + panel.first / a.block * height;
  const Ends ends(a, block);
  const int8_t* x = &a.codes[block * line];
  const int64_t share = layout.super_bytes() * a.block / layout.super / panel.tiles;  // bytes to fetch, of a group
  const int64_t chunk = std::min(CHUNK, CHUNK_K / a.block);
  for (int64_t g = 0; g < groups; g += chunk) {
    const int64_t count = std::min(chunk, groups - g), fetches = count + height / 4;
    const auto fetch = [&] {  // evenly, or memory would be idle meanwhile
      panel.reach += (share * count + fetches - 1) / fetches;
      for (; panel.ahead < panel.reach; panel.ahead += 64) to_l2(panel.ahead);
    };
    const int8_t* rows[CHUNK];
    for (int64_t i = 0; i < count; i++) rows[i] = x + (g + i) * height * line;
    const uint8_t* const* codes = scratch.of_group + g;
    amx::with_unit([&]<class Unit>(Unit) {
      amx::dot_groups<Unit>(rows, line, codes, a.block, count, (int32_t*)scratch.sums, fetch);
    });
    add_listed<1>(a, tile, panel.first / a.block + g, count, codes, scratch.sums);
    switch (adds_of(layout)) {
      case Adds::NOTHING: scale_tile<Adds::NOTHING>(scratch.sums, g, count, panel, ends, height, fetch, acc); break;
      case Adds::LEAST: scale_tile<Adds::LEAST>(scratch.sums, g, count, panel, ends, height, fetch, acc); break;
      case Adds::START: scale_tile<Adds::START>(scratch.sums, g, count, panel, ends, height, fetch, acc); break;
      case Adds::ZERO: scale_tile<Adds::ZERO>(scratch.sums, g, count, panel, ends, height, fetch, acc); break;
    }
  }
}

// As `strip_sums`: unpacks each panel by `open`, and calls `each` for the tiles that pass over it.
template <class Open, class Each>
void each_tile(const Part& part, const Group& group, int64_t strip, Panel& panel, float* acc, const Open& open,
               const Each& each) {
  static thread_local TileScratch scratch;
  const Layout& layout = part.layout;
  const int64_t T = count_tiles(group, true), supers = std::max<int64_t>(1, TILE_PANEL / layout.super);
  alignas(64) float output_scale[STRIP] = {};
  begin_strip(part, group, strip, panel, output_scale, acc);
  for (panel.first = 0; panel.first < part.a->k; panel.first = panel.last) {
    panel.last = std::min(part.a->k, panel.first + supers * layout.super);
    open_panel(layout, output_scale, panel);
    open(layout, panel, scratch);
    panel.ahead = panel.reach = panel.weights + AHEAD, panel.tiles = T;
    for (int64_t t = 0; t < T; t++) {
      const Tile tile = tile_of(group, t, true);
      each(*part.a, layout, panel, scratch, tile, acc + (tile.first - group.first) * STRIP);
    }
    panel.weights += supers * layout.super_bytes();
  }
}

template <class F>
void tile_sums(const Part& part, const Group& group, int64_t strip, Panel& panel, float* acc) {
  each_tile(part, group, strip, panel, acc, open_codes<F>, tile_panel);
}

// ------------------------------------------------------------------------------------- integer scales

// Unpacks a panel's blocks to planes: (code - offset) * scale = low + 128 * (high - offset).
template <class F> void open_planes(const Layout& layout, const Panel& panel, TileScratch& scratch) {
  constexpr int64_t STEP = Bytes::STEP_BYTES, PLANE = BLOCK / 4 * STEP;
  const uint8_t* p = panel.weights;
  const int32_t* times = panel.times;
  for (int64_t k = 0; k < panel.last - panel.first; k += layout.group, times += STRIP) {
    if (k % layout.super == 0) p += layout.header_bytes;
    int16_t scale[STEP];
    for (int64_t i = 0; i < STEP; i++) scale[i] = int16_t(times[i / 4]);
    for (int64_t i = k; i < k + layout.group; i += 16, p += 4 * F::STEP_BYTES) {
      alignas(64) uint8_t codes[4 * STEP];
      unpack_four<F>(p, codes);
      uint8_t *low = scratch.codes + i / BLOCK * 2 * PLANE + i % BLOCK / 4 * STEP, *high = low + PLANE;
      for (int64_t j = 0; j < 4 * STEP; j++) {
        const int16_t product = int16_t((codes[j] - layout.offset) * scale[j % STEP] + 128 * layout.offset);
        low[j] = product & 127, high[j] = uint8_t(product >> 7);
      }
    }
  }
}

// As `tile_panel`.
void super_tile_panel(const Activations& a, const Layout& layout, Panel& panel, TileScratch& scratch, const Tile& tile,
                      float* acc) {
  constexpr int64_t PLANE = BLOCK * STRIP;
  static_assert(CHUNK >= 4);  // two planes of codes, times those of the activations
  const int64_t height = tile.height, first = tile.first * a.blocks + panel.first / BLOCK * height;
  for (int64_t k = 0; k < panel.last - panel.first; k += BLOCK) {
    const int64_t block = first + k / BLOCK * height;
    Ends ends(a, block);
    const uint32_t outliers = ends.outlier_steps(height);
    const int8_t *x = &a.codes[block * BLOCK], *high = &a.highs[block * BLOCK], *rows[] = {x, x, high, high};
    const uint8_t* planes = scratch.codes + k * 2 * STRIP;
    const uint8_t* codes[] = {planes, planes + PLANE, planes, planes + PLANE};
    const int64_t share = layout.super_bytes() * BLOCK / layout.super / panel.tiles, count = outliers ? 4 : 2;
    const auto fetch = [&] {
      panel.reach += share / count;
      for (; panel.ahead < panel.reach; panel.ahead += 64) to_l2(panel.ahead);
    };
    amx::with_unit([&]<class Unit>(Unit) {
      amx::dot_groups<Unit>(rows, BLOCK, codes, BLOCK, count, (int32_t*)scratch.sums, fetch);
    });
    for (int64_t m = 0; m < height; m++) {
      Ints sums[1][NV];
      for (int j = 0; j < NV; j++) {
        const auto base_128 = [&](int64_t low, Ints high) {
          return add(scratch.sums[low][m][j], times_128(add(scratch.sums[low + 1][m][j], high)));
        };
        const Ints of_outliers = outliers ? base_128(2, splat(0)) : splat(0);
        sums[0][j] = base_128(0, add(of_outliers, splat(*ends.starts)));
      }
      const int64_t super = k / layout.super * STRIP, pairs = k / a.pair * STRIP;
      float* to = acc + m * STRIP;
      if (!layout.has_least) add_block<Adds::NOTHING, 1>(sums, 0, panel, super, pairs, ends, to);
      else if (a.pair == 64) add_block<Adds::LEAST, BLOCK / 64>(sums, 0, panel, super, pairs, ends, to);
      else add_block<Adds::LEAST, BLOCK / 32>(sums, 0, panel, super, pairs, ends, to);
      ends.scales++, ends.starts++, ends.outliers++, ends.pairs += 2 * BLOCK / a.pair;
    }
  }
}

template <class F>
void super_tile_sums(const Part& part, const Group& group, int64_t strip, Panel& panel, float* acc) {
  each_tile(part, group, strip, panel, acc, open_planes<F>, super_tile_panel);
}

}  // namespace
}  // namespace quantized
