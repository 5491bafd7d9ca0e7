// Shared code of the CPU operators: loops on several threads, vectors of LANES numbers for this processor, bfloat16,
// the exponential, the rotary embedding and the rows of experts.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// ------------------------------------------------------------------------ functions that other files call

namespace amx {
bool use_tiles(std::string name);
std::tuple<std::string, int64_t, int64_t> tiles();
}  // namespace amx
namespace attention {
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& start,
                     const at::Tensor& mask);
}  // namespace attention
namespace sampling {
at::Tensor gumbel(const at::Tensor& seed, const at::Tensor& prompt, const at::Tensor& sample,
                  const std::optional<at::Tensor>& greedy, const at::Tensor& first, int64_t per_row, int64_t vocab,
                  int64_t domain);
at::Tensor cut(const at::Tensor& scores, const at::Tensor& temperature, const std::optional<at::Tensor>& top_k,
               const std::optional<at::Tensor>& top_p, const std::optional<at::Tensor>& margin);
}  // namespace sampling

namespace rotary {
std::tuple<at::Tensor, at::Tensor> angles(const at::Tensor& freq, const at::Tensor& positions, double factor);
}  // namespace rotary
namespace tree {
std::tuple<at::Tensor, at::Tensor, at::Tensor> causal(const at::Tensor& first, int64_t rows, int64_t back);
}  // namespace tree

// ------------------------------------------------------------------------------------------------- threads

struct Loop {
  void (*run)(const void* body, int64_t begin, int64_t end) noexcept;  // several threads may run it at once
  const void* body;
  int64_t size, grain;
};
void run_loop(const Loop& loop);  // threads.cpp

// Names the weights that a coming loop of this thread reads in order. From the next loop on, threads that wait fetch the
// first lines of their share of them into L2: memory would be idle in the steps between two products.
void read_next(const void* weights, int64_t bytes);

namespace {

// Calls f(begin, end) for parts of 0 .. size of about `grain` or more, on several threads where that pays.
template <class F> void parallel(int64_t size, int64_t grain, const F& f) {
  const auto run = [](const void* body, int64_t begin, int64_t end) noexcept {
    (*static_cast<const F*>(body))(begin, end);
  };
  run_loop({run, &f, size, grain});
}

// Returns the number of a float16's bits.
inline float widen_half(uint16_t bits) { return c10::Half(bits, c10::Half::from_bits()); }

// Fetches a cache line of weights that are needed soon. A line that is fetched into L1 holds one of its few miss buffers
// until memory answers, which bounds a core's bandwidth.
inline void to_l2(const void* line) { __builtin_prefetch(line, 0, 2); }

// Returns two numbers of 16 bits in a word.
constexpr int32_t two_halves(int32_t low, int32_t high) {
  return int32_t((uint32_t(low) & 0xffff) | uint32_t(high) << 16);
}

// ------------------------------------------------------------------------------------------------ vectors
// LANES numbers at a time. dot: acc[i] += sum of 4 products of unsigned bytes (weights) and signed bytes (activations).
// Where FOLDS, a SMALL one adds two products to either half of acc[i], products are these alone, and fold adds both
// halves of a sum to acc, each times that half of a word; one that is not SMALL takes two numbers of 16 bits on either
// side, even_bytes or odd_bytes of the weights. dot_pairs: acc[i] += two products of numbers of 16 bits.
// shifted: bits by LEFT places within words of 16 or 32 bits. raised: times 2^BITS. ..._halves: of numbers of 16 bits.
// choose: the bits of a that `bits` has, and the others of b. join: the same where b has none of `bits`. words_of: the
// same bits. low_half, high_half: the bfloat16 in either half of a word. transpose: word j of vector i becomes word i of
// vector j.
// For dot.h, by registers: tiles have up to MB rows; those of up to MOST_SUMS vectors of sums take a strip whole;
// CHAINS sums that do not wait for each other hide the latency of dot, 0 where they need not.

#if defined(__AVX512VNNI__)

constexpr int LANES = 16, MB = 5, MOST_SUMS = 10, CHAINS = 12;
constexpr bool FOLDS = false;
using Ints = __m512i;
using Floats = __m512;
inline Ints splat(int32_t v) { return _mm512_set1_epi32(v); }
inline Floats splat(float v) { return _mm512_set1_ps(v); }
inline Ints load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Ints load_halves(const uint8_t* p) {  // two loads: from memory, 1.1 times as fast on a Zen 4
  const Ints low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i*)(p + 32)), 1);
}
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline void store(int32_t* p, Ints v) { _mm512_storeu_si512(p, v); }
inline Ints low_nibbles(Ints v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Ints high_nibbles(Ints v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
template <int LEFT> inline Ints shifted(Ints v) {
  return LEFT > 0 ? _mm512_slli_epi16(v, LEFT > 0 ? LEFT : 0) : _mm512_srli_epi16(v, LEFT < 0 ? -LEFT : 0);
}
template <bool SMALL> inline Ints dot(Ints acc, Ints w, Ints x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));  // gcc copies every accumulator around the intrinsic: 2x
  return acc;
}
inline Ints products(Ints w, Ints x) { return _mm512_maddubs_epi16(w, x); }
inline Ints fold(Ints acc, Ints, Ints) { return acc; }  // serves FOLDS only
inline Ints even_bytes(Ints v) { return _mm512_and_si512(v, _mm512_set1_epi16(255)); }
inline Ints odd_bytes(Ints v) { return _mm512_srli_epi16(v, 8); }
inline Ints dot_pairs(Ints acc, Ints a, Ints b) { return _mm512_dpwssd_epi32(acc, a, b); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints multiply(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
template <int BITS> inline Ints raised(Ints v) { return _mm512_slli_epi32(v, BITS); }
inline Ints multiply_halves(Ints a, Ints b) { return _mm512_mullo_epi16(a, b); }
inline Ints add_halves(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
inline Ints mask(Ints v, int32_t bits) { return _mm512_and_si512(v, splat(bits)); }
inline Ints choose(int32_t bits, Ints a, Ints b) { return _mm512_ternarylogic_epi32(splat(bits), a, b, 0xca); }
inline Ints join(int32_t bits, Ints a, Ints b) { return choose(bits, a, b); }
inline Floats words_of(Ints v) { return _mm512_castsi512_ps(v); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats add_scaled(Ints v, Floats scale, Floats acc) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(v), scale, acc);
}
inline Floats from_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline Floats from_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Floats low_half(Ints v) { return words_of(_mm512_slli_epi32(v, 16)); }
inline void transpose(Ints (&w)[LANES]) {
  Ints t[LANES];
  for (int i = 0; i < LANES; i += 2)
    t[i] = _mm512_unpacklo_epi32(w[i], w[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(w[i], w[i + 1]);
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < 2; j++) {
      w[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      w[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 4; i++) {  // w[4 r + i]: of vectors 4 r .. 4 r + 3, word i of every quarter
    const Ints a = _mm512_shuffle_i32x4(w[i], w[4 + i], 0x88), b = _mm512_shuffle_i32x4(w[i], w[4 + i], 0xdd);
    const Ints c = _mm512_shuffle_i32x4(w[8 + i], w[12 + i], 0x88), d = _mm512_shuffle_i32x4(w[8 + i], w[12 + i], 0xdd);
    w[i] = _mm512_shuffle_i32x4(a, c, 0x88), w[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
    w[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd), w[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr int LANES = 8, MOST_SUMS = 8;
using Ints = __m256i;
using Floats = __m256;
inline Ints splat(int32_t v) { return _mm256_set1_epi32(v); }
inline Floats splat(float v) { return _mm256_set1_ps(v); }
inline Ints load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Ints load_halves(const uint8_t* p) { return load(p); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
inline void store(int32_t* p, Ints v) { _mm256_storeu_si256((__m256i*)p, v); }
inline Ints low_nibbles(Ints v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline Ints high_nibbles(Ints v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }
template <int LEFT> inline Ints shifted(Ints v) {
  return LEFT > 0 ? _mm256_slli_epi16(v, LEFT > 0 ? LEFT : 0) : _mm256_srli_epi16(v, LEFT < 0 ? -LEFT : 0);
}
#if defined(__AVXVNNI__)
constexpr bool FOLDS = false;
constexpr int MB = 4, CHAINS = 8;
template <bool SMALL> inline Ints dot(Ints acc, Ints w, Ints x) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));  // see above
  return acc;
}
#else
constexpr bool FOLDS = true;
constexpr int MB = 6, CHAINS = 0;
// gcc would compute all products of a step first, and put them all on the stack: 4x
template <bool SMALL> inline Ints dot(Ints acc, Ints w, Ints x) {
  Ints both;
  if (SMALL) asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(acc), "=&x"(both) : "x"(w), "x"(x));
  else asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(both) : "x"(w), "x"(x));
  return acc;
}
#endif
inline Ints products(Ints w, Ints x) { return _mm256_maddubs_epi16(w, x); }
inline Ints even_bytes(Ints v) { return _mm256_and_si256(v, _mm256_set1_epi16(255)); }
inline Ints odd_bytes(Ints v) { return _mm256_srli_epi16(v, 8); }
inline Ints dot_pairs(Ints acc, Ints a, Ints b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
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
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline Floats from_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline Floats low_half(Ints v) { return words_of(_mm256_slli_epi32(v, 16)); }
inline void transpose(Ints (&w)[LANES]) {
  Ints t[LANES];
  for (int i = 0; i < LANES; i += 2)
    t[i] = _mm256_unpacklo_epi32(w[i], w[i + 1]), t[i + 1] = _mm256_unpackhi_epi32(w[i], w[i + 1]);
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < 2; j++) {
      w[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]);
      w[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 4; i++) {  // w[4 r + i]: of vectors 4 r .. 4 r + 3, word i of both halves
    const Ints a = w[i], b = w[4 + i];
    w[i] = _mm256_permute2x128_si256(a, b, 0x20), w[4 + i] = _mm256_permute2x128_si256(a, b, 0x31);
  }
}

#else  // any processor: the same steps in plain loops

constexpr int LANES = 16, MB = 2, MOST_SUMS = 4, CHAINS = 8;
constexpr bool FOLDS = false;
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
inline Ints load_halves(const uint8_t* p) { return load(p); }
inline Floats load(const float* p) { Floats r; std::memcpy(&r, p, sizeof r); return r; }
inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
inline void store(int32_t* p, Ints v) { std::memcpy(p, &v, sizeof v); }
inline Ints low_nibbles(Ints v) { EACH_LANE v.lane[i] &= 0x0f0f0f0f; return v; }
inline Ints high_nibbles(Ints v) { EACH_LANE v.lane[i] = (v.lane[i] >> 4) & 0x0f0f0f0f; return v; }
template <int LEFT> inline Ints shifted(Ints v) {
  constexpr int left = LEFT > 0 ? LEFT : 0, right = LEFT < 0 ? -LEFT : 0;
  EACH_LANE v.lane[i] = int32_t(uint32_t(v.lane[i]) << left >> right);
  return v;
}
template <bool SMALL> inline Ints dot(Ints acc, Ints w, Ints x) {
  EACH_LANE for (int b = 0; b < 32; b += 8) acc.lane[i] += int32_t(uint8_t(w.lane[i] >> b)) * int8_t(x.lane[i] >> b);
  return acc;
}
inline Ints products(Ints w, Ints x) {
  EACH_LANE {
    int32_t half[2];
    for (int h = 0; h < 2; h++) {
      const uint32_t a = uint32_t(w.lane[i]) >> 16 * h, b = uint32_t(x.lane[i]) >> 16 * h;
      half[h] = uint8_t(a) * int8_t(b) + uint8_t(a >> 8) * int8_t(b >> 8);
    }
    w.lane[i] = two_halves(half[0], half[1]);
  }
  return w;
}
inline Ints fold(Ints acc, Ints, Ints) { return acc; }  // serves FOLDS only
inline Ints even_bytes(Ints v) { EACH_LANE v.lane[i] &= 0x00ff00ff; return v; }
inline Ints odd_bytes(Ints v) { EACH_LANE v.lane[i] = v.lane[i] >> 8 & 0x00ff00ff; return v; }
inline Ints dot_pairs(Ints acc, Ints a, Ints b) {
  EACH_LANE for (int h = 0; h < 32; h += 16) acc.lane[i] += int32_t(int16_t(a.lane[i] >> h)) * int16_t(b.lane[i] >> h);
  return acc;
}
inline Ints add(Ints a, Ints b) { EACH_LANE a.lane[i] = int32_t(uint32_t(a.lane[i]) + uint32_t(b.lane[i])); return a; }
inline Ints multiply(Ints a, Ints b) {
  EACH_LANE a.lane[i] = int32_t(uint32_t(a.lane[i]) * uint32_t(b.lane[i]));
  return a;
}
template <int BITS> inline Ints raised(Ints v) { return multiply(v, splat(1 << BITS)); }
inline Ints multiply_halves(Ints a, Ints b) {
  EACH_LANE a.lane[i] = two_halves(int16_t(a.lane[i]) * int16_t(b.lane[i]), (a.lane[i] >> 16) * (b.lane[i] >> 16));
  return a;
}
inline Ints add_halves(Ints a, Ints b) {
  EACH_LANE a.lane[i] = two_halves(int16_t(a.lane[i]) + int16_t(b.lane[i]), (a.lane[i] >> 16) + (b.lane[i] >> 16));
  return a;
}
inline Ints mask(Ints v, int32_t bits) { EACH_LANE v.lane[i] &= bits; return v; }
inline Ints choose(int32_t bits, Ints a, Ints b) {
  EACH_LANE a.lane[i] = (a.lane[i] & bits) | (b.lane[i] & ~bits);
  return a;
}
inline Ints join(int32_t bits, Ints a, Ints b) { return choose(bits, a, b); }
inline Floats words_of(Ints v) { Floats r; std::memcpy(&r, &v, sizeof r); return r; }
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
inline Floats from_f16(const uint16_t* p) {
  Floats r;
  EACH_LANE r.lane[i] = widen_half(p[i]);
  return r;
}
inline Floats low_half(Ints v) { EACH_LANE v.lane[i] = int32_t(uint32_t(v.lane[i]) << 16); return words_of(v); }
inline void transpose(Ints (&w)[LANES]) {
  EACH_LANE for (int j = 0; j < i; j++) std::swap(w[i].lane[j], w[j].lane[i]);
}

#endif

inline Floats high_half(Ints v) { return words_of(mask(v, -65536)); }

// ------------------------------------------------------------------------------------------- exponentials

// e^x for x <= 0, to about 1e-7; below -87 it is 0. It has no branch, so that loops vectorize (polynomial of Cephes).
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

// Returns the largest of x [n].
inline float largest(const float* x, int64_t n) {
  float lanes[LANES], most = -INFINITY;
  for (int l = 0; l < LANES; l++) lanes[l] = -INFINITY;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int l = 0; l < LANES; l++) lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
  for (; i < n; i++) lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
  for (float lane : lanes) most = lane > most ? lane : most;
  return most;
}

// Returns the sum of e^(x - most) over x [n]; `most` is the largest of x.
inline double exponential_sum(const float* x, int64_t n, float most) {
  if (std::isinf(most)) return 1;
  float lanes[64] = {};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int64_t l = 0; l < 64; l++) lanes[l] += exponential(x[i + l] - most);
  for (; i < n; i++) lanes[0] += exponential(x[i] - most);
  double sum = 0;
  for (float lane : lanes) sum += lane;
  return sum;
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

// ---------------------------------------------------------------------------------------------- operands

// Returns the data of a tensor after a check of its shape, its type and that it is contiguous.
template <class T> struct Operand {
  at::Tensor held;
  const T* data;
  Operand(const at::Tensor& t, at::IntArrayRef shape, const char* name) {
    TORCH_CHECK(t.sizes() == shape && t.scalar_type() == c10::CppTypeToScalarType<T>::value, name, " must be ", shape,
                " of ", c10::CppTypeToScalarType<T>::value, "; it is ", t.sizes(), " of ", t.scalar_type());
    held = t.contiguous();
    data = held.const_data_ptr<T>();
  }
  const T& operator[](int64_t i) const { return data[i]; }
};
using Whole = Operand<int64_t>;
using Truth = Operand<bool>;

template <class T>
std::optional<Operand<T>> optional(const std::optional<at::Tensor>& t, at::IntArrayRef shape, const char* name) {
  if (!t) return std::nullopt;
  return Operand<T>(*t, shape, name);
}

// Returns an index after a check that it is below `size`.
inline int64_t within(int64_t index, int64_t size, const char* name) {
  TORCH_CHECK(index >= 0 && index < size, name, " must be 0 to ", size - 1, "; it is ", index);
  return index;
}

// ----------------------------------------------------------------------------------------------- results

// Returns an empty tensor [..., width] for x [..., any].
inline at::Tensor empty_rows(const at::Tensor& x, int64_t width, at::ScalarType type) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = width;
  return at::empty(shape, x.options().dtype(type));
}

// Calls f(data of y); y is float or bfloat16.
template <class F> void fill(const at::Tensor& y, const F& f) {
  if (y.scalar_type() == at::kBFloat16) f(y.mutable_data_ptr<at::BFloat16>());
  else f(y.mutable_data_ptr<float>());
}

// y [columns] = sums; WHOLE of them in a loop of known length.
template <int64_t WHOLE, class Out> void put_row(Out* y, const float* sums, int64_t columns) {
  if (columns == WHOLE)
    for (int64_t i = 0; i < WHOLE; i++) put(y + i, sums[i]);
  else
    for (int64_t i = 0; i < columns; i++) put(y + i, sums[i]);
}

// ------------------------------------------------------------------------------------------------ rotary

// x [E] -> y [E] by half-rotation; products are rounded before they are added, as in PyTorch's operators.
template <class T, class Out> void rotate(const T* x, const float* cos, const float* sin, int64_t e, Out* y) {
  const int64_t half = e / 2;
  for (int64_t i = 0; i < half; i++) {
    const float left = widen(x[i]), right = widen(x[half + i]);
    put(y + i, left * cos[i] + -right * sin[i]);
    put(y + half + i, right * cos[half + i] + left * sin[half + i]);
  }
}

// ----------------------------------------------------------------------------------------------- experts

struct Group {
  int64_t expert, first, rows;  // rows of one expert lie side by side
};
struct Order {
  std::vector<int64_t> row;   // the index of each row in x and in the result
  std::vector<Group> groups;  // of the experts that are hit
};

// Sorts rows by expert, stably. expert: of each row; null: all rows have the only expert.
inline void group_rows(Order& order, const int64_t* expert, int64_t experts, int64_t rows) {
  std::vector<int64_t> next(experts + 1);  // place of the next row of each expert
  for (int64_t i = 0; i < rows; i++) next[(expert ? expert[i] : 0) + 1]++;
  order.groups.clear();
  for (int64_t e = 0; e < experts; e++) {
    if (next[e + 1]) order.groups.push_back({e, next[e], next[e + 1]});
    next[e + 1] += next[e];
  }
  order.row.resize(rows);
  for (int64_t i = 0; i < rows; i++) order.row[next[expert ? expert[i] : 0]++] = i;
}

// Returns the number of experts that are stacked in `packed`. dims: dimensions of one expert's layout; expert: of each
// row, checked.
inline int64_t count_experts(const at::Tensor& packed, int64_t dims, int64_t rows,
                             const std::optional<at::Tensor>& expert) {
  TORCH_CHECK(packed.dim() == dims + expert.has_value(), "weights of ", packed.dim(), " dimensions do not fit");
  if (!expert) return 1;
  TORCH_CHECK(expert->scalar_type() == at::kLong && expert->is_contiguous() && expert->numel() == rows,
              "expert must hold one int64 per row, in one piece");
  const int64_t* of_row = expert->const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows; i++)
    TORCH_CHECK(of_row[i] >= 0 && of_row[i] < packed.size(0), "there is no expert ", of_row[i]);
  return packed.size(0);
}

}  // namespace
