// The rotary embedding (rotary.cpp).
#pragma once

#include "numbers.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

namespace rotary {

std::tuple<at::Tensor, at::Tensor> angles(const at::Tensor& freq, const at::Tensor& positions,
                                          double factor);

}  // namespace rotary

namespace {

// x [E] -> y [E] by half-rotation of the first `turned` elements; products are rounded before they
// are added, as in PyTorch's operators.
template <class T, class Out>
void rotate(const T* x, const float* cos, const float* sin, int64_t turned, int64_t e, Out* y) {
  const int64_t half = turned / 2;
  for (int64_t i = 0; i < half; i++) {
    const float left = widen(x[i]), right = widen(x[half + i]);
    put(y + i, left * cos[i] + -right * sin[i]);
    put(y + half + i, right * cos[half + i] + left * sin[half + i]);
  }
  for (int64_t i = turned; i < e; i++) put(y + i, widen(x[i]));
}

}  // namespace
