// The sums of dot.h and dot_k_types.h on AMX tiles, bit for bit, for groups of some rows.
//
// The codes of a panel are unpacked to bytes, then tiles of up to 16 rows pass over it: the integer
// sums of a few groups of k are stored, the listed outliers are added, and `scale_sums` adds
// them in floating point as on other processors. The tile unit hides products, not the work in
// floating point, which bounds groups of 32. Integer scales of K types are multiplied into the
// weights instead, in two planes of bytes, so that tiles add up a whole block.
//
// Unpacked codes, sums and rows must stay in L1 together (at most 24 KB here): where they leave it,
// stores of codes and fetches of weights wait for each other, and the times of memory and
// arithmetic add up.
#pragma once

#include "activations.h"
#include "amx.h"
#include "dot.h"
#include "dot_k_types.h"
#include "experts.h"
#include "simd.h"
#include "weight_layout.h"

#include <algorithm>
#include <type_traits>

namespace matmul {
namespace {

// k that is unpacked at a time; a block where there are two planes
constexpr int64_t TILE_PANEL = 256;
constexpr int64_t CHUNK = 4;      // groups of k, or planes, at most, whose sums wait in L1
constexpr int64_t CHUNK_K = 256;  // their k, at most
constexpr int64_t PLANE = BLOCK * STRIP;  // bytes of a plane of a block
constexpr int64_t AHEAD = 12288;  // bytes from a panel on to the weights fetched meanwhile

// Returns how many rows of an expert go through tiles. From so many on tiles were not slower on an
// Emerald Rapids, with one thread and two, also while another program shared the core, where groups
// of 32 took up to 1.3 times as long with fewer. On a quiet core tiles pay from 8 to 12 rows on. A
// rest of few rows is no faster without a tile of its own, but for 1 row in groups of 32.
int64_t rows_for_tiles(const Layout& layout, int64_t k) {
  if (!amx::in_use() || k % layout.group) return Activations::NEVER;
  return layout.header == Header::SUPER || layout.group >= 64 ? 16 : 24;
}

// The configuration of this thread for a group of rows, if they go through tiles.
class TileShape {
 public:
  TileShape(const Strips& strips, const Group& group) : on(strips.a->on_amx(group)) {
    if (!on) return;
    const int64_t count = count_tiles(group, true), tallest = (group.rows + count - 1) / count;
    amx::with_unit(
        [&](auto unit) { unit.configure(amx::shape_of_groups(tallest, strips.a->block)); });
  }
  ~TileShape() {
    if (on) amx::with_unit([](auto unit) { unit.release(); });
  }
  const bool on;
};

// What the headers of a panel say.
struct Headers {
  // of a group of k, or of a superblock with integer scales: scales, minima, zero points
  alignas(64) float scale[TILE_PANEL / 32 * STRIP];
  alignas(64) float least[TILE_PANEL / 32 * STRIP];
  alignas(64) int32_t zero[TILE_PANEL / 32 * STRIP];
  // integer scales of a group; where SUMS_IN_16_BITS, twice in a word
  alignas(64) int32_t times[TILE_PANEL / 16 * STRIP];
  // two groups' factors of the sums of their activations' codes
  alignas(64) int32_t pairs[TILE_PANEL / 32 * STRIP];
};

struct TileScratch {  // of a thread: 22 KB
  Headers headers;
  alignas(64) uint8_t codes[TILE_PANEL * STRIP];  // of a panel, or two planes of a block
  Ints sums[CHUNK][amx::ROWS][NV];
  const uint8_t* of_group[TILE_PANEL / 16];  // the codes of each group of k
};

// Calls each(step, j, codes) for vector j of four steps, from step S on.
template <int BITS, int S = 0, class Each>
[[gnu::always_inline]] inline void each_of_four(const uint8_t* p, const Each& each) {
  Ints w[NV];
  Codes<BITS>::template unpack<S>(p, w);
  for (int j = 0; j < NV; j++) each(S, j, w[j]);
  if constexpr (S < 3) each_of_four<BITS, S + 1>(p, each);
}

// Writes vector j of a step, in the order of `Codes<8>`.
inline void put_codes(uint8_t* to, int step, int j, Ints codes) {
  store((int32_t*)(to + step * Codes<8>::STEP_BYTES + 4 * output_of<NV>(j)), codes);
}

// Reads the headers of a panel's groups.
void open_groups(const Layout& layout, const Panel& panel, Headers& to) {
  const uint8_t* header = panel.weights;
  int64_t g = 0;
  for (int64_t k = panel.first; k < panel.last; k += layout.super, header += layout.super_bytes())
    for (int64_t j = 0; j < STRIP; j += LANES, g += LANES) {
      const Numbers of = read_numbers(layout, header, panel.output_scale, j);
      store(to.scale + g, of.scale);
      store(to.least + g, of.least);
      store(to.zero + g, of.zero);
    }
}

// Reads the headers of a panel's superblocks.
template <class Byte>
void open_supers(const Layout& layout, const Panel& panel, Headers& to) {
  SuperHeader<Byte> header{panel.weights};
  int64_t super = 0, g = 0;  // places
  for (int64_t k = panel.first; k < panel.last; k += layout.super, super += STRIP) {
    for (int64_t j = 0; j < STRIP; j += LANES) {
      const Numbers of = header.halves(layout, j);
      store(to.scale + super + j, of.scale);
      store(to.least + super + j, of.least);
    }
    for (int64_t group = 0; group < layout.super / layout.group; group++, g += STRIP)
      for (int64_t j = 0; j < STRIP; j += LANES) {
        store(to.times + g + j, header.times(group, j));
        if (group % 2 == 0) store(to.pairs + g / 2 + j, header.pairs(group, j));
      }
    header.at += layout.super_bytes();
  }
}

void open_headers(const Layout& layout, const Panel& panel, Headers& to) {
  if (layout.header != Header::SUPER) return open_groups(layout, panel, to);
  if (layout.has_least) return open_supers<uint8_t>(layout, panel, to);
  open_supers<int8_t>(layout, panel, to);
}

// Finds the codes of a panel's groups, unpacked.
template <int BITS>
void open_codes(const Layout& layout, const Panel& panel, int64_t, TileScratch& scratch) {
  const uint8_t** of_group = scratch.of_group;
  const uint8_t* p = panel.weights;
  uint8_t* to = scratch.codes;
  for (int64_t k = panel.first; k < panel.last; k += layout.super) {
    p += layout.header_bytes;
    for (int64_t i = 0; i < layout.super; i += layout.group) {
      *of_group++ = Codes<BITS>::SMALL ? to : p;
      for (int64_t step = 0; step < layout.group / 4; step += 4, p += 4 * Codes<BITS>::STEP_BYTES)
        if (Codes<BITS>::SMALL) {
          each_of_four<BITS>(p,
                             [&](int step, int j, Ints codes) { put_codes(to, step, j, codes); });
          to += 4 * Codes<8>::STEP_BYTES;
        }
    }
  }
}

// sums += 128 times the dot products of the high parts of the outliers in `count` blocks of k.
// codes, sums: of the blocks, in PLANES each
template <int PLANES>
void add_listed(const Activations& a, const Tile& tile, int64_t block, int64_t count,
                const uint8_t* const* codes, Ints (*sums)[amx::ROWS][NV]) {
  const int64_t* ends = &a.list_ends[tile.first * (a.blocks + 1) + block];
  const Outlier *outlier = a.listed.data() + ends[0], *last = a.listed.data() + ends[count];
  Ints once[NV];
  ones(once);
  for (; outlier < last; outlier++)
    for (int64_t i = (outlier->block - block) * PLANES, end = i + PLANES; i < end; i++) {
      Ints w[NV], (&sum)[NV] = sums[i][outlier->row];
      Codes<8>::unpack<0>(codes[i] + outlier->step * Codes<8>::STEP_BYTES, w);
      const Ints x = splat(outlier->high);
      for (int j = 0; j < NV; j++) {
        const Ints zero = splat(0), four = SUMS_IN_16_BITS ? fold(zero, products(w[j], x), once[j])
                                                           : dot<true>(zero, w[j], x);
        sum[j] = add(sum[j], raised<7>(four));
      }
    }
}

// total [M, 32] += the sums of `count` groups of k with M rows, scaled. sums: from row m on; g: the
// first group
template <Correction CORRECTION, int M>
[[gnu::always_inline]] inline void scale_rows(const Ints (*sums)[amx::ROWS][NV], int64_t g,
                                              int64_t count, const Headers& headers,
                                              const RowInfo& info, int64_t height, int64_t m,
                                              float* acc) {
  Floats total[M][NV];
  load_sums(acc + m * STRIP, total);
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = (g + i) * height + m;
    Ints rows[M][NV];
    for (int r = 0; r < M; r++)
      for (int j = 0; j < NV; j++) rows[r][j] = sums[i][m + r][j];
    RowInfo of_rows = info;
    of_rows.scales += at;
    of_rows.sums += at;
    of_rows.starts += at;
    const int64_t place = (g + i) * STRIP;
    const auto numbers = [&](int j) {
      const int64_t of = place + j * LANES;
      return Numbers{load(headers.scale + of), load(headers.least + of),
                     load((const uint8_t*)(headers.zero + of))};
    };
    scale_sums<CORRECTION, M, NV>(rows, numbers, of_rows, total);
  }
  store_sums(total, acc + m * STRIP);
}

// The same for all rows of a tile; calls fetch() once in four rows.
template <Correction CORRECTION, class Fetch>
void scale_tile(const Ints (*sums)[amx::ROWS][NV], int64_t g, int64_t count, const Headers& headers,
                const RowInfo& info, int64_t height, const Fetch& fetch, float* acc) {
  int64_t m = 0;
  for (; m + 4 <= height; m += 4, fetch())
    scale_rows<CORRECTION, 4>(sums, g, count, headers, info, height, m, acc);
  for (; m < height; m++) scale_rows<CORRECTION, 1>(sums, g, count, headers, info, height, m, acc);
}

// A tile's pass over a panel. acc: [height, 32], read and written
void tile_panel(const Activations& a, const Layout& layout, Panel& panel, int64_t,
                TileScratch& scratch, const Tile& tile, float* acc) {
  const int64_t height = tile.height, groups = (panel.last - panel.first) / a.block;
  const int64_t line = a.block / 4 * a.step_bytes();
  const int64_t block = tile.first * a.blocks + panel.first / a.block * height;
  const RowInfo info(a, block);
  const int8_t* x = &a.codes[block * line];
  const int64_t share =
      layout.super_bytes() * a.block / layout.super / panel.shares;  // bytes to fetch, of a group
  const int64_t chunk = std::min(CHUNK, CHUNK_K / a.block);
  for (int64_t g = 0; g < groups; g += chunk) {
    const int64_t count = std::min(chunk, groups - g), fetches = count + height / 4;
    const auto fetch = [&] {  // evenly, or memory would be idle meanwhile
      panel.fetch((share * count + fetches - 1) / fetches);
    };
    const int8_t* rows[CHUNK];
    for (int64_t i = 0; i < count; i++) rows[i] = x + (g + i) * height * line;
    const uint8_t* const* codes = scratch.of_group + g;
    amx::with_unit([&]<class Unit>(Unit) {
      amx::dot_groups<Unit>(rows, line, codes, a.block, count, (int32_t*)scratch.sums, fetch);
    });
    add_listed<1>(a, tile, panel.first / a.block + g, count, codes, scratch.sums);
    const Headers& headers = scratch.headers;
    switch (correction_of(layout)) {
      case Correction::NOTHING:
        scale_tile<Correction::NOTHING>(scratch.sums, g, count, headers, info, height, fetch, acc);
        break;
      case Correction::LEAST:
        scale_tile<Correction::LEAST>(scratch.sums, g, count, headers, info, height, fetch, acc);
        break;
      case Correction::START:
        scale_tile<Correction::START>(scratch.sums, g, count, headers, info, height, fetch, acc);
        break;
      case Correction::ZERO:
        scale_tile<Correction::ZERO>(scratch.sums, g, count, headers, info, height, fetch, acc);
        break;
    }
  }
}

// As `strip_sums`: unpacks each of the parts of a panel by `open`, and calls `each` for the tiles
// that pass over it.
template <class Open, class Each>
void each_tile(const Strips& strips, const Group& group, int64_t strip, Panel& panel, float* acc,
               int64_t parts, const Open& open, const Each& each) {
  static thread_local TileScratch scratch;
  const Layout& layout = strips.layout;
  const int64_t T = count_tiles(group, true),
                supers = std::max<int64_t>(1, TILE_PANEL / layout.super);
  begin_strip(strips, group, strip, panel, acc);
  for (panel.first = 0; panel.first < strips.a->k; panel.first = panel.last) {
    panel.last = std::min(strips.a->k, panel.first + supers * layout.super);
    open_headers(layout, panel, scratch.headers);
    panel.reach = panel.weights + AHEAD;
    panel.ahead = panel.reach;
    panel.shares =
        T + (layout.header == Header::SUPER);  // unpacking to planes takes as long as a tile
    for (int64_t i = 0; i < parts; i++) {
      open(layout, panel, i, scratch);
      for (int64_t t = 0; t < T; t++) {
        const Tile tile = tile_of(group, t, true);
        each(*strips.a, layout, panel, i, scratch, tile, acc + (tile.first - group.first) * STRIP);
      }
    }
    panel.weights += supers * layout.super_bytes();
  }
}

template <int BITS>
void tile_sums(const Strips& strips, const Group& group, int64_t strip, Panel& panel, float* acc) {
  each_tile(strips, group, strip, panel, acc, 1, open_codes<BITS>, tile_panel);
}

// ---------------------------------------------------------------------------------- integer scales

struct InPlanes {
  Ints low, high;
};

// Codes times their scale are two planes of bytes, low + (high << RAISED). `of` returns those of
// vector j. Scales without sign, of 6 bits: a plane is the codes times three of these bits, at most
// 31 * 7.
struct PartsOfScale {
  static constexpr int RAISED = 3;
  static constexpr Correction CORRECTION = Correction::LEAST;
  Ints low[NV], high[NV];
  void set(int j, Ints scale, int32_t) {
    low[j] = mask(scale, two_halves(7, 7));
    high[j] = mask(shifted<-3>(scale), two_halves(7, 7));
  }
  InPlanes of(int j, Ints codes) const {
    return {multiply_halves(codes, low[j]), multiply_halves(codes, high[j])};
  }
};

// Others: (code - offset) * scale + 256 * offset, of 14 bits; `starts` take the last out again.
struct BytesOfProduct {
  static constexpr int RAISED = 8;
  static constexpr Correction CORRECTION = Correction::NOTHING;
  Ints even_scale[NV], odd_scale[NV], start[NV];  // of the even bytes, of the odd ones, of both
  void set(int j, Ints scale, int32_t offset) {
    even_scale[j] = even_bytes(scale);
    odd_scale[j] = shifted<8>(even_scale[j]);
    start[j] = multiply_halves(add_halves(scale, splat(two_halves(-256, -256))),
                               splat(two_halves(-offset, -offset)));
  }
  InPlanes of(int j, Ints codes) const {
    const Ints even = add_halves(products(codes, even_scale[j]), start[j]);
    const Ints odd = add_halves(products(codes, odd_scale[j]), start[j]);
    constexpr int32_t EVEN = two_halves(255, 255);
    return {choose(EVEN, even, shifted<8>(odd)), choose(EVEN, shifted<-8>(even), odd)};
  }
};

// Unpacks a block of a superblock to planes.
template <int BITS, class Planes>
void open_planes(const Layout& layout, Panel& panel, int64_t block, TileScratch& scratch) {
  const uint8_t* p =
      panel.weights + layout.header_bytes + block * BLOCK / 4 * Codes<BITS>::STEP_BYTES;
  const int32_t* times = scratch.headers.times + block * BLOCK / layout.group * STRIP;
  const int64_t share =
      layout.super_bytes() * layout.group / layout.super / panel.shares;  // to fetch, of a group
  uint8_t* low = scratch.codes;
  Planes planes;
  for (int64_t k = 0; k < BLOCK; k += layout.group, times += STRIP) {
    for (int j = 0; j < NV; j++) {
      const Ints scale = load((const uint8_t*)(times + output_of<NV>(j)));
      planes.set(j, choose(65535, scale, raised<16>(scale)), layout.offset);
    }
    panel.fetch(share);
    for (int64_t i = 0; i < layout.group;
         i += 16, p += 4 * Codes<BITS>::STEP_BYTES, low += 4 * Codes<8>::STEP_BYTES)
      each_of_four<BITS>(p, [&](int step, int j, Ints codes) {
        const InPlanes of = planes.of(j, codes);
        put_codes(low, step, j, of.low);
        put_codes(low + PLANE, step, j, of.high);
      });
  }
}

// total [M, 32] += the sums of a block with M rows, from row m on, scaled. low, high: of its
// planes; super, pairs: their places in the panel
template <class Planes, int PAIRS, int M>
[[gnu::always_inline]] inline void scale_planes(const Ints (&low)[amx::ROWS][NV],
                                                const Ints (&high)[amx::ROWS][NV], int64_t m,
                                                const Headers& headers, int64_t super,
                                                int64_t pairs, RowInfo info, float* total) {
  info.scales += m;
  info.starts += m;
  info.outliers += m;
  info.pairs += m * 2 * PAIRS;
  Ints sums[M][NV];
  for (int r = 0; r < M; r++)
    for (int j = 0; j < NV; j++) {
      const Ints upper = Planes::CORRECTION == Correction::LEAST
                             ? high[m + r][j]
                             : add(high[m + r][j], splat(info.starts[r]));
      sums[r][j] = add(low[m + r][j], raised<Planes::RAISED>(upper));
    }
  const auto numbers = [&](int j) {
    const int64_t at = super + output_of<NV>(j);
    SuperNumbers<PAIRS> of{load(headers.scale + at), load(headers.least + at), {}};
    for (int i = 0; i < PAIRS; i++)
      of.pairs[i] = load((const uint8_t*)(headers.pairs + pairs + i * STRIP + output_of<NV>(j)));
    return of;
  };
  add_block<Planes::CORRECTION>(sums, 0, numbers, info, total + m * STRIP);
}

// As `tile_panel`, for a block of a superblock.
template <class Planes, int PAIRS>
void super_tile_panel(const Activations& a, const Layout& layout, Panel& panel, int64_t b,
                      TileScratch& scratch, const Tile& tile, float* acc) {
  const int64_t height = tile.height, of_k = panel.first / BLOCK + b,
                block = tile.first * a.blocks + of_k * height;
  const int64_t fetches = 2 + height / 4,
                share = layout.super_bytes() * BLOCK / layout.super / panel.shares;
  const auto fetch = [&] {
    panel.fetch((share + fetches - 1) / fetches);
  };
  const int8_t* x = &a.codes[block * BLOCK];
  const int8_t* rows[] = {x, x};
  const uint8_t* planes[] = {scratch.codes, scratch.codes + PLANE};
  amx::with_unit([&]<class Unit>(Unit) {
    amx::dot_groups<Unit>(rows, BLOCK, planes, BLOCK, 2, (int32_t*)scratch.sums, fetch);
  });
  add_listed<2>(a, tile, of_k, 1, planes, scratch.sums);
  const RowInfo info(a, block);
  const auto scale = [&]<int M>(std::integral_constant<int, M>, int64_t m) {
    scale_planes<Planes, PAIRS, M>(scratch.sums[0], scratch.sums[1], m, scratch.headers, 0,
                                   b * PAIRS * STRIP, info, acc);
  };
  int64_t m = 0;
  for (; m + 4 <= height; m += 4, fetch()) scale(std::integral_constant<int, 4>{}, m);
  for (; m < height; m++) scale(std::integral_constant<int, 1>{}, m);
}

template <int BITS, class Planes, int PAIRS>
void super_tile_sums(const Strips& strips, const Group& group, int64_t strip, Panel& panel,
                     float* acc) {
  const int64_t blocks = strips.layout.super / BLOCK;
  each_tile(strips, group, strip, panel, acc, blocks, open_planes<BITS, Planes>,
            super_tile_panel<Planes, PAIRS>);
}

}  // namespace
}  // namespace matmul
