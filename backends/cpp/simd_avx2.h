// What simd.h asks for, on processors with AVX2, with its VNNI or without.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int LANES = 8, MOST_SUMS = 8;
using Ints = int32_t __attribute__((vector_size(32)));
using Floats = __m256;
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
inline Ints products(Ints w, Ints x) {
  return (Ints)_mm256_maddubs_epi16((__m256i)w, (__m256i)x);
}
inline Ints dot_pairs(Ints acc, Ints a, Ints b) {
  return acc + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
inline Ints fold(Ints acc, Ints sums, Ints times) { return dot_pairs(acc, sums, times); }
inline Ints look_up(const uint8_t (&table)[16], Ints v) {
  const __m128i once = _mm_loadu_si128((const __m128i*)table);
  return (Ints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(once), (__m256i)v);
}
inline Ints choose(int32_t bits, Ints a, Ints b) {
  const __m256i others = _mm256_andnot_si256(_mm256_set1_epi32(bits), (__m256i)b);
  return (a & bits) | (Ints)others;
}
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Ints ints_of(const uint8_t* p) {
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
inline Ints ints_of(const int8_t* p) {
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
inline Ints ints_of(const uint16_t* p) {
  return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
}
inline Floats from_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
inline void transpose(Ints (&words)[LANES]) {
  __m256i t[LANES], w[LANES];
  for (int i = 0; i < LANES; i += 2) {
    t[i] = _mm256_unpacklo_epi32((__m256i)words[i], (__m256i)words[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32((__m256i)words[i], (__m256i)words[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4) {
    for (int j = 0; j < 2; j++) {
      w[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]);
      w[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  }
  for (int i = 0; i < 4; i++) {  // w[4 r + i]: of vectors 4 r .. 4 r + 3, word i of both halves
    words[i] = (Ints)_mm256_permute2x128_si256(w[i], w[4 + i], 0x20);
    words[4 + i] = (Ints)_mm256_permute2x128_si256(w[i], w[4 + i], 0x31);
  }
}

}  // namespace
