// Vectors of LANES numbers: 32-bit words (Ints) and fp32 (Floats).
//
// They are the compiler's own vectors (`vector_size` of GCC and clang), whose operators become the
// instructions of any processor. A processor has a header with its number of lanes and what has no
// such operator; to port to another one is to write these:
//
// dot: acc[i] += the sum of 4 products of unsigned bytes (weights) and signed bytes (activations).
//   Where SUMS_IN_16_BITS, a SMALL one adds two products to either half of acc[i], `products` are
//   these alone, and `fold` adds both halves of a sum to acc, each times that half of a word. One
//   that is not SMALL takes two numbers of 16 bits on either side: even_bytes or odd_bytes of the
//   weights.
// dot_pairs: acc[i] += two products of numbers of 16 bits.
// look_up: bytes of a table by their numbers, 0 to 15.
// choose: the bits of a that `bits` has, and the others of b.
// multiply_add: a b + c. ints_of: widened numbers of 8 or 16 bits. from_f16: widened float16.
// transpose: word j of vector i becomes word i of vector j.
//
// Constants of the matmuls, by the number of registers: tiles have up to MB rows; those of up to
// MOST_SUMS vectors of sums take a strip whole; CHAINS sums that do not wait for each other hide
// the latency of dot, 0 where they need not.
#pragma once

#if defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#else
#include "simd_plain.h"
#endif

#include <cstdint>

namespace {

using Halves = uint16_t __attribute__((vector_size(4 * LANES)));
using LooseInts = Ints __attribute__((aligned(1), may_alias));  // at any address
using LooseFloats = Floats __attribute__((aligned(1), may_alias));

// A number beside a vector stands for all lanes. Less zero, as plus zero would change -0.
inline Ints splat(int32_t v) { return v - Ints{}; }
inline Floats splat(float v) { return v - Floats{}; }
inline Ints load(const uint8_t* p) { return *(const LooseInts*)p; }
inline Floats load(const float* p) { return *(const LooseFloats*)p; }
inline void store(float* p, Floats v) { *(LooseFloats*)p = v; }
inline void store(int32_t* p, Ints v) { *(LooseInts*)p = v; }

inline Ints add(Ints a, Ints b) { return a + b; }
inline Ints multiply(Ints a, Ints b) { return a * b; }
inline Ints mask(Ints v, int32_t bits) { return v & bits; }
// As `choose`, where b has none of `bits`.
inline Ints join(int32_t bits, Ints a, Ints b) { return mask(a, bits) | b; }
// Times 2^BITS.
template <int BITS> inline Ints raised(Ints v) { return v << BITS; }
// By LEFT places, within numbers of 16 bits.
template <int LEFT> inline Ints shifted(Ints v) {
  if constexpr (LEFT > 0) return (Ints)((Halves)v << LEFT);
  else return (Ints)((Halves)v >> -LEFT);
}
inline Ints low_nibbles(Ints v) { return mask(v, 0x0f0f0f0f); }  // of every byte
inline Ints high_nibbles(Ints v) { return low_nibbles(shifted<-4>(v)); }
inline Ints even_bytes(Ints v) { return mask(v, 0x00ff00ff); }
inline Ints odd_bytes(Ints v) { return shifted<-8>(v); }
inline Ints add_halves(Ints a, Ints b) { return (Ints)((Halves)a + (Halves)b); }
inline Ints multiply_halves(Ints a, Ints b) { return (Ints)((Halves)a * (Halves)b); }

inline Floats words_of(Ints v) { return (Floats)v; }  // the same bits
inline Floats low_half(Ints v) { return words_of(v << 16); }  // the bfloat16 there
inline Floats high_half(Ints v) { return words_of(mask(v, -65536)); }
inline Floats from_ints(Ints v) { return __builtin_convertvector(v, Floats); }
inline Floats from_bf16(const uint16_t* p) { return low_half(ints_of(p)); }
inline Floats from_int8(const int8_t* p) { return from_ints(ints_of(p)); }
// Byte B of every word, signed.
template <int B> inline Floats signed_byte(Ints v) { return from_ints(v << (24 - 8 * B) >> 24); }
inline Floats multiply(Floats a, Floats b) { return a * b; }
// acc + scale * v
inline Floats add_scaled(Ints v, Floats scale, Floats acc) {
  return multiply_add(from_ints(v), scale, acc);
}

}  // namespace
