// Matmuls of 1 to a few hundred rows with the weight of a linear layer on a CPU, x W^T.
//
// The weight's table says the layouts of its parts (weight_layout.h), and each part writes its own
// columns of the result:
// 1. A part in strips is multiplied in integer dot products. The rows are rounded to int8, with one
//    scale per block of k (activations.h): the weights' group, or 128 where that has no scale in
//    floating point (int8 with a scale per output, K types).
// 2. Threads share the strips. Within a strip, tiles of a few rows pass over panels of k (dot.h;
//    for K types dot_k_types.h, on AMX dot_amx.h). In a mixture, each expert's rows pass over its
//    own strips; idle experts are not read.
// 3. A part in bfloat16 rows goes through matmul_bf16.h.
//
// A row's result does not depend on the other rows, bit for bit: integer sums are exact, and the
// sums in floating point run over the blocks of k in their order. Plain references: backends/weight.py.
// Sources of the ideas: llama.cpp's dot products of Q8_0 and Q4_0 (blockwise activations); oneDNN's
// packing for VNNI; LLM.int8 (outliers apart).

#include "matmul.h"

#include "activations.h"
#include "amx.h"
#include "dot.h"
#include "dot_amx.h"
#include "dot_k_types.h"
#include "experts.h"
#include "matmul_bf16.h"
#include "operands.h"
#include "operators.h"
#include "threads.h"
#include "weight_layout.h"

#include <algorithm>

namespace matmul {
namespace {

// sums [height, 32] += a tile's rows times a panel. row: the tile's first
template <int BITS, int STEPS, bool SUPER, int M = MB>
void tiles(int64_t height, const Activations& a, const Layout& layout, Panel& panel, int64_t row,
           float* sums) {
  if constexpr (M > 1)
    if (height < M) return tiles<BITS, STEPS, SUPER, M - 1>(height, a, layout, panel, row, sums);
  constexpr int V = M * NV <= MOST_SUMS ? NV : 2;
  for (int64_t first = 0; first < STRIP / V; first += LANES)
    if constexpr (SUPER)
      super_tile<BITS, STEPS, M, V>(a, layout, panel, row, first, sums);
    else
      tile<BITS, STEPS, M, V>(a, layout, panel, row, first, sums);
}

// acc [rows of the group, 32] = the group's rows times a strip. STEPS: as for `tile`
template <int BITS, int STEPS, bool SUPER = false>
void strip_sums(const Strips& strips, const Group& group, int64_t strip, Panel& panel, float* acc) {
  const Activations& a = *strips.a;
  const Layout& layout = strips.layout;
  const int64_t T = count_tiles(group), supers = std::max<int64_t>(1, PANEL / layout.super);
  begin_strip(strips, group, strip, panel, acc);
  for (panel.first = 0; panel.first < a.k; panel.first = panel.last) {
    panel.last = std::min(a.k, panel.first + supers * layout.super);
    const uint8_t* next = panel.weights + supers * layout.super_bytes();
    panel.ahead = next;
    panel.reach = next;
    panel.shares = T;
    for (int64_t t = 0; t < T; t++) {
      const auto [row, height, on_amx] = tile_of(group, t);
      tiles<BITS, STEPS, SUPER>(height, a, layout, panel, row, acc + (row - group.first) * STRIP);
    }
    panel.weights = next;
  }
}

using Sums = void (*)(const Strips& strips, const Group& group, int64_t strip, Panel& panel,
                      float* acc);

// Returns the `strip_sums` of a layout; on AMX its `tile_sums` or `super_tile_sums`.
Sums sums_of(const Layout& layout, int64_t k, bool on_amx) {
  const bool super = layout.header == Header::SUPER;
  if (on_amx && super) {
    if (layout.bits == 6) return super_tile_sums<6, BytesOfProduct, 1>;
    if (layout.bits == 5) return super_tile_sums<5, PartsOfScale, BLOCK / 64>;
    if (!layout.has_least) return super_tile_sums<4, BytesOfProduct, 1>;
    return layout.group == 32 ? super_tile_sums<4, PartsOfScale, BLOCK / 64>
                              : super_tile_sums<4, PartsOfScale, BLOCK / 32>;
  }
  const bool is_float = layout.header == Header::POWER;
  if (on_amx && is_float) return tile_sums<FLOAT4>;
  if (on_amx)
    return layout.bits == 8 ? tile_sums<8> : layout.bits == 5 ? tile_sums<5> : tile_sums<4>;
  const int64_t steps = k % layout.group ? 0 : layout.group / 4;
  switch (layout.bits) {
    case 4:
      if (is_float) return strip_sums<FLOAT4, 8>;
      if (super) return steps == 8 ? strip_sums<4, 8, true> : strip_sums<4, 4, true>;
      return steps == 8 ? strip_sums<4, 8> : strip_sums<4, 0>;
    case 5: return super ? strip_sums<5, 8, true> : strip_sums<5, 8>;
    case 6: return strip_sums<6, 4, true>;
    default: return steps == 8 ? strip_sums<8, 8> : strip_sums<8, 0>;
  }
}

// --------------------------------------------------------------------------------------- the parts

// Writes the columns of all strips to y [rows, n]; threads share the strips of all parts.
template <class Out> void share_strips(const std::vector<Strips>& parts, int64_t n, Out* y) {
  const Order& order = parts[0].a->order;
  int64_t most = 0, work = 0, strips = 0;  // rows of a group; work of a strip
  for (const Group& group : order.groups) {
    most = std::max(most, group.rows);
    work += STRIP * parts[0].a->k * std::max<int64_t>(1, group.rows / 4);
  }
  for (const Strips& part : parts) strips += part.count();
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, work));
  parallel(strips, grain, [&](int64_t begin, int64_t end) {
    static thread_local std::vector<float> acc;  // kept from call to call
    static thread_local Panel panel;
    if (int64_t(acc.size()) < most * STRIP) acc.resize(most * STRIP);
    int64_t before = 0;  // strips of the parts before
    for (const Strips& part : parts) {
      const int64_t from = std::max(begin - before, int64_t(0)),
                    to = std::min(end - before, part.count());
      before += part.count();
      for (const Group& group : order.groups) {
        const TileShape shape(part, group);
        const auto sum = sums_of(part.layout, part.a->k, shape.on);
        for (int64_t strip = from; strip < to; strip++) {
          sum(part, group, strip, panel, acc.data());
          const int64_t column = strip * STRIP, columns = std::min(STRIP, part.n - column);
          for (int64_t m = 0; m < group.rows; m++)
            put_row<STRIP>(y + order.row[group.first + m] * n + part.first + column,
                           &acc[m * STRIP], columns);
        }
      }
    }
  });
}

// The rows of a call, and the expert of each.
struct Rows {
  const at::Tensor& x;    // in one piece
  const int64_t* expert;  // or null
  int64_t count, experts;
};

// Returns the rows, rounded for a layout: as a part before took them, or anew in a free place of
// `kept`, which has one for each part. A free place has no block.
const Activations& round_for(const Layout& by, const Rows& rows, std::vector<Activations>& kept) {
  const int64_t k = rows.x.size(-1);
  const bool in_16_bits = SUMS_IN_16_BITS && by.bits == 8, super = by.header == Header::SUPER;
  const int64_t block = super ? BLOCK : by.group, pair = super ? 2 * by.group : 0;
  const int64_t amx_from = in_16_bits ? Activations::NEVER : rows_for_tiles(by, k);
  Activations& a = *std::find_if(kept.begin(), kept.end(), [&](const Activations& of) {
    return !of.block || (of.block == block && of.pair == pair && of.offset == by.offset &&
                         of.wide == in_16_bits && of.amx_from == amx_from);
  });
  if (a.block) return a;
  a.rows = rows.count;
  a.k = k;
  a.block = block;
  a.pair = pair;
  a.offset = by.offset;
  a.wide = in_16_bits;
  a.amx_from = amx_from;
  group_rows(a.order, rows.expert, rows.experts, rows.count);
  if (rows.x.scalar_type() == at::kBFloat16)
    round_rows(a, rows.x.const_data_ptr<at::BFloat16>());
  else
    round_rows(a, rows.x.const_data_ptr<float>());
  return a;
}

// Multiplies by all parts in strips. Writes: their columns of y.
void multiply_strips(const Weight& weight, const Rows& rows, const at::Tensor& y) {
  static thread_local std::vector<Activations> kept;  // their memory is kept from call to call
  static thread_local std::vector<Strips> parts;
  if (kept.size() < weight.parts.size()) kept.resize(weight.parts.size());
  for (Activations& a : kept) a.block = 0;
  parts.clear();
  for (const Weight::Part& part : weight.parts) {
    if (part.layout.header == Header::ROWS) continue;
    const Activations& a = round_for(part.layout, rows, kept);
    parts.push_back({part.layout, &a, weight.data + part.offset, weight.bytes, part.first, part.n});
  }
  if (parts.empty()) return;
  const std::vector<Strips>& of_call = parts;  // in the threads that help, `parts` is their own
  fill(y, [&](auto* to) { share_strips(of_call, weight.n, to); });
}

// Multiplies by all parts in bfloat16 rows, and adds their bias. Writes: their columns of y.
void multiply_rows(const Weight& weight, const Rows& rows, const at::BFloat16* bias,
                   const at::Tensor& y) {
  const auto is_rows = [](const Weight::Part& part) {
    return part.layout.header == Header::ROWS;
  };
  if (std::none_of(weight.parts.begin(), weight.parts.end(), is_rows)) return;
  const at::Tensor x = bf16::rounded(rows.x);
  static thread_local Order order;  // its memory is kept from call to call
  group_rows(order, rows.expert, rows.experts, rows.count);
  const Order& of_call = order;  // in the threads that help, `order` is their own
  for (const Weight::Part& part : weight.parts) {
    if (!is_rows(part)) continue;
    const auto* data = (const at::BFloat16*)(weight.data + part.offset);
    const bf16::Layer layer{x.const_data_ptr<at::BFloat16>(),
                            data,
                            bias,
                            part.n,
                            weight.k,
                            weight.bytes / 2,
                            weight.n,
                            part.first,
                            of_call};
    fill(y, [&](auto* to) { bf16::multiply(layer, to); });
  }
}

// Adds a bias, [n] or [experts, n]. Writes: the columns of y that are of parts in strips.
void add_bias(const Weight& weight, const Rows& rows, const at::BFloat16* bias,
              const at::Tensor& y) {
  fill(y, [&](auto* to) {
    each_row(rows.count, GRAIN / weight.n, [&](int64_t r) {
      const at::BFloat16* own = bias + (rows.expert ? rows.expert[r] : 0) * weight.n;
      auto* row = to + r * weight.n;
      for (const Weight::Part& part : weight.parts) {
        if (part.layout.header == Header::ROWS) continue;
        for (int64_t i = part.first; i < part.first + part.n; i++)
          put(row + i, widen(row[i]) + widen(own[i]));
      }
    });
  });
}

}  // namespace

// ---------------------------------------------------------------------------------------- operator

at::Tensor matmul(const at::Tensor& x, const at::Tensor& data,
                  const std::optional<at::Tensor>& table, const std::optional<at::Tensor>& bias,
                  int64_t n, bool fp32_out, const std::optional<at::Tensor>& expert) {
  const Weight weight(data, table);
  const bool is_bf16 = x.scalar_type() == at::kBFloat16;
  TORCH_CHECK(is_bf16 || x.scalar_type() == at::kFloat, "activations must be bfloat16 or float32");
  TORCH_CHECK(n == weight.n, "weights of ", weight.n, " outputs do not fit ", n);
  TORCH_CHECK(x.size(-1) == weight.k, "an input of ", x.size(-1),
              " features does not fit weights for ", weight.k);
  const int64_t count = x.numel() / weight.k,
                experts = count_experts(data, table ? 1 : 2, count, expert);
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kBFloat16 && bias->is_contiguous() &&
                        bias->numel() == experts * weight.n),
              "bias must hold one bfloat16 per output, in one piece");
  const at::Tensor whole = x.contiguous();
  const at::Tensor y = empty_rows(x, weight.n, fp32_out || !is_bf16 ? at::kFloat : at::kBFloat16);
  const Rows rows{whole, expert ? expert->const_data_ptr<int64_t>() : nullptr, count, experts};
  const at::BFloat16* biases = bias ? bias->const_data_ptr<at::BFloat16>() : nullptr;
  multiply_strips(weight, rows, y);
  if (bias) add_bias(weight, rows, biases, y);
  multiply_rows(weight, rows, biases, y);
  return y;
}

OPERATORS(m) {
  m.def(
      "matmul(Tensor x, Tensor weight, Tensor? table, Tensor? bias, int n, bool fp32_out, "
      "Tensor? expert=None) -> Tensor", cpu(matmul));
  m.def("fetch_for_few(bool fetches) -> ()", +[](bool fetches) { fetches_for_few = fetches; });
  m.def("use_tiles(str name) -> bool", amx::use_tiles);
  m.def("tiles() -> (str, int, int)", amx::tiles);
}

}  // namespace matmul
