// The CPU operators, as one unit: reading PyTorch's headers takes longer than compiling any of the files.

#include "attention.cpp"
#include "layers.cpp"
#include "linear.cpp"
#include "quantized.cpp"
#include "rows.cpp"

// Adds them to a namespace of torch.ops, whose schemas build.py defines. Called by build.py.
extern "C" __attribute__((visibility("default"))) void add_operators(const char* name) {
  static std::vector<torch::Library> libraries;  // an operator ends with its library
  const auto add = [&](c10::DispatchKey key) -> torch::Library& {
    return libraries.emplace_back(torch::Library::IMPL, name, key, __FILE__, __LINE__);
  };
  add(c10::DispatchKey::CPU)
      .impl("w4a8", quantized::w4a8)
      .impl("w8a8", quantized::w8a8)
      .impl("linear_bf16", linear::linear_bf16)
      .impl("attention", attention::attention)
      .impl("topk", rows::topk)
      .impl("rotary", rows::rotary)
      .impl("move_rows", rows::move_rows)
      .impl("stamp", rows::stamp)
      .impl("prepare_layers", layers::prepare_layers)
      .impl("layers", layers::layers);
  add(c10::DispatchKey::CompositeExplicitAutograd)
      .impl("dot_peak", quantized::dot_peak)
      .impl("pair_peak", linear::pair_peak);
}
