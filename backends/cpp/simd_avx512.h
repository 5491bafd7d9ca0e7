// Vectors of simd.h on processors with AVX-512 and VNNI.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int LANES = 16;
constexpr int MB = 5, MOST_SUMS = 10, CHAINS = 12;
constexpr bool SUMS_IN_16_BITS = false;
using Ints = __m512i;
using Floats = __m512;
inline Ints splat(int32_t v) { return _mm512_set1_epi32(v); }
inline Floats splat(float v) { return _mm512_set1_ps(v); }
inline Ints load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline void store(int32_t* p, Ints v) { _mm512_storeu_si512(p, v); }
inline Ints low_nibbles(Ints v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Ints high_nibbles(Ints v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
inline Ints look_up(const uint8_t (&table)[16], Ints v) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), v);
}
template <int LEFT> inline Ints shifted(Ints v) {
  return LEFT > 0 ? _mm512_slli_epi16(v, LEFT > 0 ? LEFT : 0)
                  : _mm512_srli_epi16(v, LEFT < 0 ? -LEFT : 0);
}
// gcc copies every accumulator around the intrinsic: 2x
template <bool SMALL> inline Ints dot(Ints acc, Ints w, Ints x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
  return acc;
}
inline Ints products(Ints w, Ints x) { return _mm512_maddubs_epi16(w, x); }
inline Ints fold(Ints acc, Ints, Ints) { return acc; }  // serves SUMS_IN_16_BITS only
inline Ints even_bytes(Ints v) { return _mm512_and_si512(v, _mm512_set1_epi16(255)); }
inline Ints odd_bytes(Ints v) { return _mm512_srli_epi16(v, 8); }
inline Ints dot_pairs(Ints acc, Ints a, Ints b) { return _mm512_dpwssd_epi32(acc, a, b); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints multiply(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
template <int BITS> inline Ints raised(Ints v) { return _mm512_slli_epi32(v, BITS); }
inline Ints multiply_halves(Ints a, Ints b) { return _mm512_mullo_epi16(a, b); }
inline Ints add_halves(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
inline Ints mask(Ints v, int32_t bits) { return _mm512_and_si512(v, splat(bits)); }
inline Ints choose(int32_t bits, Ints a, Ints b) {
  return _mm512_ternarylogic_epi32(splat(bits), a, b, 0xca);
}
inline Ints join(int32_t bits, Ints a, Ints b) { return choose(bits, a, b); }
inline Floats words_of(Ints v) { return _mm512_castsi512_ps(v); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats add_scaled(Ints v, Floats scale, Floats acc) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(v), scale, acc);
}
inline Floats from_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline Floats from_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
inline Floats from_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline Ints ints_of(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}
inline Ints ints_of(const int8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
}
template <int B> inline Floats signed_byte(Ints v) {
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * B), 24));
}
inline Floats low_half(Ints v) { return words_of(_mm512_slli_epi32(v, 16)); }
inline void transpose(Ints (&w)[LANES]) {
  Ints t[LANES];
  for (int i = 0; i < LANES; i += 2) {
    t[i] = _mm512_unpacklo_epi32(w[i], w[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(w[i], w[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4) {
    for (int j = 0; j < 2; j++) {
      w[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      w[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  }
  for (int i = 0; i < 4; i++) {  // w[4 r + i]: of vectors 4 r .. 4 r + 3, word i of every quarter
    const Ints a = _mm512_shuffle_i32x4(w[i], w[4 + i], 0x88);
    const Ints b = _mm512_shuffle_i32x4(w[i], w[4 + i], 0xdd);
    const Ints c = _mm512_shuffle_i32x4(w[8 + i], w[12 + i], 0x88);
    const Ints d = _mm512_shuffle_i32x4(w[8 + i], w[12 + i], 0xdd);
    w[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    w[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
    w[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
    w[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

}  // namespace
