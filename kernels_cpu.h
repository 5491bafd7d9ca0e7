// What the CPU operators share: vectors of LANES numbers for the processor at hand, and bfloat16.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef LIBRARY  // tests build further variants beside each other
#define LIBRARY gpt_eagle
#endif

namespace {

// ------------------------------------------------------------------------------------------------ vectors
// LANES numbers at a time. dot: acc[i] += sum of 4 products of unsigned bytes (weights) and signed bytes (activations).

#if defined(__AVX512VNNI__)

constexpr int LANES = 16, MB = 7;
using Ints = __m512i;
using Floats = __m512;
inline Ints splat(int32_t v) { return _mm512_set1_epi32(v); }
inline Floats splat(float v) { return _mm512_set1_ps(v); }
inline Ints load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Ints low_nibbles(Ints v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Ints high_nibbles(Ints v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
template <bool SMALL> inline Ints dot(Ints acc, Ints w, Ints x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));  // gcc copies every accumulator around the intrinsic: 2x
  return acc;
}
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats add_scaled(Ints v, Floats scale, Floats acc) { return _mm512_fmadd_ps(_mm512_cvtepi32_ps(v), scale, acc); }
inline Floats from_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int LANES = 8, MB = 2;
using Ints = __m256i;
using Floats = __m256;
inline Ints splat(int32_t v) { return _mm256_set1_epi32(v); }
inline Floats splat(float v) { return _mm256_set1_ps(v); }
inline Ints load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
inline Ints low_nibbles(Ints v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline Ints high_nibbles(Ints v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }
template <bool SMALL> inline Ints dot(Ints acc, Ints w, Ints x) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(acc, w, x);
#else
  if (SMALL) {  // 2 * 15 * 127 fits 16 bits, so nothing saturates
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
  }
  Ints even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
  Ints odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
#endif
}
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats add_scaled(Ints v, Floats scale, Floats acc) { return _mm256_fmadd_ps(_mm256_cvtepi32_ps(v), scale, acc); }
inline Floats from_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}

#else  // any processor: the same steps in plain loops

constexpr int LANES = 16, MB = 2;
struct Ints {
  int32_t lane[LANES];
};
struct Floats {
  float lane[LANES];
};
#define EACH_LANE for (int i = 0; i < LANES; i++)
inline Ints splat(int32_t v) { Ints r; EACH_LANE r.lane[i] = v; return r; }
inline Floats splat(float v) { Floats r; EACH_LANE r.lane[i] = v; return r; }
inline Ints load(const uint8_t* p) { Ints r; std::memcpy(&r, p, sizeof r); return r; }
inline Floats load(const float* p) { Floats r; std::memcpy(&r, p, sizeof r); return r; }
inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
inline Ints low_nibbles(Ints v) { EACH_LANE v.lane[i] &= 0x0f0f0f0f; return v; }
inline Ints high_nibbles(Ints v) { EACH_LANE v.lane[i] = (v.lane[i] >> 4) & 0x0f0f0f0f; return v; }
template <bool SMALL> inline Ints dot(Ints acc, Ints w, Ints x) {
  EACH_LANE for (int b = 0; b < 32; b += 8) acc.lane[i] += int32_t(uint8_t(w.lane[i] >> b)) * int8_t(x.lane[i] >> b);
  return acc;
}
inline Ints add(Ints a, Ints b) { EACH_LANE a.lane[i] += b.lane[i]; return a; }
inline Floats multiply(Floats a, Floats b) { EACH_LANE a.lane[i] *= b.lane[i]; return a; }
inline Floats multiply_add(Floats a, Floats b, Floats c) { EACH_LANE c.lane[i] += a.lane[i] * b.lane[i]; return c; }
inline Floats add_scaled(Ints v, Floats scale, Floats acc) {
  EACH_LANE acc.lane[i] += float(v.lane[i]) * scale.lane[i];
  return acc;
}
inline Floats from_bf16(const uint16_t* p) {
  Floats r;
  EACH_LANE { uint32_t bits = uint32_t(p[i]) << 16; std::memcpy(&r.lane[i], &bits, 4); }
  return r;
}

#endif

// ------------------------------------------------------------------------------------------- exponentials

// e^x for x <= 0, to about 1e-7; below -87 it is 0. Without a branch, so that loops vectorize (polynomial of Cephes)
inline float exponential(float x) {
  const float held = x > -87.0f ? x : -87.0f;
  const float shifted = held * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: a whole power of two in the low bits
  const float power = shifted - 12582912.0f;
  const float r = (held - power * 0.693359375f) + power * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    y = y * r + c;
  y = y * r * r + r + 1.0f;
  int32_t bits, exponent;
  std::memcpy(&bits, &y, 4);
  std::memcpy(&exponent, &shifted, 4);
  bits += (exponent - 0x4b400000) * (1 << 23);
  std::memcpy(&y, &bits, 4);
  return x > -87.0f ? y : (x != x ? x : 0.0f);
}

// ---------------------------------------------------------------------------------------------- bfloat16

inline float widen(float v) { return v; }
inline float widen(at::BFloat16 v) {
  uint32_t bits = uint32_t(v.x) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

inline void put(float* y, float v) { *y = v; }
inline void put(at::BFloat16* y, float v) {  // to nearest even, without the library's branch, so that loops vectorize
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  y->x = uint16_t(v != v ? 0x7fc0 : rounded);
}

}  // namespace
