// Attention over a cache (attention.cpp).
#pragma once

#include <ATen/core/Tensor.h>

namespace attention {

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& start, const at::Tensor& mask);

}  // namespace attention
