// Linear layers of all formats of weights (quantized.cpp, linear.cpp), and their unit on AMX tiles.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

namespace quantized {
at::Tensor grouped(const at::Tensor& x, const at::Tensor& packed, int64_t n, bool wide,
                   const std::optional<at::Tensor>& expert);
at::Tensor w8a8(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scale, bool wide,
                const std::optional<at::Tensor>& expert);
at::Tensor blocks(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& table, bool wide,
                  const std::optional<at::Tensor>& expert);
}  // namespace quantized
namespace linear {
at::Tensor linear_bf16(const at::Tensor& x, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, bool wide,
                       const std::optional<at::Tensor>& expert);
}  // namespace linear
namespace amx {
bool use_tiles(std::string name);
std::tuple<std::string, int64_t, int64_t> tiles();
}  // namespace amx
