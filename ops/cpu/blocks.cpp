// Dequantization of the blocks of a GGUF file: 32 numbers share a scale, and in Q4_1 a minimum, in 16 bits.
//
// A product is rounded before the addition, and the sum before it becomes bfloat16, as in the package gguf and in
// PyTorch: the bits are the same.

#include "common.h"

#include <c10/util/Half.h>

namespace blocks {
namespace {

constexpr int64_t COUNT = 32;       // numbers of a block
constexpr int64_t GRAIN = 1 << 10;  // blocks that pay for a thread's wake-up

inline float half(const uint8_t* p) {
  c10::Half value;
  std::memcpy(&value, p, 2);
  return value;
}

struct Q4_0 {
  static constexpr int64_t BYTES = 18;
  template <class Out> static void widen(const uint8_t* p, Out* y) {
    const float scale = half(p);
    for (int i = 0; i < 16; i++) put(y + i, float((p[2 + i] & 15) - 8) * scale);
    for (int i = 0; i < 16; i++) put(y + 16 + i, float((p[2 + i] >> 4) - 8) * scale);
  }
};

struct Q4_1 {
  static constexpr int64_t BYTES = 20;
  template <class Out> static void widen(const uint8_t* p, Out* y) {
    const float scale = half(p), least = half(p + 2);
    for (int i = 0; i < 16; i++) put(y + i, float(p[4 + i] & 15) * scale + least);
    for (int i = 0; i < 16; i++) put(y + 16 + i, float(p[4 + i] >> 4) * scale + least);
  }
};

struct Q8_0 {
  static constexpr int64_t BYTES = 34;
  template <class Out> static void widen(const uint8_t* p, Out* y) {
    const float scale = half(p);
    for (int i = 0; i < 32; i++) put(y + i, float(int8_t(p[2 + i])) * scale);
  }
};

template <class Kind> void widen_all(const at::Tensor& content, const at::Tensor& out) {
  const int64_t count = out.numel() / COUNT;
  TORCH_CHECK(content.numel() == count * Kind::BYTES, "blocks must fill out");
  const uint8_t* from = content.const_data_ptr<uint8_t>();
  fill(out, [&](auto* y) {
    parallel(count, GRAIN, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) Kind::widen(from + i * Kind::BYTES, y + i * COUNT);
    });
  });
}

// content: [bytes], of the type that ggml calls `kind`. Writes: out [elements], float or bfloat16.
void widen_blocks(const at::Tensor& content, const c10::string_view kind, const at::Tensor& out) {
  TORCH_CHECK(content.is_contiguous() && out.is_contiguous(), "tensors must be contiguous");
  if (kind == "Q4_0") widen_all<Q4_0>(content, out);
  else if (kind == "Q4_1") widen_all<Q4_1>(content, out);
  else if (kind == "Q8_0") widen_all<Q8_0>(content, out);
  else TORCH_CHECK(false, "unknown blocks");
}

}  // namespace
}  // namespace blocks
