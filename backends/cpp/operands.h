// Operands that are checked, and the results of an operator.
#pragma once

#include "numbers.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace {

// The data of a tensor in one piece, after a check of its shape and its type.
template <class T> struct Operand {
  at::Tensor held;
  const T* data;
  Operand(const at::Tensor& t, at::IntArrayRef shape, const char* name) {
    TORCH_CHECK(t.sizes() == shape && t.scalar_type() == c10::CppTypeToScalarType<T>::value, name,
                " must be ", shape, " of ", c10::CppTypeToScalarType<T>::value, "; it is ",
                t.sizes(), " of ", t.scalar_type());
    held = t.contiguous();
    data = held.const_data_ptr<T>();
  }
  const T& operator[](int64_t i) const { return data[i]; }
};
using Whole = Operand<int64_t>;
using Truth = Operand<bool>;

template <class T>
std::optional<Operand<T>> optional(const std::optional<at::Tensor>& t, at::IntArrayRef shape,
                                   const char* name) {
  if (!t) return std::nullopt;
  return Operand<T>(*t, shape, name);
}

// Returns an index after a check that it is below `size`.
inline int64_t within(int64_t index, int64_t size, const char* name) {
  TORCH_CHECK(index >= 0 && index < size, name, " must be 0 to ", size - 1, "; it is ", index);
  return index;
}

// A tuple of N tensors, as an operator returns them.
template <size_t N> using Tensors = decltype(std::tuple_cat(std::array<at::Tensor, N>()));

// Returns an empty tensor [..., width] for x [..., any].
inline at::Tensor empty_rows(const at::Tensor& x, int64_t width, at::ScalarType type) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = width;
  return at::empty(shape, x.options().dtype(type));
}

// Calls f(data of y); y is float or bfloat16.
template <class F> void fill(const at::Tensor& y, const F& f) {
  if (y.scalar_type() == at::kBFloat16) f(y.mutable_data_ptr<at::BFloat16>());
  else f(y.mutable_data_ptr<float>());
}

// Writes y [columns], the sums; WHOLE of them in a loop of known length.
template <int64_t WHOLE, class Out> void put_row(Out* y, const float* sums, int64_t columns) {
  if (columns == WHOLE)
    for (int64_t i = 0; i < WHOLE; i++) put(y + i, sums[i]);
  else
    for (int64_t i = 0; i < columns; i++) put(y + i, sums[i]);
}

}  // namespace
