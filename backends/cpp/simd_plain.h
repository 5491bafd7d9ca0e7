// What simd.h asks for, on any processor: the same steps in plain loops.
#pragma once

#include "numbers.h"

#include <cstdint>

namespace {

constexpr int LANES = 16;
constexpr int MB = 2, MOST_SUMS = 4, CHAINS = 8;
constexpr bool SUMS_IN_16_BITS = false;
using Ints = int32_t __attribute__((vector_size(64)));
using Floats = float __attribute__((vector_size(64)));
using Signed = int16_t __attribute__((vector_size(64)));

inline Ints sum_of_halves(Ints v) { return (v << 16 >> 16) + (v >> 16); }
template <bool SMALL> inline Ints dot(Ints acc, Ints w, Ints x) {
  const Signed even = (Signed)(w & 0x00ff00ff) * ((Signed)x << 8 >> 8);  // fit 16 bits
  const Signed odd = (Signed)(w >> 8 & 0x00ff00ff) * ((Signed)x >> 8);
  return acc + sum_of_halves((Ints)even) + sum_of_halves((Ints)odd);
}
inline Ints products(Ints w, Ints x) {
  Ints both;
  for (int i = 0; i < LANES; i++) {
    int32_t half[2];
    for (int h = 0; h < 2; h++) {
      const uint32_t a = uint32_t(w[i]) >> 16 * h;
      const uint32_t b = uint32_t(x[i]) >> 16 * h;
      half[h] = uint8_t(a) * int8_t(b) + uint8_t(a >> 8) * int8_t(b >> 8);
    }
    both[i] = two_halves(half[0], half[1]);
  }
  return both;
}
inline Ints fold(Ints acc, Ints, Ints) { return acc; }  // serves SUMS_IN_16_BITS only
inline Ints dot_pairs(Ints acc, Ints a, Ints b) {
  return acc + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
}
inline Ints look_up(const uint8_t (&table)[16], Ints v) {
  Ints found{};
  for (int i = 0; i < LANES; i++)
    for (int b = 0; b < 32; b += 8) found[i] |= int32_t(uint32_t(table[v[i] >> b & 15]) << b);
  return found;
}
inline Ints choose(int32_t bits, Ints a, Ints b) { return (a & bits) | (b & ~bits); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return c + a * b; }
template <class T> inline Ints ints_of(const T* p) {
  Ints wide;
  for (int i = 0; i < LANES; i++) wide[i] = p[i];
  return wide;
}
inline Floats from_f16(const uint16_t* p) {
  Floats wide;
  for (int i = 0; i < LANES; i++) wide[i] = widen_half(p[i]);
  return wide;
}
inline void transpose(Ints (&w)[LANES]) {
  for (int i = 0; i < LANES; i++) {
    for (int j = 0; j < i; j++) {
      const int32_t held = w[i][j];
      w[i][j] = w[j][i];
      w[j][i] = held;
    }
  }
}

}  // namespace
