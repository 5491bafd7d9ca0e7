// What simd.h asks for, on processors with AVX-512 and VNNI.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int LANES = 16;
constexpr int MB = 5, MOST_SUMS = 10, CHAINS = 12;
constexpr bool SUMS_IN_16_BITS = false;
using Ints = int32_t __attribute__((vector_size(64)));
using Floats = __m512;
// gcc copies every accumulator around the intrinsic: 2x
template <bool SMALL> inline Ints dot(Ints acc, Ints w, Ints x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
  return acc;
}
inline Ints products(Ints w, Ints x) {
  return (Ints)_mm512_maddubs_epi16((__m512i)w, (__m512i)x);
}
inline Ints fold(Ints acc, Ints, Ints) { return acc; }  // serves SUMS_IN_16_BITS only
inline Ints dot_pairs(Ints acc, Ints a, Ints b) {
  return (Ints)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
}
inline Ints look_up(const uint8_t (&table)[16], Ints v) {
  const __m128i once = _mm_loadu_si128((const __m128i*)table);
  return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(once), (__m512i)v);
}
inline Ints choose(int32_t bits, Ints a, Ints b) {
  return (Ints)_mm512_ternarylogic_epi32(_mm512_set1_epi32(bits), (__m512i)a, (__m512i)b, 0xca);
}
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Ints ints_of(const uint8_t* p) {
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}
inline Ints ints_of(const int8_t* p) {
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
}
inline Ints ints_of(const uint16_t* p) {
  return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}
inline Floats from_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
inline void transpose(Ints (&words)[LANES]) {
  __m512i t[LANES], w[LANES];
  for (int i = 0; i < LANES; i += 2) {
    t[i] = _mm512_unpacklo_epi32((__m512i)words[i], (__m512i)words[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32((__m512i)words[i], (__m512i)words[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4) {
    for (int j = 0; j < 2; j++) {
      w[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      w[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  }
  for (int i = 0; i < 4; i++) {  // w[4 r + i]: of vectors 4 r .. 4 r + 3, word i of every quarter
    const __m512i a = _mm512_shuffle_i32x4(w[i], w[4 + i], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(w[i], w[4 + i], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(w[8 + i], w[12 + i], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(w[8 + i], w[12 + i], 0xdd);
    words[i] = (Ints)_mm512_shuffle_i32x4(a, c, 0x88);
    words[4 + i] = (Ints)_mm512_shuffle_i32x4(b, d, 0x88);
    words[8 + i] = (Ints)_mm512_shuffle_i32x4(a, c, 0xdd);
    words[12 + i] = (Ints)_mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

}  // namespace
