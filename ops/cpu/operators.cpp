// The registration of all operators, and the files that are not in products.cpp. The two units are
// compiled side by side; more units would take longer, since reading PyTorch's headers takes as
// long as compiling most of the files.

#include "operators.h"

#include <vector>

#include "blocks.cpp"
#include "compact.cpp"
#include "layers.cpp"
#include "lookup.cpp"
#include "rotary.cpp"
#include "threads.cpp"
#include "topk.cpp"
#include "tree.cpp"

namespace {

using Define = void (*)(torch::Library&);

// Returns the functions that define the operators of every file.
std::vector<Define>& definitions() {
  static std::vector<Define> all;
  return all;
}

}  // namespace

Definition::Definition(Define define) { definitions().push_back(define); }

// Adds the operators to a namespace of torch.ops. Called by build.py.
extern "C" __attribute__((visibility("default"))) void add_operators(const char* name) {
  static std::vector<torch::Library> libraries;  // an operator lives as long as its library
  libraries.emplace_back(torch::Library::FRAGMENT, name, std::nullopt, __FILE__, __LINE__);
  for (const Define define : definitions()) define(libraries.back());
}
