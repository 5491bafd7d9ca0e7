// The registration of all operators, and the files that are not in products.cpp. The two units are compiled side by
// side; more units would take longer, since reading PyTorch's headers takes as long as compiling most of the files.

#include "blocks.cpp"
#include "compact.cpp"
#include "layers.cpp"
#include "lookup.cpp"
#include "rotary.cpp"
#include "threads.cpp"
#include "topk.cpp"
#include "tree.cpp"

#include <torch/library.h>

// Adds the operators to a namespace of torch.ops. Called by build.py, which defines the schemas.
extern "C" __attribute__((visibility("default"))) void add_operators(const char* name) {
  static std::vector<torch::Library> libraries;  // an operator lives as long as its library
  const auto add = [&](c10::DispatchKey key) -> torch::Library& {
    return libraries.emplace_back(torch::Library::IMPL, name, key, __FILE__, __LINE__);
  };
  add(c10::DispatchKey::CPU)
      .impl("matmul", matmul::matmul)
      .impl("attention", attention::attention)
      .impl("topk", topk::topk)
      .impl("rotary", rotary::rotary)
      .impl("move_rows", compact::move_rows)
      .impl("angles", rotary::angles)
      .impl("gumbel", sampling::gumbel)
      .impl("cut", sampling::cut)
      .impl("best", topk::best)
      .impl("widen_blocks", blocks::widen_blocks)
      .impl("pack_blocks", blocks::pack_blocks)
      .impl("read_rows", blocks::read_rows)
      .impl("rms_norm", layers::rms_norm)
      .impl("swiglu", layers::swiglu)
      .impl("prepare_layers", layers::prepare_layers)
      .impl("model", layers::model)
      .impl("head_step", layers::head_step)
      .impl("head_extend", layers::head_extend)
      .impl("next_level", tree::next_level)
      .impl("rerank", tree::rerank)
      .impl("accept", tree::accept)
      .impl("advance", tree::advance)
      .impl("place_rows", tree::place_rows)
      .impl("causal", tree::causal)
      .impl("with_times", tree::with_times)
      .impl("keep_rows", tree::keep_rows)
      .impl("lookup", lookup::lookup)
      .impl("look_up", lookup::look_up)
      .impl("add_chains", lookup::add_chains);
  add(c10::DispatchKey::CompositeExplicitAutograd)
      .impl("weight_bytes", blocks::weight_bytes)
      .impl("own_threads", own_threads)
      .impl("use_tiles", amx::use_tiles)
      .impl("tiles", amx::tiles);
}
