// A key or a value in 8 bits: codes, and behind them a scale per group (reference.py).
#pragma once

#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t KV_GROUP = 32;

// Returns the bytes of a row of e elements.
inline int64_t kv_row_bytes(int64_t e) { return e + 2 * ((e + KV_GROUP - 1) / KV_GROUP); }

// Returns the scale of element i of a row.
inline float kv_scale(const int8_t* row, int64_t i, int64_t e) {
  at::BFloat16 scale;
  std::memcpy(&scale, row + e + i / KV_GROUP * 2, 2);
  return widen(scale);
}

// x [e] -> its row. NaN makes the scale NaN, as in PyTorch.
inline void kv_encode(const float* x, int64_t e, int8_t* row) {
  for (int64_t first = 0; first < e; first += KV_GROUP) {
    const int64_t last = std::min(first + KV_GROUP, e);
    float most = 1e-30f;
    for (int64_t i = first; i < last; i++) {
      const float size = std::fabs(x[i]);
      most = size > most || size != size ? size : most;
    }
    at::BFloat16 scale;
    put(&scale, most / 127);
    const float step = widen(scale);
    for (int64_t i = first; i < last; i++) {
      const float code = std::nearbyint(x[i] / step);
      row[i] = int8_t(code > -127 ? (code < 127 ? code : 127) : -127);
    }
    std::memcpy(row + e + first / KV_GROUP * 2, &scale, 2);
  }
}

}  // namespace
