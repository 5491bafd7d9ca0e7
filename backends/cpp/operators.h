// The registration of operators in torch.ops. A file ends with those of its functions:
//
//   OPERATORS(m) {
//     m.def("best(Tensor scores, Tensor? noise, Tensor? row) -> Tensor");
//     m.impl("best", at::kCPU, best);
//     m.impl("best", at::kMeta, empty_best);  // the shapes of its results, where steps are traced
//   }
//
// All of them refuse inputs that need gradients (operators.cpp).
// It is PyTorch's TORCH_LIBRARY_FRAGMENT for a namespace that is known only when the library is
// loaded: tests load the builds for several processors into one process, each into its own.
#pragma once

#include <torch/library.h>

// Operators of one file.
struct Definition {
  explicit Definition(void (*define)(torch::Library&));  // operators.cpp
};

#define OPERATORS(m)                                    \
  static void define_operators(torch::Library& m);      \
  static const Definition definition(define_operators); \
  static void define_operators(torch::Library& m)
