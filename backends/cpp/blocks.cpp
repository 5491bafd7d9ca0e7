// The blocks of a GGUF file: as numbers, and packed into strips for the matmuls of matmul.cpp.
//
// `unpack` turns a block of any type into codes, scales and minima of one form. Everything else
// follows from that form and the type's `Layout` (weight_layout.h). Nothing is rounded but numbers
// in bfloat16: a product is rounded before the addition, and the sum before it becomes bfloat16, as
// in the package gguf and in PyTorch, so the bits are the same.
//
// Source: dequantize_row_* of ggml (ggml-quants.c).

#include "blocks.h"

#include "numbers.h"
#include "operands.h"
#include "operators.h"
#include "threads.h"
#include "weight_layout.h"

#include <atomic>

namespace blocks {
namespace {

constexpr int64_t GRAIN = 1 << 15;  // numbers that pay for a thread's wake-up

struct Block {
  uint8_t codes[256];
  uint16_t d, dmin;                // float16; of flat types the scale and the minimum; MXFP4's byte
  uint8_t scales[16], minima[16];  // of groups, of K types only
};

inline uint16_t half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return bits;
}
inline uint32_t word_at(const uint8_t* p) {
  uint32_t bits;
  std::memcpy(&bits, p, 4);
  return bits;
}

// Writes `count` codes of half bytes: the low halves, then the high ones.
inline void unpack_halves(const uint8_t* from, int64_t count, uint8_t* codes) {
  for (int64_t i = 0; i < count / 2; i++) codes[i] = from[i] & 15;
  for (int64_t i = 0; i < count / 2; i++) codes[count / 2 + i] = from[i] >> 4;
}

// Reads the 6-bit scales and minima of Q4_K and Q5_K.
inline void unpack_scales(const uint8_t* p, Block& to) {
  for (int j = 0; j < 4; j++) {
    to.scales[j] = p[j] & 63;
    to.minima[j] = p[j + 4] & 63;
    to.scales[j + 4] = (p[j + 8] & 15) | (p[j] >> 6 << 4);
    to.minima[j + 4] = (p[j + 8] >> 4) | (p[j + 4] >> 6 << 4);
  }
}

void unpack_q5(const uint8_t* high, const uint8_t* low, uint8_t* codes) {
  const uint32_t fifth = word_at(high);
  unpack_halves(low, 32, codes);
  for (int i = 0; i < 32; i++) codes[i] |= (fifth >> i & 1) << 4;
}

void unpack_q2_k(const uint8_t* p, Block& to) {
  const uint8_t* two = p + 16;
  for (int g = 0; g < 16; g++) {
    to.scales[g] = p[g] & 15;
    to.minima[g] = p[g] >> 4;
  }
  for (int i = 0; i < 256; i++) to.codes[i] = two[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
  to.d = half_at(p + 80);
  to.dmin = half_at(p + 82);
}

void unpack_q3_k(const uint8_t* p, Block& to) {
  const uint8_t *high = p, *two = p + 32, *packed = p + 96;
  for (int g = 0; g < 16; g++) {
    const int low = g < 8 ? packed[g] & 15 : packed[g - 8] >> 4;
    to.scales[g] = uint8_t((low | (packed[8 + g % 4] >> g / 4 * 2 & 3) << 4) - 32);
  }
  for (int i = 0; i < 256; i++)
    to.codes[i] =
        (two[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) | (high[i % 32] >> i / 32 & 1) << 2;
  to.d = half_at(p + 108);
}

void unpack_q4_k(const uint8_t* p, Block& to) {
  to.d = half_at(p);
  to.dmin = half_at(p + 2);
  unpack_scales(p + 4, to);
  for (int j = 0; j < 4; j++) unpack_halves(p + 16 + 32 * j, 64, to.codes + 64 * j);
}

void unpack_q5_k(const uint8_t* p, Block& to) {
  to.d = half_at(p);
  to.dmin = half_at(p + 2);
  unpack_scales(p + 4, to);
  for (int j = 0; j < 4; j++) unpack_halves(p + 48 + 32 * j, 64, to.codes + 64 * j);
  for (int i = 0; i < 256; i++) to.codes[i] |= (p[16 + i % 32] >> i / 32 & 1) << 4;
}

void unpack_q6_k(const uint8_t* p, Block& to) {
  for (int n = 0; n < 2; n++) {
    const uint8_t *low = p + 64 * n, *high = p + 128 + 32 * n;
    uint8_t* codes = to.codes + 128 * n;
    for (int i = 0; i < 32; i++) {
      codes[i] = (low[i] & 15) | (high[i] & 3) << 4;
      codes[i + 32] = (low[i + 32] & 15) | (high[i] >> 2 & 3) << 4;
      codes[i + 64] = (low[i] >> 4) | (high[i] >> 4 & 3) << 4;
      codes[i + 96] = (low[i + 32] >> 4) | (high[i] >> 6) << 4;
    }
  }
  std::memcpy(to.scales, p + 192, 16);
  to.d = half_at(p + 208);
}

void unpack(int64_t type, const uint8_t* p, Block& to) {
  switch (type) {
    case 2: to.d = half_at(p); return unpack_halves(p + 2, 32, to.codes);
    case 3:
      to.d = half_at(p);
      to.dmin = half_at(p + 2);
      return unpack_halves(p + 4, 32, to.codes);
    case 6: to.d = half_at(p); return unpack_q5(p + 2, p + 6, to.codes);
    case 7:
      to.d = half_at(p);
      to.dmin = half_at(p + 2);
      return unpack_q5(p + 4, p + 8, to.codes);
    case 8:
      to.d = half_at(p);
      for (int i = 0; i < 32; i++) to.codes[i] = uint8_t(p[2 + i] + 128);
      return;
    case 39: to.d = p[0]; return unpack_halves(p + 1, 32, to.codes);
    case 10: return unpack_q2_k(p, to);
    case 11: return unpack_q3_k(p, to);
    case 12: return unpack_q4_k(p, to);
    case 13: return unpack_q5_k(p, to);
    case 14: return unpack_q6_k(p, to);
  }
}

// The scale and the minimum of one group, from the header of one output.
struct Scale {
  float scale, least;
  Scale(const Layout& layout, uint16_t d, uint16_t dmin, uint8_t of_scale, uint8_t of_least) {
    scale = layout.header == Header::POWER ? half_power(uint8_t(d)) : widen_half(d);
    least = layout.has_least ? widen_half(dmin) : 0.0f;
    if (layout.header != Header::SUPER) return;
    scale *= layout.has_least ? float(of_scale) : float(int8_t(of_scale));
    least *= -float(of_least);
  }
};

template <class Out>
inline void put_number(Out* y, const Layout& layout, const Scale& by, uint8_t code) {
  const int32_t stored = layout.header == Header::POWER ? FLOAT4_BYTES[code] : code;
  const float product = float(stored - layout.offset) * by.scale;
  put(y, layout.has_least ? product + by.least : product);
}

// content: [bytes], blocks of a type. Writes: out [elements], float or bfloat16.
void widen_blocks(const at::Tensor& content, int64_t type_id, const at::Tensor& out) {
  const Layout layout = file_layout(type_id);
  const int64_t count = out.numel() / layout.super;
  TORCH_CHECK(content.is_contiguous() && out.is_contiguous(), "tensors must be contiguous");
  TORCH_CHECK(content.numel() == count * layout.file_bytes && out.numel() == count * layout.super,
              "blocks must fill out");
  const uint8_t* from = content.const_data_ptr<uint8_t>();
  fill(out, [&](auto* y) {
    parallel(count, GRAIN / layout.super, [&](int64_t begin, int64_t end) {
      Block block{};
      for (int64_t i = begin; i < end; i++) {
        unpack(type_id, from + i * layout.file_bytes, block);
        auto* to = y + i * layout.super;
        for (int64_t e = 0; e < layout.super; e += layout.group) {
          const int64_t g = e / layout.group;
          const Scale by(layout, block.d, block.dmin, block.scales[g], block.minima[g]);
          for (int64_t j = e; j < e + layout.group; j++)
            put_number(to + j, layout, by, block.codes[j]);
        }
      }
    });
  });
}

// ------------------------------------------------------------------------------------------ strips

// Writes the codes of 32 outputs, one superblock each, of 4 + HIGH bits.
template <int HIGH> void pack_halves(const Layout& layout, const Block (&of)[STRIP], uint8_t* to) {
  for (int64_t i = 0; i < STRIP / 2; i++) {
    const uint8_t *left = of[i].codes, *right = of[i + STRIP / 2].codes;
    uint8_t both[256], above[256];
    for (int64_t k = 0; k < layout.super; k++) {
      both[k] = uint8_t((left[k] & 15) | right[k] << 4);
      above[k] = uint8_t(left[k] >> 4 | right[k] >> 4 << HIGH);
    }
    for (int64_t k = 0; k < layout.super; k += 16) {
      uint8_t* four = to + k / 4 * layout.step_bytes() + 4 * i;
      uint32_t high[2] = {};  // no bit leaves its byte
      for (int s = 0; s < 4; s++) {
        const int bit = s * 2 * HIGH;
        std::memcpy(four + s * 2 * STRIP, both + k + 4 * s, 4);
        high[bit / 8] |= word_at(above + k + 4 * s) << bit % 8;
      }
      for (int v = 0; v < HIGH; v++) std::memcpy(four + (4 + v) * 2 * STRIP, high + v, 4);
    }
  }
}

void pack_codes(const Layout& layout, const Block (&of)[STRIP], uint8_t* to) {
  if (layout.bits == 4) return pack_halves<0>(layout, of, to);
  if (layout.bits == 5) return pack_halves<1>(layout, of, to);
  if (layout.bits == 6) return pack_halves<2>(layout, of, to);
  for (int64_t i = 0; i < STRIP; i++)
    for (int64_t k = 0; k < layout.super; k += 4)
      std::memcpy(to + (k / 4 * STRIP + i) * 4, of[i].codes + k, 4);
}

// Returns the code of output i at k. codes: as `pack_codes` writes them
inline uint8_t code_at(const Layout& layout, const uint8_t* codes, int64_t i, int64_t k) {
  if (layout.bits == 8) return codes[(k / 4 * STRIP + i) * 4 + k % 4];
  const uint8_t* four = codes + k / 16 * 4 * layout.step_bytes() + i % (STRIP / 2) * 4 + k % 4;
  const int right = i >= STRIP / 2, high = layout.bits - 4, step = k / 4 % 4,
            bit = (2 * step + right) * high;
  const uint8_t low = four[step * 2 * STRIP] >> 4 * right & 15;
  return high ? low | (four[(4 + bit / 8) * 2 * STRIP] >> bit % 8 & ((1 << high) - 1)) << 4 : low;
}

// Writes the header and codes of 32 outputs, one superblock each.
void pack_super(const Layout& layout, const Block (&of)[STRIP], uint8_t* to) {
  uint16_t* halves = (uint16_t*)to;
  uint8_t* bytes = to + (layout.has_least ? 4 : 2) * STRIP;
  const int64_t groups = layout.header == Header::SUPER ? layout.super / layout.group : 0;
  const int64_t stride = (layout.has_least ? 2 : 1) * STRIP;
  for (int64_t i = 0; i < STRIP; i++) {
    if (layout.header == Header::POWER) {
      to[i] = uint8_t(of[i].d);
      continue;
    }
    halves[i] = of[i].d;
    if (layout.has_least) halves[STRIP + i] = of[i].dmin;
    for (int64_t g = 0; g < groups; g++) {
      bytes[g * stride + i] = of[i].scales[g];
      if (layout.has_least) bytes[g * stride + STRIP + i] = of[i].minima[g];
    }
  }
  pack_codes(layout, of, to + layout.header_bytes);
}

// Packs the rows of a tensor of blocks. content: [n, bytes of a row], of one type; order: [n]
// int64, the row of each output, or null. Writes: out [ceil(n / 32) strip_bytes]. Returns: whether
// all scales are finite.
bool pack_blocks(const at::Tensor& content, int64_t type_id, const std::optional<at::Tensor>& order,
                 const at::Tensor& out) {
  const Layout layout = file_layout(type_id);
  const int64_t n = content.size(0), row_bytes = content.size(1);
  const int64_t blocks = row_bytes / layout.file_bytes, strips = count_strips(n);
  const int64_t strip_bytes = layout.strip_bytes(blocks * layout.super);
  TORCH_CHECK(content.is_contiguous() && out.is_contiguous() &&
                  blocks * layout.file_bytes == row_bytes && out.numel() == strips * strip_bytes,
              "blocks must fill rows, and strips out");
  std::optional<Whole> rows;
  if (order) rows.emplace(*order, at::IntArrayRef{n}, "order");
  for (int64_t i = 0; rows && i < n; i++) within((*rows)[i], n, "a row of order");
  const uint8_t* from = content.const_data_ptr<uint8_t>();
  uint8_t* to = out.mutable_data_ptr<uint8_t>();
  std::atomic<bool> finite{true};
  parallel(strips, 1, [&](int64_t begin, int64_t end) {
    const auto is_finite = [&](uint16_t d) {
      return layout.header == Header::POWER ? d != 255 : (d & 0x7c00) != 0x7c00;
    };
    Block of[STRIP] = {};
    bool all = true;
    for (int64_t strip = begin; strip < end; strip++)
      for (int64_t b = 0; b < blocks; b++) {
        for (int64_t i = 0; i < STRIP; i++) {
          const int64_t output = strip * STRIP + i;
          if (output >= n) {  // no such output: zeros
            of[i] = {};
            continue;
          }
          const int64_t row = rows ? (*rows)[output] : output;
          unpack(type_id, from + row * row_bytes + b * layout.file_bytes, of[i]);
          all &= is_finite(of[i].d) && (!layout.has_least || is_finite(of[i].dmin));
        }
        pack_super(layout, of, to + strip * strip_bytes + b * layout.super_bytes());
      }
    if (!all) finite = false;
  });
  return finite;
}

// Writes an output of a part in strips as numbers, y [k].
template <class Out>
void read_output(const Layout& layout, const uint8_t* strips, int64_t output, int64_t k, Out* y) {
  const int64_t i = output % STRIP, stride = (layout.has_least ? 2 : 1) * STRIP;
  const uint8_t* super = strips + output / STRIP * layout.strip_bytes(k);
  for (int64_t done = 0; done < k; done += layout.super, super += layout.super_bytes()) {
    const uint8_t *bytes = super + 2 * stride + i, *codes = super + layout.header_bytes;
    for (int64_t j = 0; j < layout.super; j++, y++) {
      const int64_t g = j / layout.group;
      const uint16_t d = layout.header == Header::POWER ? super[i] : half_at(super + 2 * i);
      const Scale by(layout, d, half_at(super + 2 * (STRIP * layout.has_least + i)),
                     bytes[g * stride],
                     bytes[g * stride + STRIP * layout.has_least]);
      put_number(y, layout, by, code_at(layout, codes, i, j));
    }
  }
}

// Writes a row of a weight as numbers, y [k].
template <class Out> void read_row(const Weight& weight, int64_t row, Out* y) {
  size_t p = 0;
  while (row >= weight.parts[p].first + weight.parts[p].n) p++;
  const Weight::Part& part = weight.parts[p];
  const uint8_t* data = weight.data + part.offset;
  const int64_t output = row - part.first;
  if (part.layout.header != Header::ROWS)
    return read_output(part.layout, data, output, weight.k, y);
  const auto* from = (const at::BFloat16*)data + output * weight.k;
  for (int64_t i = 0; i < weight.k; i++) put(y + i, widen(from[i]));
}

}  // namespace

// Reads rows of a weight as numbers, of GGUF's types and of bfloat16. data, table: see `Weight`;
// rows: [R] int64. Writes: out [R, k], float or bfloat16.
void read_rows(const at::Tensor& data, const std::optional<at::Tensor>& table,
               const at::Tensor& rows, const at::Tensor& out) {
  const Weight weight(data, table);
  for (const Weight::Part& part : weight.parts)
    TORCH_CHECK(part.layout.file_bytes || part.layout.header == Header::ROWS, "layout ",
                part.layout.id, " is read in Python");
  TORCH_CHECK(!weight.stacked, "rows of a stack are read one expert at a time");
  const Whole row(rows, {rows.numel()}, "rows");
  TORCH_CHECK(out.is_contiguous() && out.numel() == rows.numel() * weight.k, "out must be [R, k]");
  for (int64_t r = 0; r < rows.numel(); r++)
    within(row[r], weight.n, "a row");  // threads cannot refuse
  fill(out, [&](auto* y) {
    each_row(rows.numel(), GRAIN / weight.k,
             [&](int64_t r) { read_row(weight, row[r], y + r * weight.k); });
  });
}

// Returns the bytes of a part of a weight, [n, k]. group: see `layout_of`
int64_t weight_bytes(int64_t layout, int64_t n, int64_t k, int64_t group) {
  return part_bytes(layout_of(layout, group), n, k);
}

OPERATORS(m) {
  m.def("weight_bytes(int layout, int n, int k, int group) -> int", weight_bytes);
  m.def("widen_blocks(Tensor content, int type, Tensor(a!) out) -> ()", cpu(widen_blocks));
  m.def(
      "pack_blocks(Tensor content, int type, Tensor? order, Tensor(a!) out) -> bool",
      cpu(pack_blocks));
  m.def(
      "read_rows(Tensor weight, Tensor? table, Tensor rows, Tensor(a!) out) -> ()",
      cpu(read_rows));
}

}  // namespace blocks
