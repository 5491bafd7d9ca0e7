// All layers of a transformer on a CPU in one call.
//
// How it works: the steps of model.py's `Block`, layer after layer, with the products and the attention of the other
// files between them. As operators of their own, the hundreds of small ones of a step cost more in dispatch, guards and
// allocations than in work, since the weights that stream by push Python out of the caches. Results are rounded to
// bfloat16 where the modules round.
//
// A row's result does not depend on the other rows, bit for bit, as in the products and in attention: a norm's sum runs
// over the row in one order, everything else is taken element by element.

#include "kernels_cpu.h"

#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>

namespace {

using Value = at::BFloat16;
using Weights = c10::List<std::optional<at::Tensor>>;

constexpr int64_t GRAIN = 1 << 14;  // elements that pay for a thread's wake-up

const Value* data(const at::Tensor& t) { return t.const_data_ptr<Value>(); }

at::Tensor empty_rows(const at::Tensor& x, int64_t width) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = width;
  return at::empty(shape, x.options());
}

// f(row) for all rows, by several threads where that pays
template <class F> void each_row(int64_t rows, int64_t width, const F& f) {
  at::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) f(r);
  });
}

// ------------------------------------------------------------------------------------------------- weights

struct Matrix {  // of a linear layer: as model.py holds it in bfloat16, or as quantize.py packs it
  at::Tensor weight;
  std::optional<at::Tensor> scale, bias;
};
struct Layer {
  std::optional<at::Tensor> attention_norm, ffn_norm;  // the first layer of a draft head has no norm before attention
  Matrix wqkv, wo, w13, w2;
};
struct Kept {
  const Kept* self;  // what the tensor that owns it holds for everybody else
  std::vector<Layer> layers;
  int64_t heads, inner;  // inner: values between the two products of a feed-forward
  double eps;
};

constexpr int64_t PER_LAYER = 14;  // tensors, in this order
Layer layer_of(const Weights& weights, int64_t i) {
  const auto next = [&] { return weights.get(i++); };
  const auto matrix = [&] {
    const auto weight = next(), scale = next(), bias = next();
    return Matrix{*weight, scale, bias};
  };
  Layer layer;
  layer.attention_norm = next(), layer.wqkv = matrix(), layer.wo = matrix();
  layer.ffn_norm = next(), layer.w13 = matrix(), layer.w2 = matrix();
  return layer;
}

// The operator `keep_layers`: a tensor that owns a `Kept`.
at::Tensor keep_layers(const Weights& weights, int64_t heads, int64_t inner, double eps) {
  const int64_t count = int64_t(weights.size());
  TORCH_CHECK(count && count % PER_LAYER == 0, count, " tensors are no layers of ", PER_LAYER);
  Kept* kept = new Kept{nullptr, {}, heads, inner, eps};
  kept->self = kept;
  for (int64_t i = 0; i < count; i += PER_LAYER) kept->layers.push_back(layer_of(weights, i));
  return at::from_blob(kept, {1}, [kept](void*) { delete kept; }, at::TensorOptions().dtype(at::kLong));
}

const Kept& kept_in(const at::Tensor& holder) {
  const void* at = holder.const_data_ptr();
  TORCH_CHECK(holder.nbytes() == sizeof(void*) && *static_cast<const void* const*>(at) == at,
              "a copy of kept layers holds nothing: keep the layers of the copied model");
  return *static_cast<const Kept*>(at);
}

// x [..., K] -> [..., n], by the product that the weight is laid out for
at::Tensor multiply(const at::Tensor& x, const Matrix& by, int64_t n) {
  RECORD_FUNCTION("gpt_eagle::linear", std::vector<c10::IValue>{});
  if (by.weight.scalar_type() == at::kBFloat16) return cpu::linear_bf16(x, by.weight, by.bias, false, {});
  at::Tensor y = by.scale && by.scale->numel() ? cpu::w8a8(x, by.weight, *by.scale, false, {})
                                               : cpu::w4a8(x, by.weight, n, cpu::int4_group(by.weight), false, {});
  if (by.bias) {
    Value* to = y.mutable_data_ptr<Value>();
    const Value* bias = data(*by.bias);
    each_row(y.numel() / n, n, [&](int64_t r) {
      for (int64_t i = 0; i < n; i++) put(to + r * n + i, widen(to[r * n + i]) + widen(bias[i]));
    });
  }
  return y;
}

// --------------------------------------------------------------------------------------------------- rows

// x [..., F] -> the same; without a weight, x itself
at::Tensor rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps) {
  if (!weight) return x;
  RECORD_FUNCTION("gpt_eagle::rms_norm", std::vector<c10::IValue>{});
  constexpr int64_t SUMS = 32;  // side by side, whatever the processor
  const int64_t width = x.size(-1);
  at::Tensor y = empty_rows(x, width);
  const Value *from = data(x), *w = data(*weight);
  Value* to = y.mutable_data_ptr<Value>();
  each_row(x.numel() / width, width, [&](int64_t r) {
    const Value* row = from + r * width;
    float sums[SUMS] = {}, total = 0;
    int64_t i = 0;
    for (; i + SUMS <= width; i += SUMS)
      for (int64_t s = 0; s < SUMS; s++) sums[s] += widen(row[i + s]) * widen(row[i + s]);
    for (; i < width; i++) sums[0] += widen(row[i]) * widen(row[i]);
    for (float sum : sums) total += sum;
    const float scale = 1.0f / std::sqrt(total / float(width) + float(eps));
    for (i = 0; i < width; i++) {
      Value normed;
      put(&normed, widen(row[i]) * scale);
      put(to + r * width + i, widen(normed) * widen(w[i]));
    }
  });
  return y;
}

// In place: y = x + y
void add_to(const at::Tensor& x, at::Tensor& y) {
  RECORD_FUNCTION("gpt_eagle::add", std::vector<c10::IValue>{});
  const int64_t width = x.size(-1);
  const Value* from = data(x);
  Value* to = y.mutable_data_ptr<Value>();
  each_row(x.numel() / width, width, [&](int64_t r) {
    for (int64_t i = r * width; i < (r + 1) * width; i++) put(to + i, widen(from[i]) + widen(to[i]));
  });
}

// gate and up [..., 2 inner], side by side -> silu(gate) * up
at::Tensor gate(const at::Tensor& both) {
  RECORD_FUNCTION("gpt_eagle::silu", std::vector<c10::IValue>{});
  constexpr int64_t CHUNK = 256;
  const int64_t inner = both.size(-1) / 2, chunks = (inner + CHUNK - 1) / CHUNK;
  at::Tensor y = empty_rows(both, inner);
  const Value* from = data(both);
  Value* to = y.mutable_data_ptr<Value>();
  each_row(y.numel() / inner * chunks, 8 * CHUNK, [&](int64_t piece) {  // an exponential is worth several sums
    const int64_t r = piece / chunks, first = piece % chunks * CHUNK, n = std::min(CHUNK, inner - first);
    const Value *gates = from + r * 2 * inner + first, *ups = gates + inner;
    Value* out = to + r * inner + first;
    for (int64_t i = 0; i < n; i++) {
      const float g = widen(gates[i]), e = exponential(g < 0 ? g : -g);
      Value silu;
      put(&silu, g * ((g < 0 ? e : 1.0f) / (1.0f + e)));
      put(out + i, widen(silu) * widen(ups[i]));
    }
  });
  return y;
}

// ------------------------------------------------------------------------------------------------- layers

struct Rows {  // what is the same for all layers
  const at::Tensor &cos, &sin, &slots, &start, &mask;
};

// Rotates the queries and keys of qkv [B, T, H + 2 Hkv, E]. Writes: keys and values to their slots. Returns: the queries.
at::Tensor rotate_and_store(const at::Tensor& qkv, const at::Tensor& k, const at::Tensor& v, const Rows& rows) {
  RECORD_FUNCTION("gpt_eagle::rotary", std::vector<c10::IValue>{});
  const int64_t B = qkv.size(0), T = qkv.size(1), kv_heads = k.size(1), e = k.size(3);
  const int64_t heads = qkv.size(2) - 2 * kv_heads;
  at::Tensor q = at::empty({B, T, heads, e}, qkv.options());
  Value *to_q = q.mutable_data_ptr<Value>(), *to_k = k.mutable_data_ptr<Value>(), *to_v = v.mutable_data_ptr<Value>();
  const float *cos = rows.cos.const_data_ptr<float>(), *sin = rows.sin.const_data_ptr<float>();
  const int64_t* slot = rows.slots.const_data_ptr<int64_t>();
  const Value* all = data(qkv);
  each_row(B * T, (heads + 2 * kv_heads) * e, [&](int64_t r) {
    const Value* from = all + r * (heads + 2 * kv_heads) * e;
    for (int64_t h = 0; h < heads; h++) rotate(from + h * e, cos + r * e, sin + r * e, e, to_q + (r * heads + h) * e);
    for (int64_t h = 0; h < kv_heads; h++) {
      const int64_t at_k = r / T * k.stride(0) + h * k.stride(1) + slot[r] * k.stride(2);
      const int64_t at_v = r / T * v.stride(0) + h * v.stride(1) + slot[r] * v.stride(2);
      rotate(from + (heads + h) * e, cos + r * e, sin + r * e, e, to_k + at_k);
      std::copy_n(from + (heads + kv_heads + h) * e, e, to_v + at_v);
    }
  });
  return q;
}

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Rows& rows) {
  RECORD_FUNCTION("gpt_eagle::attention", std::vector<c10::IValue>{});
  return cpu::attention(q, k, v, rows.start, rows.mask);
}

// x [B, T, F] -> the same. Writes: k and v at the rows' slots.
at::Tensor run(const Kept& kept, const Layer& layer, const at::Tensor& x, const at::Tensor& k, const at::Tensor& v,
               const Rows& rows) {
  const int64_t B = x.size(0), T = x.size(1), F = x.size(2), all = kept.heads + 2 * k.size(1), e = k.size(3);
  const at::Tensor qkv = multiply(rms_norm(x, layer.attention_norm, kept.eps), layer.wqkv, all * e);
  const at::Tensor q = rotate_and_store(qkv.view({B, T, all, e}), k, v, rows);
  at::Tensor attended = multiply(attend(q, k, v, rows), layer.wo, F);
  add_to(x, attended);
  const at::Tensor both = multiply(rms_norm(attended, layer.ffn_norm, kept.eps), layer.w13, 2 * kept.inner);
  at::Tensor y = multiply(gate(both), layer.w2, F);
  add_to(attended, y);
  return y;
}

// The operator `layers`.
at::Tensor layers(const at::Tensor& x, const at::Tensor& holder, at::TensorList k, at::TensorList v, const at::Tensor& cos,
                  const at::Tensor& sin, const at::Tensor& slots, const at::Tensor& start, const at::Tensor& mask) {
  const Kept& kept = kept_in(holder);
  TORCH_CHECK(k.size() == kept.layers.size() && v.size() == k.size(), "the cache is of ", k.size(), " layers, not of ",
              kept.layers.size());
  const int64_t B = x.size(0), T = x.size(1), S = k[0].size(2), e = k[0].size(3);
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "rows must be bfloat16");
  TORCH_CHECK(cos.numel() == B * T * e && sin.numel() == B * T * e, "an angle per row and element, please");
  const at::Tensor each_cos = cos.contiguous(), each_sin = sin.contiguous(), to = slots.contiguous();
  for (int64_t r = 0; r < B * T; r++) {
    const int64_t slot = to.const_data_ptr<int64_t>()[r];
    TORCH_CHECK(slot >= 0 && slot < S, "the cache has ", S, " slots, and no slot ", slot);
  }
  const Rows rows{each_cos, each_sin, to, start, mask};
  at::Tensor y = x.contiguous();
  for (size_t i = 0; i < k.size(); i++) y = run(kept, kept.layers[i], y, k[i], v[i], rows);
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(LIBRARY, CPU, library) {
  library.impl("keep_layers", keep_layers);
  library.impl("layers", layers);
}
