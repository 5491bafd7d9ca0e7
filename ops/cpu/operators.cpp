// The operators in torch.ops: each file's own definitions (operators.h), run when build.py loads
// the library.

#include "operators.h"

#include <optional>
#include <vector>

namespace {

using Define = void (*)(torch::Library&);

// Returns the functions that define the operators of every file.
std::vector<Define>& definitions() {
  static std::vector<Define> all;
  return all;
}

}  // namespace

Definition::Definition(Define define) { definitions().push_back(define); }

// Adds the operators to a namespace of torch.ops. Called by build.py, once for a namespace.
extern "C" __attribute__((visibility("default"))) void add_operators(const char* name) {
  static std::vector<torch::Library> libraries;  // an operator lives as long as its library
  libraries.emplace_back(torch::Library::FRAGMENT, name, std::nullopt, __FILE__, __LINE__);
  for (const Define define : definitions()) define(libraries.back());
}
