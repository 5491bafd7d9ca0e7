// Attention over a cache (attention.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace attention {

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& start, const at::Tensor& mask,
                     const std::optional<at::Tensor>& first, double scale,
                     const std::optional<at::Tensor>& sinks);

}  // namespace attention
