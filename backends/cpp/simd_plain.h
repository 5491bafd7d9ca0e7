// Vectors of simd.h on any processor: the same steps in plain loops.
#pragma once

#include "numbers.h"

#include <cstdint>
#include <cstring>
#include <utility>

namespace {

constexpr int LANES = 16;
constexpr int MB = 2, MOST_SUMS = 4, CHAINS = 8;
constexpr bool SUMS_IN_16_BITS = false;
struct Ints {
  int32_t lane[LANES];
};
struct Floats {
  float lane[LANES];
};

// Returns the vector of f(0), f(1), ...
template <class F> inline Ints words(const F& f) {
  Ints r;
  for (int i = 0; i < LANES; i++) r.lane[i] = f(i);
  return r;
}
template <class F> inline Floats floats(const F& f) {
  Floats r;
  for (int i = 0; i < LANES; i++) r.lane[i] = f(i);
  return r;
}

inline Ints splat(int32_t v) {
  return words([=](int) { return v; });
}
inline Floats splat(float v) {
  return floats([=](int) { return v; });
}
inline Ints load(const uint8_t* p) {
  Ints r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
inline Floats load(const float* p) {
  Floats r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
inline void store(int32_t* p, Ints v) { std::memcpy(p, &v, sizeof v); }
inline Ints mask(Ints v, int32_t bits) {
  return words([=](int i) { return v.lane[i] & bits; });
}
inline Ints low_nibbles(Ints v) { return mask(v, 0x0f0f0f0f); }
inline Ints high_nibbles(Ints v) {
  return words([=](int i) { return (v.lane[i] >> 4) & 0x0f0f0f0f; });
}
inline Ints look_up(const uint8_t (&table)[16], Ints v) {
  return words([&](int i) {
    uint32_t four = 0;
    for (int b = 0; b < 32; b += 8) four |= uint32_t(table[v.lane[i] >> b & 15]) << b;
    return int32_t(four);
  });
}
template <int LEFT> inline Ints shifted(Ints v) {
  constexpr int left = LEFT > 0 ? LEFT : 0;
  constexpr int right = LEFT < 0 ? -LEFT : 0;
  return words([=](int i) { return int32_t(uint32_t(v.lane[i]) << left >> right); });
}
template <bool SMALL> inline Ints dot(Ints acc, Ints w, Ints x) {
  for (int i = 0; i < LANES; i++)
    for (int b = 0; b < 32; b += 8)
      acc.lane[i] += int32_t(uint8_t(w.lane[i] >> b)) * int8_t(x.lane[i] >> b);
  return acc;
}
inline Ints products(Ints w, Ints x) {
  return words([=](int i) {
    int32_t half[2];
    for (int h = 0; h < 2; h++) {
      const uint32_t a = uint32_t(w.lane[i]) >> 16 * h;
      const uint32_t b = uint32_t(x.lane[i]) >> 16 * h;
      half[h] = uint8_t(a) * int8_t(b) + uint8_t(a >> 8) * int8_t(b >> 8);
    }
    return two_halves(half[0], half[1]);
  });
}
inline Ints fold(Ints acc, Ints, Ints) { return acc; }  // serves SUMS_IN_16_BITS only
inline Ints even_bytes(Ints v) { return mask(v, 0x00ff00ff); }
inline Ints odd_bytes(Ints v) {
  return words([=](int i) { return v.lane[i] >> 8 & 0x00ff00ff; });
}
inline Ints dot_pairs(Ints acc, Ints a, Ints b) {
  for (int i = 0; i < LANES; i++)
    for (int h = 0; h < 32; h += 16)
      acc.lane[i] += int32_t(int16_t(a.lane[i] >> h)) * int16_t(b.lane[i] >> h);
  return acc;
}
inline Ints add(Ints a, Ints b) {
  return words([=](int i) { return int32_t(uint32_t(a.lane[i]) + uint32_t(b.lane[i])); });
}
inline Ints multiply(Ints a, Ints b) {
  return words([=](int i) { return int32_t(uint32_t(a.lane[i]) * uint32_t(b.lane[i])); });
}
template <int BITS> inline Ints raised(Ints v) { return multiply(v, splat(1 << BITS)); }
inline Ints multiply_halves(Ints a, Ints b) {
  return words([=](int i) {
    const int32_t low = int16_t(a.lane[i]) * int16_t(b.lane[i]);
    return two_halves(low, (a.lane[i] >> 16) * (b.lane[i] >> 16));
  });
}
inline Ints add_halves(Ints a, Ints b) {
  return words([=](int i) {
    const int32_t low = int16_t(a.lane[i]) + int16_t(b.lane[i]);
    return two_halves(low, (a.lane[i] >> 16) + (b.lane[i] >> 16));
  });
}
inline Ints choose(int32_t bits, Ints a, Ints b) {
  return words([=](int i) { return (a.lane[i] & bits) | (b.lane[i] & ~bits); });
}
inline Ints join(int32_t bits, Ints a, Ints b) { return choose(bits, a, b); }
inline Floats words_of(Ints v) {
  Floats r;
  std::memcpy(&r, &v, sizeof r);
  return r;
}
inline Floats multiply(Floats a, Floats b) {
  return floats([=](int i) { return a.lane[i] * b.lane[i]; });
}
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return floats([=](int i) { return c.lane[i] + a.lane[i] * b.lane[i]; });
}
inline Floats add_scaled(Ints v, Floats scale, Floats acc) {
  return floats([=](int i) { return acc.lane[i] + float(v.lane[i]) * scale.lane[i]; });
}
inline Floats from_bf16(const uint16_t* p) {
  return words_of(words([=](int i) { return int32_t(uint32_t(p[i]) << 16); }));
}
inline Floats from_f16(const uint16_t* p) {
  return floats([=](int i) { return widen_half(p[i]); });
}
inline Floats from_int8(const int8_t* p) {
  return floats([=](int i) { return float(p[i]); });
}
inline Ints ints_of(const uint8_t* p) {
  return words([=](int i) { return int32_t(p[i]); });
}
inline Ints ints_of(const int8_t* p) {
  return words([=](int i) { return int32_t(p[i]); });
}
template <int B> inline Floats signed_byte(Ints v) {
  return floats([=](int i) { return float(int8_t(v.lane[i] >> 8 * B)); });
}
inline Floats low_half(Ints v) {
  return words_of(words([=](int i) { return int32_t(uint32_t(v.lane[i]) << 16); }));
}
inline void transpose(Ints (&w)[LANES]) {
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < i; j++) std::swap(w[i].lane[j], w[j].lane[i]);
}

}  // namespace
