// The exponential, and the largest number and the softmax's sum of a row.
#pragma once

#include "simd.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace {

// e^x for x <= 0, to about 1e-7; below -87 it is 0. It has no branch, so that loops vectorize
// (polynomial of Cephes).
inline float exponential(float x) {
  const float held = x > -87.0f ? x : -87.0f;
  // 1.5 * 2^23 moves a whole power of two to the low bits
  const float shifted = held * 1.44269504f + 12582912.0f;
  const float power = shifted - 12582912.0f;
  const float r = (held - power * 0.693359375f) + power * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  for (float c :
       {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    y = y * r + c;
  y = y * r * r + r + 1.0f;
  int32_t bits, exponent;
  std::memcpy(&bits, &y, 4);
  std::memcpy(&exponent, &shifted, 4);
  bits += (exponent - 0x4b400000) * (1 << 23);
  std::memcpy(&y, &bits, 4);
  const float below = x != x ? x : 0.0f;
  return x > -87.0f ? y : below;
}

// Returns the largest of x [n].
inline float largest(const float* x, int64_t n) {
  float lanes[LANES];
  for (int l = 0; l < LANES; l++) lanes[l] = -INFINITY;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int l = 0; l < LANES; l++) lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
  for (; i < n; i++) lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
  float most = -INFINITY;
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

}  // namespace
