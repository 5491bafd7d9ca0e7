// Vectors of LANES numbers: 32-bit words (Ints) and fp32 (Floats).
//
// A processor has a header with these functions; to port to another one is to write one.
//
// splat, load, store, add, multiply, multiply_add: as they say.
// dot: acc[i] += the sum of 4 products of unsigned bytes (weights) and signed bytes (activations).
//   Where SUMS_IN_16_BITS, a SMALL one adds two products to either half of acc[i], `products` are
//   these alone, and `fold` adds both halves of a sum to acc, each times that half of a word. One
//   that is not SMALL takes two numbers of 16 bits on either side: even_bytes or odd_bytes of the
//   weights.
// dot_pairs: acc[i] += two products of numbers of 16 bits.
// low_nibbles, high_nibbles: of every byte. look_up: bytes of a table by their numbers, 0 to 15.
// shifted: bits by LEFT places within words of 16 or 32 bits. raised: times 2^BITS.
// multiply_halves, add_halves: of numbers of 16 bits.
// choose: the bits of a that `bits` has, and the others of b. join: the same where b has none of
//   `bits`.
// add_scaled: acc + scale * v. from_bf16, from_f16: widened numbers of 16 bits.
// words_of: the same bits as fp32. low_half, high_half: the bfloat16 in either half of a word.
// ints_of: widened bytes. from_int8: widened signed bytes. signed_byte: byte B of every word,
//   signed and widened.
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

namespace {

inline Floats high_half(Ints v) { return words_of(mask(v, -65536)); }

}  // namespace
