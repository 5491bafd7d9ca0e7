// The layouts of weights, and the record of a linear layer's weight.
//
// BF16 weights are rows, [outputs, k], as PyTorch has them. All others lie in strips of 32 outputs,
// each one stream of superblocks of k. A superblock is a header with the scales of its groups of k,
// then the codes, step after step, each of 4 values of k:
//
//   strip 0 (outputs 0 .. 31)                                  strip 1
//   | header | step 0 | step 1 | ... | header | step 0 | ...   | header | ...
//     scales   k 0..3   k 4..7         the next superblock
//
// Codes of 8 bits take a byte per output and k. Of smaller ones a byte holds the low halves of two
// outputs, i and below it i + 16 in its high half. Behind the halves of every 4 steps lie the 1 or
// 2 bits that they lack, 8 in a byte for the same outputs and k: those of step 0, output i, then
// i + 16, then of step 1. A weight is (code - offset) * scale + least. Headers, each a list of
// vectors of 32 outputs:
//   OUTPUT  nothing: one fp32 scale per output, behind all strips of a part (int8)
//   BF16    scales in bfloat16 (int4, int8 in groups)
//   WORDS   words of join_zeros, backends/weight.py: scales, and zero points, which are the offsets
//           (int4 and int8 of others)
//   HALF    scales, and minima if there are any, in float16 (GGUF's Q4_0 to Q8_0)
//   POWER   powers of two in a byte; codes are numbers of MXFP4 in FLOAT4_BYTES
//   SUPER   d, and dmin if there are minima, in float16; then for every group a byte each: the
//           scale is d times the first, the minimum -dmin times the second (GGUF's K types)
//
// A new layout is a row of LAYOUTS, one with the same id in backends/strips.py, and a function that
// packs it: in layout.py, or in blocks.cpp for a type of GGUF. matmul.cpp multiplies with it
// unchanged if its header is one of these, and `is_served` allows its codes and groups.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace {

constexpr int64_t STRIP = 32;   // outputs whose weights are interleaved
constexpr int64_t BLOCK = 128;  // k per activation scale, at most

enum class Header { ROWS, OUTPUT, BF16, WORDS, HALF, POWER, SUPER };  // ROWS: of no strip

struct Layout {
  int64_t id;
  int bits;  // of a code: 4, 5, 6 or 8; 16: a number
  Header header;
  int64_t group, super;  // k of a scale, and of a header; 0: of each part, 32, 64 or 128
  int32_t offset;  // of codes; beside zero points 1, their factor
  int64_t header_bytes;
  bool has_least;
  int64_t file_bytes;  // of a superblock in a GGUF file; 0: in no file
  int64_t step_bytes() const { return bits * STRIP / 2; }
  int64_t super_bytes() const { return header_bytes + super / 4 * step_bytes(); }
  int64_t strip_bytes(int64_t k) const {
    return (k + super - 1) / super * header_bytes + k / 4 * step_bytes();
  }
};

constexpr Layout in_groups(int64_t id, int bits, Header header, int32_t offset) {
  return {id, bits, header, 0, 0, offset, (header == Header::WORDS ? 4 : 2) * STRIP, false, 0};
}
constexpr Layout flat(int64_t id, int bits, int32_t offset, bool has_least, int64_t file_bytes) {
  const int64_t header_bytes = (has_least ? 4 : 2) * STRIP;
  return {id, bits, Header::HALF, 32, 32, offset, header_bytes, has_least, file_bytes};
}
constexpr Layout super(int64_t id, int bits, int64_t group, int32_t offset, bool has_least,
                       int64_t file_bytes) {
  const int64_t header_bytes = (has_least ? 2 : 1) * (2 + 256 / group) * STRIP;
  return {id, bits, Header::SUPER, group, 256, offset, header_bytes, has_least, file_bytes};
}

// The ids below 100 are GGUF's; backends/strips.py has the same.
constexpr Layout LAYOUTS[] = {
    {30, 16, Header::ROWS, 1, 1, 0, 0, false, 0},              // BF16
    in_groups(100, 4, Header::BF16, 8),                        // INT4
    in_groups(101, 4, Header::WORDS, 1),                       // INT4_WORDS
    in_groups(102, 8, Header::BF16, 128),                      // INT8
    in_groups(103, 8, Header::WORDS, 1),                       // INT8_WORDS
    {104, 8, Header::OUTPUT, BLOCK, BLOCK, 128, 0, false, 0},  // INT8_OUTPUT
    flat(2, 4, 8, false, 18),                                  // Q4_0
    flat(3, 4, 0, true, 20),                                   // Q4_1
    flat(6, 5, 16, false, 22),                                 // Q5_0
    flat(7, 5, 0, true, 24),                                   // Q5_1
    flat(8, 8, 128, false, 34),                                // Q8_0
    {39, 4, Header::POWER, 32, 32, 12, STRIP, false, 17},      // MXFP4
    super(10, 4, 16, 0, true, 84),                             // Q2_K
    super(11, 4, 16, 4, false, 110),                           // Q3_K
    super(12, 4, 32, 0, true, 144),                            // Q4_K
    super(13, 5, 32, 0, true, 176),                            // Q5_K
    super(14, 6, 16, 32, false, 210),                          // Q6_K
};

// Returns whether matmul.cpp has the sums of a layout (`sums_of`).
inline bool is_served(const Layout& layout) {
  const bool super = layout.header == Header::SUPER;
  if (layout.bits == 5) return layout.group == 32;
  if (layout.bits == 6) return super && layout.group == 16;
  return true;
}

// Returns a layout with its group. group: k of a scale, where the layout leaves it to its parts
inline Layout layout_of(int64_t id, int64_t group) {
  for (const Layout& row : LAYOUTS) {
    if (row.id != id) continue;
    Layout layout = row;
    if (layout.group) {
      TORCH_CHECK(!group, "the groups of layout ", id, " are not of ", group, ": they are fixed");
    } else {
      TORCH_CHECK(group == 32 || group == 64 || group == 128, "the groups of layout ", id,
                  " must be of 32, 64 or 128; they are of ", group);
      layout.group = group;
      layout.super = group;
    }
    TORCH_CHECK(is_served(layout), "codes of ", layout.bits, " bits have no matmul in groups of ",
                layout.group);
    return layout;
  }
  TORCH_CHECK(false, "there is no layout ", id);
}

// Returns the layout of a type of GGUF; refuses others.
inline Layout file_layout(int64_t id) {
  const Layout layout = layout_of(id, id < 100 ? 0 : 32);
  TORCH_CHECK(layout.file_bytes, "layout ", id, " is no type of blocks");
  return layout;
}

inline int64_t count_strips(int64_t n) { return (n + STRIP - 1) / STRIP; }

// Returns the bytes of a part, [n, k], without the scales that lie behind its strips.
inline int64_t codes_bytes(const Layout& layout, int64_t n, int64_t k) {
  if (layout.header == Header::ROWS) return n * k * 2;
  return count_strips(n) * layout.strip_bytes(k);
}

// Returns the bytes of a part, [n, k], up to the next part's beginning.
inline int64_t part_bytes(const Layout& layout, int64_t n, int64_t k) {
  const int64_t scales = layout.header == Header::OUTPUT ? count_strips(n) * STRIP * 4 : 0;
  const int64_t bytes = codes_bytes(layout, n, k) + scales;
  return (bytes + 63) / 64 * 64;  // only rows end within a cache line
}

// The weight of a linear layer, or of the experts in a stack of them. Its outputs are parts, one
// below the other, each of one layout. backends/strips.py makes both tensors:
//   data   [bytes] uint8, or [experts, bytes]; without a table [n, k] or [experts, n, k] bfloat16
//   table  [3 + 4 parts] int64: n, k, bytes; then for each part the id of its layout, its outputs,
//          the k of a scale or 0 (see `layout_of`), and its first byte
struct Weight {
  struct Part {
    Layout layout;
    int64_t first, n, offset;  // outputs of the layer; bytes
  };
  static constexpr int64_t MOST = 1 << 24;  // inputs, and outputs of a part: no product overflows
  int64_t n, k, bytes;
  bool stacked;  // whether there are experts
  const uint8_t* data;
  std::vector<Part> parts;

  Weight(const at::Tensor& tensor, const std::optional<at::Tensor>& table) {
    TORCH_CHECK(tensor.is_contiguous(), "weights must lie in one piece");
    if (table)
      read_table(tensor, *table);
    else
      read_rows(tensor);
    data = static_cast<const uint8_t*>(tensor.const_data_ptr());
  }

 private:
  void read_rows(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.scalar_type() == at::kBFloat16, "the weight must be bfloat16");
    TORCH_CHECK(tensor.dim() == 2 || tensor.dim() == 3, "weights of ", tensor.dim(),
                " dimensions do not fit");
    n = tensor.size(-2);
    k = tensor.size(-1);
    bytes = n * k * 2;
    stacked = tensor.dim() == 3;
    parts.push_back({layout_of(30, 0), 0, n, 0});
  }

  void read_table(const at::Tensor& tensor, const at::Tensor& table) {
    TORCH_CHECK(table.scalar_type() == at::kLong && table.is_contiguous() && table.dim() == 1 &&
                    table.numel() >= 7 && table.numel() % 4 == 3,
                "a weight's table has three numbers, and four for each part");
    const int64_t* row = table.const_data_ptr<int64_t>();
    n = row[0];
    k = row[1];
    bytes = row[2];
    TORCH_CHECK(k > 0 && k <= MOST, "a weight has 1 to ", MOST, " inputs; it has ", k);
    int64_t first = 0, end = 0;
    for (row += 3; row < table.const_data_ptr<int64_t>() + table.numel(); row += 4) {
      const Layout layout = layout_of(row[0], row[2]);
      const int64_t outputs = row[1];
      TORCH_CHECK(outputs > 0 && outputs <= MOST, "a part of a weight has 1 to ", MOST,
                  " outputs; it has ", outputs);
      const int64_t multiple = layout.header == Header::OUTPUT ? 4 : layout.super;
      TORCH_CHECK(k % multiple == 0, "inputs must be a multiple of ", multiple, "; there are ", k);
      TORCH_CHECK(row[3] == end, "the parts of a weight must follow each other");
      parts.push_back({layout, first, outputs, end});
      first += outputs;
      end += part_bytes(layout, outputs, k);
    }
    TORCH_CHECK(first == n && end == bytes && tensor.scalar_type() == at::kByte &&
                    (tensor.dim() == 1 || tensor.dim() == 2) && tensor.size(-1) == bytes,
                "weights in ", tensor.sizes(), " bytes do not fit their table");
    stacked = tensor.dim() == 2;
  }
};

}  // namespace
