// The sums of quantized.cpp on AMX tiles, bit for bit, for groups of some rows. quantized.cpp includes this file.
//
// The codes of a panel are unpacked to bytes, then tiles of up to 16 rows pass over it: the integer sums of a few groups
// of k are stored, outliers are added, and `scale_sums` adds them in floating point as on other processors. The tile
// unit hides products, not the work in floating point, which bounds groups of 32.
#pragma once

#include "tiles.h"

namespace quantized {
namespace {

constexpr int64_t CHUNK = 4;       // groups of k, at most, whose sums wait in L1: more leave it
constexpr int64_t CHUNK_K = 256;   // their k, at most
constexpr int64_t AHEAD = 12288;   // bytes of weights that are fetched

// Returns the rows of a group of rows from which on a prototype of the tiles was faster on an Emerald Rapids.
int64_t rows_for_tiles(const Layout& layout, int64_t k) {
  const int64_t size = layout.group;
  if (!amx::in_use() || k % size || (size != 16 && size != 32 && size != 64 && size != 128)) return Activations::NEVER;
  return size >= 64 || (size == 32 && layout.header == Header::SUPER) ? 8 : 12;
}

// The configuration of this thread for a group of rows, if they go through tiles.
class TileShape {
 public:
  TileShape(const Part& part, const Group& group) : on(part.a->on_amx(group)) {
    if (!on) return;
    const int64_t count = count_tiles(group, true), tallest = (group.rows + count - 1) / count;
    amx::with_unit([&](auto unit) { unit.configure(amx::shape_of_groups(tallest, part.layout.group)); });
  }
  ~TileShape() {
    if (on) amx::with_unit([](auto unit) { unit.release(); });
  }
  const bool on;
};

struct TileScratch {  // of a thread: 25 KB
  alignas(64) uint8_t codes[PANEL * STRIP];
  Ints sums[CHUNK][amx::ROWS][NV];
  const uint8_t* of_group[PANEL / 16];  // the codes of each group of k
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

// sums += the dot products of the high parts of a row's outliers, times 128. w: unpacked codes; see `outlier_sums`
void add_outliers(const uint8_t* w, const int8_t* high, uint32_t steps, Ints (&sums)[NV]) {
  if (!steps) return;
  Ints row[1][NV];
  outlier_sums<Bytes>(w, high, steps, row);
  for (int j = 0; j < NV; j++) sums[j] = add(sums[j], row[0][j]);
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
    scale_sums<ADDS, M, NV>(rows, panel, (g + i) * STRIP, {ends.scales + at, ends.sums + at, ends.starts + at}, total);
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
  const Ends ends{&a.scales[block], &a.sums[block], &a.starts[block], &a.outliers[block]};
  const int8_t *x = &a.codes[block * line], *high = &a.highs[block * line];
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
    for (int64_t i = 0; i < count; i++)
      for (int64_t m = 0; m < height; m++)
        add_outliers(codes[i], high + ((g + i) * height + m) * line, ends.outliers[(g + i) * height + m],
                     scratch.sums[i][m]);
    switch (adds_of(layout)) {
      case Adds::NOTHING: scale_tile<Adds::NOTHING>(scratch.sums, g, count, panel, ends, height, fetch, acc); break;
      case Adds::LEAST: scale_tile<Adds::LEAST>(scratch.sums, g, count, panel, ends, height, fetch, acc); break;
      case Adds::START: scale_tile<Adds::START>(scratch.sums, g, count, panel, ends, height, fetch, acc); break;
      case Adds::ZERO: scale_tile<Adds::ZERO>(scratch.sums, g, count, panel, ends, height, fetch, acc); break;
    }
  }
}

// As `strip_sums`.
template <class F>
void tile_sums(const Part& part, const Group& group, int64_t strip, Panel& panel, float* acc) {
  static thread_local TileScratch scratch;
  const Activations& a = *part.a;
  const Layout& layout = part.layout;
  const int64_t T = count_tiles(group, true), supers = std::max<int64_t>(1, PANEL / layout.super);
  alignas(64) float output_scale[STRIP] = {};
  begin_strip(part, group, strip, panel, output_scale, acc);
  for (panel.first = 0; panel.first < a.k; panel.first = panel.last) {
    panel.last = std::min(a.k, panel.first + supers * layout.super);
    open_panel(layout, output_scale, panel);
    open_codes<F>(layout, panel, scratch);
    panel.ahead = panel.reach = panel.weights + AHEAD, panel.tiles = T;
    for (int64_t t = 0; t < T; t++) {
      const Tile tile = tile_of(group, t, true);
      tile_panel(a, layout, panel, scratch, tile, acc + (tile.first - group.first) * STRIP);
    }
    panel.weights += supers * layout.super_bytes();
  }
}

}  // namespace
}  // namespace quantized
