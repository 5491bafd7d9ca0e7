// The registration of operators in torch.ops. A file ends with those of its functions:
//
//   OPERATORS(m) {
//     m.def("best(Tensor scores, Tensor? noise, Tensor? row) -> Tensor", cpu(best));
//   }
//
// All of them refuse inputs that need gradients (operators.cpp). They have no shapes for tensors
// without data: torch.compile, which CUDA alone uses, traces Triton's operators and the references.
// It is PyTorch's TORCH_LIBRARY_FRAGMENT for a namespace that is known only when the library is
// loaded: tests load the builds for several processors into one process, each into its own.
#pragma once

#include <torch/library.h>

// Operators of one file.
struct Definition {
  explicit Definition(void (*define)(torch::Library&));  // operators.cpp
};

// Returns the function as the implementation of an operator whose inputs are tensors.
template <class Function> torch::CppFunction cpu(Function* function) {
  return torch::dispatch(at::kCPU, function);
}

#define OPERATORS(m)                                    \
  static void define_operators(torch::Library& m);      \
  static const Definition definition(define_operators); \
  static void define_operators(torch::Library& m)
