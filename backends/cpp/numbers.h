// Numbers of 16 bits: bfloat16, float16, and two integers in a word.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

namespace {

// Returns two numbers of 16 bits in a word.
constexpr int32_t two_halves(int32_t low, int32_t high) {
  return int32_t((uint32_t(low) & 0xffff) | uint32_t(high) << 16);
}

// Returns the number of a float16's bits.
inline float widen_half(uint16_t bits) { return c10::Half(bits, c10::Half::from_bits()); }

// The numbers of MXFP4's codes, doubled, with 12 added.
constexpr uint8_t FLOAT4_BYTES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Returns half the power of two that a byte of MXFP4 stands for, 2^(byte - 128); 255 is no number.
inline float half_power(uint8_t byte) {
  const uint32_t bits = byte < 2 ? 1u << 21 << byte : uint32_t(byte - 1) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return power;
}

// Returns the number in fp32.
inline float widen(float v) { return v; }
inline float widen(at::BFloat16 v) {
  uint32_t bits = uint32_t(v.x) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

// Writes a number.
inline void put(float* y, float v) { *y = v; }
// Rounds to nearest even, without the library's branch, so that loops vectorize.
inline void put(at::BFloat16* y, float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  y->x = uint16_t(v != v ? 0x7fc0 : rounded);
}

// Returns the sum of a row's squares, in one order on all processors.
template <class T> float sum_of_squares(const T* x, int64_t n) {
  constexpr int64_t SUMS = 32;  // side by side
  float sums[SUMS] = {}, total = 0;
  int64_t i = 0;
  for (; i + SUMS <= n; i += SUMS)
    for (int64_t s = 0; s < SUMS; s++) sums[s] += widen(x[i + s]) * widen(x[i + s]);
  for (; i < n; i++) sums[0] += widen(x[i]) * widen(x[i]);
  for (float sum : sums) total += sum;
  return total;
}

}  // namespace
