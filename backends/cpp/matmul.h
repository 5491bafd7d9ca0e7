// The matmul of a linear layer (matmul.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace matmul {

// Multiplies rows by a weight, x W^T, and adds a bias: the operator `matmul`.
//
// x: [..., k], bfloat16, or fp32, which makes the result fp32; a weight in bfloat16 rounds it
// weight, table: see `Weight` in weight_layout.h; without a table, bfloat16
// bias: [n] bfloat16, or none; n: the weight's outputs
// expert: one int64 per row, of a stack of weights; its bias is [experts, n]
// Returns: [..., n], in x's type, or fp32.
at::Tensor matmul(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& table, const std::optional<at::Tensor>& bias,
                  int64_t n, bool fp32_out, const std::optional<at::Tensor>& expert);

}  // namespace matmul
