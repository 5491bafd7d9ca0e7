// The recurrent layers: GatedDeltaNet, and gated short convolutions (delta.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace delta {

// The buffers of `kv_cache.LayerState`.
struct State {
  const at::Tensor &state, &inputs, &length;
};
// The fields of a `kv_cache.Window` that recurrent layers read.
struct Window {
  const at::Tensor &slots, &start, &mask;
  const std::optional<at::Tensor>& kept;
};
// The weights of `torch_backend.DeltaWeights`, in fp32; conv: [TAPS, channels].
struct Weights {
  const at::Tensor &conv, &gates, &gain;
  double eps;
  bool tiled;  // head h of values reads head h mod Hk of keys, and not head h Hk / H
};

at::Tensor delta_rule(const at::Tensor& x, const State& state, const Window& window,
                      const Weights& weights);
// `short_conv` of reference.py. conv: [TAPS, F] fp32
at::Tensor short_conv(const at::Tensor& x, const State& state, const Window& window,
                      const at::Tensor& conv);

}  // namespace delta
