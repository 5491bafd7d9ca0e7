// Sampling on a CPU: the noise of sampling.py, and its cuts of unlikely tokens.
//
// 1. `gumbel` computes Philox4x32-10 for many counters side by side, the words of each in the lower
//    halves of 64-bit lanes, since a product of two words has 64 bits; then both logarithms, in
//    loops that vectorize.
// 2. `cut` sorts only the tokens that can be kept. Tokens beyond the k-th best are dropped first,
//    and tokens that together have less mass than top-p may leave out. Of 49,152 tokens a few
//    hundred stay. Typical-p drops the tokens that are too far from the usual information first;
//    XTC takes all that the others leave.
//
// A row's result does not depend on the other rows, and is the same in compiled and in eager steps.
// Scores are not NaN.

#include "exponential.h"
#include "operands.h"
#include "operators.h"
#include "threads.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace sampling {
namespace {

constexpr int64_t GRAIN = 1 << 14;  // elements that pay for a thread's wake-up
constexpr int64_t SIDE = 16;        // counters side by side
constexpr float LEAST = -INFINITY;

// a b + c, rounded once where the processor can.
inline float fused(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// ln x for finite x > 0, to about 1e-7; it has no branch, so that loops vectorize (polynomial of
// Cephes).
inline float logarithm(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  int32_t power = (bits >> 23) - 126;
  bits = (bits & 0x007fffff) | 0x3f000000;  // 0.5 .. 1
  float m;
  std::memcpy(&m, &bits, 4);
  const bool low = m < 0.707106781f;
  power -= low;
  m = (low ? m + m : m) - 1.0f;
  const float square = m * m;
  float y = 7.0376836292e-2f;
#pragma GCC unroll 8
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                  -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    y = fused(y, m, c);
  y = fused(y * m, square, fused(-2.12194440e-4f, float(power), -0.5f * square));
  return fused(0.693359375f, float(power), m + y);
}

// ln (1 - u) for 0 < u < 1; the factor corrects the rounding of 1 - u (Kahan).
inline float logarithm_of_rest(float u) {
  const float rest = 1.0f - u;
  const float lost = 1.0f - rest;
  const float factor = u / (lost > 0.0f ? lost : 1.0f);
  return lost > 0.0f ? logarithm(rest) * factor : -u;
}

struct Key {
  uint32_t seed[2], prompt, sample;
};

// Four counters' words, each in the lower half of 64 bits; what the upper halves hold is never
// read.
using Words = uint64_t __attribute__((vector_size(32)));

inline Words low_halves(Words a) { return a & uint64_t(0xffffffff); }
inline Words product(Words a, uint32_t by) {
#if defined(__AVX2__)
  return (Words)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(by));
#else
  return low_halves(a) * uint64_t(by);
#endif
}

// Noise of tokens first .. first + 4 SIDE of one draw. word: the draw and its use.
void fill_noise(const Key& key, uint32_t word, uint32_t first, float* noise) {
  constexpr int64_t PARTS = SIDE / 4;
  Words c[4][PARTS];
  uint32_t k0 = key.seed[0];
  uint32_t k1 = key.seed[1];
  for (int64_t p = 0; p < PARTS; p++) {
    c[0][p] = Words{0, 1, 2, 3} + uint64_t(first / 4 + 4 * p);
    c[1][p] = Words{} + word;
    c[2][p] = Words{} + key.sample;
    c[3][p] = Words{} + key.prompt;
  }
  for (int round = 0; round < 10; round++) {
    for (int64_t p = 0; p < PARTS; p++) {
      const Words a = product(c[0][p], 0xD2511F53u);
      const Words b = product(c[2][p], 0xCD9E8D57u);
      c[0][p] = (b >> 32) ^ c[1][p] ^ uint64_t(k0);
      c[1][p] = b;
      c[2][p] = (a >> 32) ^ c[3][p] ^ uint64_t(k1);
      c[3][p] = a;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  uint32_t words[4 * SIDE];
  for (int64_t p = 0; p < PARTS; p++) {
    const Words even = low_halves(c[0][p]) | c[1][p] << 32;
    const Words odd = low_halves(c[2][p]) | c[3][p] << 32;
    for (int64_t i = 0; i < 4; i++) {
      const uint64_t both[2] = {even[i], odd[i]};
      std::memcpy(words + 16 * p + 4 * i, both, sizeof both);
    }
  }
  for (int64_t i = 0; i < 4 * SIDE; i++) {
    const float most = 1.0f - 0x1p-24f;
    const float u = (float(words[i]) + 0.5f) * 0x1p-32f;
    noise[i] = -logarithm_of_rest(u < most ? u : most);
  }
  // a loop of its own: more of its iterations overlap than if each had both logarithms
  for (int64_t i = 0; i < 4 * SIDE; i++) noise[i] = -logarithm(noise[i]);
}

struct Scored {
  float score;
  int64_t token;
};
inline bool before(const Scored& a, const Scored& b) {
  return a.score > b.score || (a.score == b.score && a.token < b.token);
}

// Returns a bound below which no token is among the k best of z [n]: the k-th best of the maxima of
// parts.
float least_of_best(const float* z, int64_t n, int64_t k, std::vector<float>& maxima) {
  constexpr int64_t PART = 64;
  maxima.clear();
  for (int64_t i = 0; i < n; i += PART) maxima.push_back(largest(z + i, std::min(PART, n - i)));
  if (k > int64_t(maxima.size())) return LEAST;
  std::nth_element(maxima.begin(), maxima.begin() + k - 1, maxima.end(), std::greater<>());
  return maxima[k - 1];
}

// Shortens x to its first elements in an order, as many as it takes: the sum of weights before a
// kept one is below `most`. The first is always kept.
template <class Order, class Weight>
void take(std::vector<Scored>& x, double most, const Order& order, const Weight& weight) {
  size_t count = 0, sorted = 0;
  double sum = 0;
  for (; count < x.size() && (count == 0 || sum < most); count++) {
    if (count == sorted) {
      sorted = std::min(x.size(), std::max<size_t>(256, 4 * sorted));
      const auto begin = x.begin() + count;
      if (sorted < x.size()) std::nth_element(begin, x.begin() + sorted, x.end(), order);
      std::sort(begin, x.begin() + sorted, order);
    }
    sum += weight(x[count]);
  }
  x.resize(count);
}

void take_best(std::vector<Scored>& x, int64_t k) {
  if (k <= 0 || k >= int64_t(x.size())) return;
  std::nth_element(x.begin(), x.begin() + k - 1, x.end(), before);
  x.resize(k);
}

// Finds the tokens that top-k and top-p keep of scores z [n], in any order.
void keep(const float* z, int64_t n, int64_t top_k, float top_p, std::vector<Scored>& kept) {
  static thread_local std::vector<float> maxima;  // its memory is kept from row to row
  const float most = largest(z, n);
  const double total = top_p < 1 && top_k <= 0 ? exponential_sum(z, n, most) : 0;
  // n tokens below it have half of the mass that may go
  const double rest = total * (1 - top_p) / (2 * double(n));
  float floor = rest > 0 ? most + float(std::log(rest)) : LEAST;
  if (top_k > 0) floor = least_of_best(z, n, top_k, maxima);
  kept.clear();
  for (int64_t first = 0; first < n; first += LANES) {
    const int64_t size = std::min<int64_t>(LANES, n - first);
    if (largest(z + first, size) < floor) continue;
    for (int64_t i = first; i < first + size; i++)
      if (z[i] >= floor && z[i] > LEAST) kept.push_back({z[i], i});
  }
  take_best(kept, top_k);
  if (top_p >= 1) return;
  double mass = total;
  if (top_k > 0)
    for (const Scored& each : kept) mass += std::exp(each.score - most);
  take(kept, top_p * mass, before,
       [&](const Scored& each) { return std::exp(each.score - most); });
}

// Returns the best of z [n] less some standard deviations of its finite scores.
float least_of_sigmas(const float* z, int64_t n, float sigmas) {
  if (std::isinf(sigmas)) return LEAST;
  double sum = 0, squares = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < n; i++)
    if (z[i] > LEAST) sum += z[i], count++;
  const double mean = sum / double(count);
  for (int64_t i = 0; i < n; i++)
    if (z[i] > LEAST) squares += (z[i] - mean) * (z[i] - mean);
  return float(largest(z, n) - sigmas * std::sqrt(squares / double(count)));
}

// The cuts of a row but the least score that min-p keeps. Neutral: 0, 1, -inf, inf, 1 and inf.
struct Cuts {
  int64_t top_k;
  float top_p, margin, sigmas, typical, xtc;
  bool rare() const { return typical < 1 || !std::isinf(sigmas) || !std::isinf(xtc); }
};

// The softmax of some scores. Weights are e^(score - most).
struct Softmax {
  double total;  // sum of the weights
  double usual;  // the score of a token whose information is the entropy
};

// Computes it over the scores of z [n] from `floor` on, which are finite; `most` is the largest.
Softmax softmax_of(const float* z, int64_t n, float most, float floor) {
  float weights[64] = {}, products[64] = {};
  const auto add = [&](int64_t lane, float score) {
    const float below = score >= floor ? score - most : -100.0f;  // of weight 0
    const float weight = exponential(below);
    weights[lane] += weight;
    products[lane] += weight * below;
  };
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int64_t lane = 0; lane < 64; lane++) add(lane, z[i + lane]);
  for (; i < n; i++) add(0, z[i]);
  double total = 0, product = 0;
  for (int64_t lane = 0; lane < 64; lane++) {
    total += weights[lane];
    product += products[lane];
  }
  return {total, most + product / total};
}

// Finds the tokens that all cuts keep of scores z [n], in any order.
void keep_shaped(const float* z, int64_t n, const Cuts& cuts, std::vector<Scored>& kept) {
  static thread_local std::vector<float> scores;  // its memory is kept from row to row
  const float most = largest(z, n);
  float floor = std::max(least_of_sigmas(z, n, cuts.sigmas), std::numeric_limits<float>::lowest());
  Softmax all{};
  if (cuts.top_k > 0) {
    floor = std::max(floor, least_of_best(z, n, cuts.top_k, scores));
  } else if (cuts.typical < 1) {
    all = softmax_of(z, n, most, floor);
    // n tokens below it have half of the mass that may go; those as far above may go, too
    const double rest = std::log(all.total * (1 - cuts.typical) / (2 * double(n)));
    const double reach = std::max(all.usual - (most + rest), most - all.usual);
    floor = std::max(floor, float(all.usual - reach));
  }
  const auto weight = [&](const Scored& each) { return exponential(each.score - most); };
  const auto mass = [&] {
    double sum = 0;
    for (const Scored& each : kept) sum += weight(each);
    return sum;
  };
  kept.clear();
  for (int64_t i = 0; i < n; i++)
    if (z[i] >= floor) kept.push_back({z[i], i});
  take_best(kept, cuts.top_k);
  if (cuts.typical < 1) {
    if (cuts.top_k > 0) {
      scores.clear();
      for (const Scored& each : kept) scores.push_back(each.score);
      all = softmax_of(scores.data(), int64_t(scores.size()), most, floor);
    }
    const auto nearer = [&](const Scored& a, const Scored& b) {
      const double x = std::abs(all.usual - a.score), y = std::abs(all.usual - b.score);
      return x < y || (x == y && before(a, b));
    };
    take(kept, cuts.typical * all.total, nearer, weight);
  }
  if (cuts.top_p < 1) take(kept, cuts.top_p * mass(), before, weight);
  float best = LEAST;
  for (const Scored& each : kept) best = std::max(best, each.score);
  const auto drop = [&](const auto& goes) {
    kept.erase(std::remove_if(kept.begin(), kept.end(), goes), kept.end());
  };
  drop([&](const Scored& each) { return each.score < best + cuts.margin; });
  if (std::isinf(cuts.xtc)) return;
  const float least = most + float(std::log(cuts.xtc * mass()));
  const auto likely = [&](const Scored& each) { return each.score >= least; };
  Scored last{INFINITY, -1};  // the least likely of these
  for (const Scored& each : kept)
    if (likely(each) && before(last, each)) last = each;
  drop([&](const Scored& each) { return likely(each) && each.token != last.token; });
}

}  // namespace

// ----------------------------------------------------------------------------------------------
// operators

// Computes `gumbel` of sampling.py: [B, R, V] fp32. seed: [B, 2] or [2]; prompt, sample, first:
// [B], all int64; greedy: [B] bool, or none; per_row: R
at::Tensor gumbel(const at::Tensor& seed, const at::Tensor& prompt, const at::Tensor& sample,
                  const std::optional<at::Tensor>& greedy, const at::Tensor& first, int64_t per_row,
                  int64_t vocab, int64_t domain) {
  const int64_t B = first.size(0);
  const int64_t rows = B * per_row;
  const int64_t whole = (vocab + 4 * SIDE - 1) / (4 * SIDE);
  const at::Tensor noise = at::empty({B, per_row, vocab}, first.options().dtype(at::kFloat));
  TORCH_CHECK(seed.size(-1) == 2, "a seed has two words; this one has ", seed.size(-1));
  const at::Tensor draws = first.contiguous();
  const at::Tensor both = seed.expand({B, 2}).contiguous();
  const at::Tensor of_row = prompt.expand({B}).contiguous();
  const at::Tensor of_sample = sample.expand({B}).contiguous();
  const int64_t* seeds = both.const_data_ptr<int64_t>();
  const int64_t* draw = draws.const_data_ptr<int64_t>();
  const int64_t* prompts = of_row.const_data_ptr<int64_t>();
  const int64_t* samples = of_sample.const_data_ptr<int64_t>();
  const auto is_greedy = optional<bool>(greedy, {B}, "greedy");
  float* to = noise.mutable_data_ptr<float>();
  each_row(rows * whole, GRAIN / (4 * SIDE * 8), [&](int64_t piece) {
    const int64_t row = piece / whole;
    const int64_t token = piece % whole * 4 * SIDE;
    const int64_t count = std::min<int64_t>(4 * SIDE, vocab - token);
    const int64_t b = row / per_row;
    if (is_greedy && (*is_greedy)[b]) {
      std::fill_n(to + row * vocab + token, count, 0.0f);
      return;
    }
    const uint32_t low = uint32_t(seeds[2 * b]);
    const uint32_t high = uint32_t(seeds[2 * b + 1]);
    const Key key{{low, high}, uint32_t(prompts[b]), uint32_t(samples[b])};
    const uint32_t word = uint32_t(draw[b] + row % per_row) + (uint32_t(domain) << 30);
    float made[4 * SIDE];
    fill_noise(key, word, uint32_t(token), made);
    std::copy_n(made, count, to + row * vocab + token);
  });
  return noise;
}

// Computes `process` of sampling.py: scores [B, N, V] divided by the temperature, -inf where they
// are cut away. temperature, top_p, margin (log of min-p), sigmas, typical: [B] fp32; xtc: [B, N]
// fp32; top_k: [B] int64, 0 keeps all; without these nothing is cut away
at::Tensor cut(const at::Tensor& scores, const at::Tensor& temperature,
               const std::optional<at::Tensor>& top_k, const std::optional<at::Tensor>& top_p,
               const std::optional<at::Tensor>& margin, const std::optional<at::Tensor>& sigmas,
               const std::optional<at::Tensor>& typical, const std::optional<at::Tensor>& xtc) {
  const at::Tensor from = scores.contiguous();
  const at::Tensor result = at::empty(from.sizes(), from.options());
  TORCH_CHECK(from.numel() && from.dim() == 3, "there are no scores [B, N, V]");
  const int64_t B = from.size(0);
  const int64_t N = from.size(1);
  const int64_t n = from.size(2);
  const int64_t rows = B * N;
  const Operand<float> by(temperature, {B}, "temperature");
  const auto most = optional<int64_t>(top_k, {B}, "top_k");
  const auto mass = optional<float>(top_p, {B}, "top_p");
  const auto below = optional<float>(margin, {B}, "margin");
  const auto deviations = optional<float>(sigmas, {B}, "sigmas");
  const auto usual = optional<float>(typical, {B}, "typical");
  const auto least_likely = optional<float>(xtc, {B, N}, "xtc");
  const auto cuts_of = [&](int64_t r) {
    const int64_t b = r / N;
    return Cuts{most ? (*most)[b] : 0,
                mass ? (*mass)[b] : 1.0f,
                below ? (*below)[b] : LEAST,
                deviations ? (*deviations)[b] : INFINITY,
                usual ? (*usual)[b] : 1.0f,
                least_likely ? (*least_likely)[r] : INFINITY};
  };
  const float* x = from.const_data_ptr<float>();
  float* y = result.mutable_data_ptr<float>();
  bool cuts = false;
  for (int64_t r = 0; r < rows; r++) {
    const Cuts own = cuts_of(r);
    cuts |= own.top_k > 0 || own.top_p < 1 || own.margin > LEAST || own.rare();
  }
  if (!cuts) {
    parallel(rows * n, GRAIN, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end;) {
        const int64_t b = i / (N * n);
        const int64_t until = std::min(end, (b + 1) * N * n);
        const float t = by[b];
        for (; i < until; i++) y[i] = x[i] / t;
      }
    });
    return result;
  }
  parallel(rows, GRAIN / (8 * n), [&](int64_t begin, int64_t end) {
    std::vector<float> z(n);
    std::vector<Scored> kept;
    for (int64_t r = begin; r < end; r++) {
      const Cuts own = cuts_of(r);
      const float t = by[r / N];
      for (int64_t i = 0; i < n; i++) z[i] = x[r * n + i] / t;
      float least = LEAST;
      if (own.margin > LEAST) least = largest(z.data(), n) + own.margin;
      if (own.rare()) {
        keep_shaped(z.data(), n, own, kept);
        least = LEAST;
      } else if (own.top_k <= 0 && own.top_p >= 1) {
        for (int64_t i = 0; i < n; i++) y[r * n + i] = z[i] >= least ? z[i] : LEAST;
        continue;
      } else {
        keep(z.data(), n, own.top_k, own.top_p, kept);
      }
      std::fill_n(y + r * n, n, LEAST);
      for (const Scored& each : kept)
        if (each.score >= least) y[r * n + each.token] = each.score;
    }
  });
  return result;
}

// Computes `soft_cap` of reference.py: tanh x is (1 - e^-2x) / (1 + e^-2x). It is one pass
// on our own threads; PyTorch takes three operators, whose threads then spin beside ours.
at::Tensor soft_cap(const at::Tensor& scores, double cap) {
  TORCH_CHECK(scores.scalar_type() == at::kFloat, "scores must be float32");
  const at::Tensor from = scores.contiguous(), y = at::empty(scores.sizes(), scores.options());
  const float *x = from.const_data_ptr<float>(), most = float(cap), twice = float(-2 / cap);
  float* to = y.mutable_data_ptr<float>();
  each_row(scores.numel(), GRAIN, [&](int64_t i) {
    const float e = exponential(-std::abs(x[i] * twice)), bound = most * (1.0f - e) / (1.0f + e);
    to[i] = x[i] < 0 ? -bound : bound;
  });
  return y;
}

OPERATORS(m) {
  m.def("soft_cap(Tensor scores, float cap) -> Tensor", cpu(soft_cap));
  m.def(
      "gumbel(Tensor seed, Tensor prompt, Tensor sample, Tensor? greedy, Tensor first, int rows, "
      "int vocab, int domain) -> Tensor", cpu(gumbel));
  m.def(
      "cut(Tensor scores, Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? margin, "
      "Tensor? sigmas, Tensor? typical, Tensor? xtc) -> Tensor", cpu(cut));
}

}  // namespace sampling
