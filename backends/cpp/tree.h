// Windows of a cache (tree.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

namespace tree {

std::tuple<at::Tensor, at::Tensor, at::Tensor> causal(const at::Tensor& first, int64_t rows,
                                                      int64_t back);

}  // namespace tree
