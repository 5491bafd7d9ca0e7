// The layout of quantized weights: strips of 32 outputs, each one stream of superblocks of k.
//
// A superblock is a header with the scales of its groups of k, then the codes, step after step, each of 4 values of k.
// Codes of 8 bits take a byte per output and k. Of smaller ones a byte holds the low halves of two outputs, i and below
// it i + 16 in its high half. Behind the halves of every 4 steps lie the 1 or 2 bits that they lack, 8 in a byte for the
// same outputs and k: those of step 0, output i, then i + 16, then of step 1. A weight is (code - offset) * scale +
// least. Headers, each a list of vectors of 32 outputs:
//   OUTPUT  nothing: one scale per output lies elsewhere (int8)
//   BF16    scales in bfloat16 (int4, int8 in groups)
//   WORDS   words of join_zeros, ops/qmatmul.py: scales and zero points (int4 and int8 of others)
//   HALF    scales, and minima if there are any, in float16 (GGUF's Q4_0 to Q8_0)
//   SUPER   d, and dmin if there are minima, in float16; then for every group a byte each: the scale is d times the
//           first, the minimum -dmin times the second (GGUF's K types)
#pragma once

#include "operands.h"
#include "simd.h"

namespace {

constexpr int64_t STRIP = 32;  // outputs whose weights are interleaved

enum class Header { OUTPUT, BF16, WORDS, HALF, SUPER };

struct Layout {
  int bits;  // of a code: 4, 5, 6 or 8
  Header header;
  int64_t group, super;  // k of a scale, and of a header
  int32_t offset;
  int64_t header_bytes;
  bool has_least;
  int64_t step_bytes() const { return bits * STRIP / 2; }
  int64_t super_bytes() const { return header_bytes + super / 4 * step_bytes(); }
  int64_t strip_bytes(int64_t k) const { return (k + super - 1) / super * header_bytes + k / 4 * step_bytes(); }
};

// ------------------------------------------------------------------------------------------- GGUF's types

struct BlockType {
  int64_t id;                // in the file
  int64_t elements, bytes;   // of a block in the file
  Layout layout;
};

constexpr Layout flat(int bits, int32_t offset, bool has_least) {
  return {bits, Header::HALF, 32, 32, offset, (has_least ? 4 : 2) * STRIP, has_least};
}
constexpr Layout super(int bits, int64_t group, int32_t offset, bool has_least) {
  return {bits, Header::SUPER, group, 256, offset, (has_least ? 2 : 1) * (2 + 256 / group) * STRIP, has_least};
}

constexpr BlockType BLOCK_TYPES[] = {
    {2, 32, 18, flat(4, 8, false)},                        // Q4_0
    {3, 32, 20, flat(4, 0, true)},                         // Q4_1
    {6, 32, 22, flat(5, 16, false)},                       // Q5_0
    {7, 32, 24, flat(5, 0, true)},                         // Q5_1
    {8, 32, 34, flat(8, 128, false)},                      // Q8_0
    {10, 256, 84, super(4, 16, 0, true)},                  // Q2_K
    {11, 256, 110, super(4, 16, 4, false)},                // Q3_K
    {12, 256, 144, super(4, 32, 0, true)},                 // Q4_K
    {13, 256, 176, super(5, 32, 0, true)},                 // Q5_K
    {14, 256, 210, super(6, 16, 32, false)},               // Q6_K
};

inline const BlockType& block_type(int64_t id) {
  for (const BlockType& type : BLOCK_TYPES)
    if (type.id == id) return type;
  TORCH_CHECK(false, "there is no block type ", id);
}

// The parts of a layer of blocks, each of one type: outputs, k, bytes; then for each part its type, its outputs, and
// where its strips begin (bytes).
struct BlockTable {
  struct Part {
    Layout layout;
    int64_t first, n, offset;
  };
  static constexpr int64_t MOST = 1 << 24;  // inputs, and outputs of a part: no product of them overflows
  int64_t n, k, bytes;
  std::vector<Part> parts;

  BlockTable(const at::Tensor& table, const at::Tensor& packed) {
    TORCH_CHECK(table.scalar_type() == at::kLong && table.is_contiguous() && table.numel() >= 6 && table.numel() % 3 == 0,
                "a table of blocks has three numbers, and three for each part");
    const int64_t* at = table.const_data_ptr<int64_t>();
    n = at[0], k = at[1], bytes = at[2];
    TORCH_CHECK(k > 0 && k <= MOST, "a table of blocks has 1 to ", MOST, " inputs; it has ", k);
    int64_t first = 0, end = 0;
    for (int64_t i = 3; i < table.numel(); first += at[i + 1], i += 3) {
      const Layout& layout = block_type(at[i]).layout;
      TORCH_CHECK(at[i + 1] > 0 && at[i + 1] <= MOST, "a part of a table of blocks has 1 to ", MOST, " outputs; it has ",
                  at[i + 1]);
      TORCH_CHECK(at[i + 2] == end && k % layout.super == 0, "the parts of a table of blocks must follow each other");
      end += (at[i + 1] + STRIP - 1) / STRIP * layout.strip_bytes(k);
      parts.push_back({layout, first, at[i + 1], at[i + 2]});
    }
    TORCH_CHECK(first == n && end == bytes && packed.is_contiguous() && packed.size(-1) == bytes &&
                packed.scalar_type() == at::kByte, "packed blocks of ", packed.size(-1), " bytes do not fit their table");
  }
};

}  // namespace
