// Weights of GGUF's types (blocks.cpp).
#pragma once

#include <ATen/core/Tensor.h>

namespace blocks {

void block_rows(const at::Tensor& packed, const at::Tensor& table, const at::Tensor& rows,
                const at::Tensor& out);

}  // namespace blocks
