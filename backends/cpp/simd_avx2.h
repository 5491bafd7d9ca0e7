// Vectors of simd.h on processors with AVX2, with its VNNI or without.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int LANES = 8, MOST_SUMS = 8;
using Ints = __m256i;
using Floats = __m256;
inline Ints splat(int32_t v) { return _mm256_set1_epi32(v); }
inline Floats splat(float v) { return _mm256_set1_ps(v); }
inline Ints load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
inline void store(int32_t* p, Ints v) { _mm256_storeu_si256((__m256i*)p, v); }
inline Ints low_nibbles(Ints v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline Ints high_nibbles(Ints v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }
inline Ints look_up(const uint8_t (&table)[16], Ints v) {
  const __m128i once = _mm_loadu_si128((const __m128i*)table);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(once), v);
}
template <int LEFT> inline Ints shifted(Ints v) {
  return LEFT > 0 ? _mm256_slli_epi16(v, LEFT > 0 ? LEFT : 0)
                  : _mm256_srli_epi16(v, LEFT < 0 ? -LEFT : 0);
}
#if defined(__AVXVNNI__)
constexpr bool SUMS_IN_16_BITS = false;
constexpr int MB = 4, CHAINS = 8;
// gcc copies every accumulator around the intrinsic: 2x
template <bool SMALL> inline Ints dot(Ints acc, Ints w, Ints x) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
  return acc;
}
#else
constexpr bool SUMS_IN_16_BITS = true;
constexpr int MB = 6, CHAINS = 0;
// gcc would compute all products of a step first, and put them all on the stack: 4x
template <bool SMALL> inline Ints dot(Ints acc, Ints w, Ints x) {
  Ints both;
  if (SMALL)
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(acc), "=&x"(both) : "x"(w), "x"(x));
  else
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(both) : "x"(w), "x"(x));
  return acc;
}
#endif
inline Ints products(Ints w, Ints x) { return _mm256_maddubs_epi16(w, x); }
inline Ints even_bytes(Ints v) { return _mm256_and_si256(v, _mm256_set1_epi16(255)); }
inline Ints odd_bytes(Ints v) { return _mm256_srli_epi16(v, 8); }
inline Ints dot_pairs(Ints acc, Ints a, Ints b) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b));
}
inline Ints fold(Ints acc, Ints sums, Ints times) { return dot_pairs(acc, sums, times); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints multiply(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
template <int BITS> inline Ints raised(Ints v) { return _mm256_slli_epi32(v, BITS); }
inline Ints multiply_halves(Ints a, Ints b) { return _mm256_mullo_epi16(a, b); }
inline Ints add_halves(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
inline Ints mask(Ints v, int32_t bits) { return _mm256_and_si256(v, splat(bits)); }
inline Ints choose(int32_t bits, Ints a, Ints b) {
  return _mm256_or_si256(mask(a, bits), _mm256_andnot_si256(splat(bits), b));
}
inline Ints join(int32_t bits, Ints a, Ints b) { return _mm256_or_si256(mask(a, bits), b); }
inline Floats words_of(Ints v) { return _mm256_castsi256_ps(v); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats add_scaled(Ints v, Floats scale, Floats acc) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(v), scale, acc);
}
inline Floats from_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline Floats from_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
inline Floats from_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline Ints ints_of(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
inline Ints ints_of(const int8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
template <int B> inline Floats signed_byte(Ints v) {
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * B), 24));
}
inline Floats low_half(Ints v) { return words_of(_mm256_slli_epi32(v, 16)); }
inline void transpose(Ints (&w)[LANES]) {
  Ints t[LANES];
  for (int i = 0; i < LANES; i += 2) {
    t[i] = _mm256_unpacklo_epi32(w[i], w[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(w[i], w[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4) {
    for (int j = 0; j < 2; j++) {
      w[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]);
      w[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  }
  for (int i = 0; i < 4; i++) {  // w[4 r + i]: of vectors 4 r .. 4 r + 3, word i of both halves
    const Ints a = w[i];
    const Ints b = w[4 + i];
    w[i] = _mm256_permute2x128_si256(a, b, 0x20);
    w[4 + i] = _mm256_permute2x128_si256(a, b, 0x31);
  }
}

}  // namespace
