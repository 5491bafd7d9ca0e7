// The operators in torch.ops: each file's own definitions (operators.h), run when build.py loads
// the library.

#include "operators.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

namespace {

using Define = void (*)(torch::Library&);

// Returns the functions that define the operators of every file.
std::vector<Define>& definitions() {
  static std::vector<Define> all;
  return all;
}

bool needs_gradients(const c10::IValue& input) {
  if (input.isTensor()) return input.toTensor().requires_grad();
  if (!input.isList()) return false;
  for (const c10::IValue& each : input.toListRef()) {
    if (needs_gradients(each)) return true;
  }
  return false;
}

// Runs an operator, none of which has gradients, where no input needs them: results without them
// would train a model wrongly. backends/library.py has the same for operators in Python.
void refuse_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack) {
  if (at::GradMode::is_enabled()) {
    for (const c10::IValue& input : torch::jit::last(*stack, op.schema().arguments().size())) {
      TORCH_CHECK(!needs_gradients(input), op.operator_name().name,
                  " has no gradients, and an input needs them; call use_backend(module, TORCH) "
                  "(reference.py) for what learns, or torch.no_grad()");
    }
  }
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace

Definition::Definition(Define define) { definitions().push_back(define); }

// Adds the operators to a namespace of torch.ops. Called by build.py, once for a namespace.
extern "C" __attribute__((visibility("default"))) void add_operators(const char* name) {
  static std::vector<torch::Library> libraries;  // an operator lives as long as its library
  libraries.emplace_back(torch::Library::FRAGMENT, name, std::nullopt, __FILE__, __LINE__);
  torch::Library& library = libraries.back();
  for (const Define define : definitions()) define(library);
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& each : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(each);
    if (each.getNamespace() != name || op->hasKernelForDispatchKey(c10::DispatchKey::Autograd)) {
      continue;  // another's, or done by backends/library.py
    }
    auto refuse = torch::CppFunction::makeFromBoxedFunction<&refuse_gradients>();
    library.impl(each.name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, std::move(refuse)));
  }
}
