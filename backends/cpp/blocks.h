// Weights of GGUF's types (blocks.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace blocks {

void read_rows(const at::Tensor& data, const std::optional<at::Tensor>& table,
               const at::Tensor& rows, const at::Tensor& out);

}  // namespace blocks
