// A forward pass of a model, or of a draft head, on a CPU in one call.
//
// The steps are those of model.py's modules, from the embedding to the last norm, with the products and the attention
// of the other files between them. As separate operators, the hundreds of small ones of a step cost more in dispatch,
// guards and allocations than in work. All rows are in fp32, as in the modules; keys, values and features are kept in
// bfloat16.
//
// A row's result does not depend on the other rows, bit for bit, as in the products and in attention: a norm's sum runs
// over the row in one order, everything else is computed element by element.

#include "common.h"
#include "matmul.h"
#include "weight_layout.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/softmax.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>

namespace layers {
namespace {

using Value = at::BFloat16;  // of weights, and of what is kept between passes
using Weights = c10::List<std::optional<at::Tensor>>;

constexpr int64_t GRAIN = 1 << 14;  // elements that pay for a thread's wake-up

const Value* data(const at::Tensor& t) { return t.const_data_ptr<Value>(); }
const float* rows_of(const at::Tensor& t) { return t.const_data_ptr<float>(); }

// Calls f(row) for all rows, on several threads where that pays.
template <class F> void each_row(int64_t rows, int64_t width, const F& f) {
  parallel(rows, std::max<int64_t>(1, GRAIN / width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) f(r);
  });
}

// ------------------------------------------------------------------------------------------------- weights

struct Matrix {  // of a linear layer, or a stack of them: see `Weight` in weight_layout.h
  at::Tensor weight;
  std::optional<at::Tensor> table, bias;
};
struct Layer {
  std::optional<at::Tensor> attention_norm;  // the first layer of a draft head has none
  at::Tensor ffn_norm;
  std::optional<at::Tensor> q_norm, k_norm;  // of every query and key, where the model has them
  std::optional<at::Tensor> router;          // of a mixture of experts; w13 and w2 are stacks then
  Matrix wqkv, wo, w13, w2;
  int64_t inner;  // values between w13 and w2
};
struct Prepared {
  const Prepared* self;  // the content of the tensor that owns this record
  std::vector<Layer> layers;
  int64_t heads, chosen;  // chosen: experts of a row
  bool norm;              // the shares of a row's experts add up to 1; else all experts' do
  double eps;
};

constexpr int64_t PER_LAYER = 17;  // tensors, in this order
Layer layer_of(const Weights& weights, int64_t i, int64_t inner) {
  const auto next = [&] { return weights.get(i++); };
  const auto matrix = [&] {
    const auto weight = next(), table = next(), bias = next();
    return Matrix{*weight, table, bias};
  };
  Layer layer;
  layer.attention_norm = next(), layer.wqkv = matrix(), layer.q_norm = next(), layer.k_norm = next();
  layer.wo = matrix();
  layer.ffn_norm = *next(), layer.router = next(), layer.w13 = matrix(), layer.w2 = matrix(), layer.inner = inner;
  return layer;
}

// The operator `prepare_layers`. Returns: a tensor that owns a `Prepared`.
at::Tensor prepare_layers(const Weights& weights, int64_t heads, at::IntArrayRef inner, int64_t chosen, bool norm,
                          double eps) {
  const int64_t count = int64_t(inner.size());
  TORCH_CHECK(count && count * PER_LAYER == int64_t(weights.size()), weights.size(), " tensors are not ", count,
              " layers of ", PER_LAYER);
  Prepared* prepared = new Prepared{nullptr, {}, heads, chosen, norm, eps};
  prepared->self = prepared;
  for (int64_t i = 0; i < count; i++) prepared->layers.push_back(layer_of(weights, i * PER_LAYER, inner[i]));
  return at::from_blob(prepared, {1}, [prepared](void*) { delete prepared; }, at::TensorOptions().dtype(at::kLong));
}

const Prepared& prepared_in(const at::Tensor& holder) {
  const void* at = holder.const_data_ptr();
  TORCH_CHECK(holder.nbytes() == sizeof(void*) && *static_cast<const void* const*>(at) == at,
              "a copy of prepared layers holds nothing: prepare the layers of the copied model");
  return *static_cast<const Prepared*>(at);
}

// Names the matrix of the product behind the next one, or null where it is not known.
void then_read(const Matrix* by) {
  if (by) read_next(by->weight.const_data_ptr(), by->weight.nbytes());
  else read_next(nullptr, 0);
}

// x [..., K] -> [..., n]. expert: of each row, int64, for a stack.
at::Tensor multiply(const at::Tensor& x, const Matrix& by, int64_t n, const std::optional<at::Tensor>& expert = {}) {
  RECORD_FUNCTION("gpt_eagle::linear", std::vector<c10::IValue>{});
  return matmul::matmul(x, by.weight, by.table, by.bias, n, true, expert);
}

// --------------------------------------------------------------------------------------------------- rows

// row [width] -> to [width], normed; `to` may be the row itself.
template <class T> void norm_row(const T* row, const Value* w, int64_t width, double eps, T* to) {
  constexpr int64_t SUMS = 32;  // side by side, on all processors
  float sums[SUMS] = {}, total = 0;
  int64_t i = 0;
  for (; i + SUMS <= width; i += SUMS)
    for (int64_t s = 0; s < SUMS; s++) sums[s] += widen(row[i + s]) * widen(row[i + s]);
  for (; i < width; i++) sums[0] += widen(row[i]) * widen(row[i]);
  for (float sum : sums) total += sum;
  const float scale = 1.0f / std::sqrt(total / float(width) + float(eps));
  for (i = 0; i < width; i++) {
    T normed;
    put(&normed, widen(row[i]) * scale);
    put(to + i, widen(normed) * widen(w[i]));
  }
}

// x [..., F], of fp32 or bfloat16 -> the same
at::Tensor norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  TORCH_CHECK(weight.numel() == x.size(-1), "a norm of ", weight.numel(), " features does not fit ", x.size(-1));
  RECORD_FUNCTION("gpt_eagle::rms_norm", std::vector<c10::IValue>{});
  const int64_t width = x.size(-1);
  const at::Tensor y = empty_rows(x, width, x.scalar_type());
  const Value* w = data(weight);
  fill(y, [&]<class T>(T* to) {
    const T* from = x.const_data_ptr<T>();
    each_row(x.numel() / width, width, [&](int64_t r) { norm_row(from + r * width, w, width, eps, to + r * width); });
  });
  return y;
}

// y += x, in place.
void add_to(const at::Tensor& x, at::Tensor& y) {
  RECORD_FUNCTION("gpt_eagle::add", std::vector<c10::IValue>{});
  const int64_t width = x.size(-1);
  const float* from = rows_of(x);
  float* to = y.mutable_data_ptr<float>();
  each_row(x.numel() / width, width, [&](int64_t r) {
    for (int64_t i = r * width; i < (r + 1) * width; i++) to[i] += from[i];
  });
}

// SwiGLU: gate and up [..., 2 inner], of fp32 or bfloat16, side by side -> silu(gate) * up.
at::Tensor gate(const at::Tensor& both) {
  RECORD_FUNCTION("gpt_eagle::silu", std::vector<c10::IValue>{});
  constexpr int64_t CHUNK = 256;
  const int64_t inner = both.size(-1) / 2, chunks = (inner + CHUNK - 1) / CHUNK;
  const at::Tensor y = empty_rows(both, inner, both.scalar_type());
  fill(y, [&]<class T>(T* to) {
    const T* from = both.const_data_ptr<T>();
    each_row(y.numel() / inner * chunks, 8 * CHUNK, [&](int64_t piece) {  // an exponential is worth several sums
      const int64_t r = piece / chunks, first = piece % chunks * CHUNK, n = std::min(CHUNK, inner - first);
      const T *gates = from + r * 2 * inner + first, *ups = gates + inner;
      T* out = to + r * inner + first;
      for (int64_t i = 0; i < n; i++) {
        const float g = widen(gates[i]), e = exponential(g < 0 ? g : -g);
        T silu;
        put(&silu, g * ((g < 0 ? e : 1.0f) / (1.0f + e)));
        put(out + i, widen(silu) * widen(ups[i]));
      }
    });
  });
  return y;
}

// ----------------------------------------------------------------------------------------------- feed-forward

struct Routes {  // of the rows' experts, in the router's order: a row's first, its second, the next row's first ...
  at::Tensor expert, share, rows;  // [P] int64; [P / J, J] fp32, softmax over a row's own or all; [P, F], inputs
};

// x [..., F] -> a router's scores of the experts, [..., E] fp32
at::Tensor score(const at::Tensor& x, const at::Tensor& router) {
  RECORD_FUNCTION("gpt_eagle::linear", std::vector<c10::IValue>{});
  return matmul::matmul(x, router, {}, {}, router.size(0), true, {});
}

// The best experts of every row of x [..., F]; of equal ones the first.
Routes route(const at::Tensor& x, const at::Tensor& router, int64_t chosen, bool norm) {
  const at::Tensor scores = score(x, router);  // [..., E]
  RECORD_FUNCTION("gpt_eagle::route", std::vector<c10::IValue>{});
  const int64_t experts = scores.size(-1), rows = scores.numel() / experts, width = x.size(-1);
  Routes to{at::empty({rows * chosen}, x.options().dtype(at::kLong)), at::empty({rows, chosen}, x.options()),
            at::empty({rows * chosen, width}, x.options())};
  const at::Tensor every = norm ? scores : at::softmax(scores, -1);  // PyTorch's, so that the bits are the modules'
  const float *all = rows_of(scores), *shares = rows_of(every);
  int64_t* expert = to.expert.mutable_data_ptr<int64_t>();
  float* share = to.share.mutable_data_ptr<float>();
  float* copy = to.rows.mutable_data_ptr<float>();
  each_row(rows, chosen * width, [&](int64_t r) {
    const float* of = all + r * experts;
    int64_t* best = expert + r * chosen;
    for (int64_t e = 0; e < experts; e++) {
      int64_t j = std::min(e, chosen);  // experts in the list; the last of a full one drops out
      while (j > 0 && of[e] > of[best[j - 1]]) j--;
      if (j == chosen) continue;
      std::copy_backward(best + j, best + std::min(e, chosen - 1), best + std::min(e + 1, chosen));
      best[j] = e;
    }
    for (int64_t j = 0; j < chosen; j++) {
      share[r * chosen + j] = shares[r * experts + best[j]];
      std::copy_n(rows_of(x) + r * width, width, copy + (r * chosen + j) * width);
    }
  });
  if (norm) to.share = at::softmax(to.share, -1);
  return to;
}

// y [P, F] -> [..., F] like x: the sum of each row's experts times their shares, always in the router's order.
at::Tensor merge(const at::Tensor& y, const Routes& routes, const at::Tensor& x) {
  RECORD_FUNCTION("gpt_eagle::merge", std::vector<c10::IValue>{});
  const int64_t width = x.size(-1), rows = x.numel() / width, chosen = y.size(0) / rows;
  const at::Tensor sum = empty_rows(x, width, at::kFloat);
  const float *from = rows_of(y), *share = routes.share.const_data_ptr<float>();
  float* to = sum.mutable_data_ptr<float>();
  each_row(rows, chosen * width, [&](int64_t r) {
    for (int64_t i = 0; i < width; i++) {
      float total = 0;
      for (int64_t p = r * chosen; p < (r + 1) * chosen; p++) total += from[p * width + i] * share[p];
      to[r * width + i] = total;
    }
  });
  return sum;
}

// The feed-forward layer: x [..., F] -> [..., F], without norm and residual. next: the layer behind it, or null.
at::Tensor feed_forward(const Prepared& prepared, const Layer& layer, const Layer* next, const at::Tensor& x) {
  const int64_t width = x.size(-1);
  if (!layer.router) {
    then_read(&layer.w2);
    const at::Tensor gated = gate(multiply(x, layer.w13, 2 * layer.inner));
    then_read(next ? &next->wqkv : nullptr);
    return multiply(gated, layer.w2, width);
  }
  const Routes to = route(x, *layer.router, prepared.chosen, prepared.norm);
  const at::Tensor both = multiply(to.rows, layer.w13, 2 * layer.inner, to.expert);
  return merge(multiply(gate(both), layer.w2, width, to.expert), to, x);
}

// ------------------------------------------------------------------------------------------------- layers

struct Rows {  // the inputs that all layers share
  const at::Tensor &cos, &sin, &slots, &start, &mask;
};

// Norms the queries and keys of qkv [B, T, H + 2 Hkv, E] in place, where the layer has such norms.
void norm_heads(at::Tensor& qkv, const Layer& layer, int64_t heads, int64_t kv_heads, double eps) {
  if (!layer.q_norm) return;
  RECORD_FUNCTION("gpt_eagle::rms_norm", std::vector<c10::IValue>{});
  const int64_t all = heads + 2 * kv_heads, e = qkv.size(3);
  const Value *q_weight = data(*layer.q_norm), *k_weight = data(*layer.k_norm);
  float* to = qkv.mutable_data_ptr<float>();
  each_row(qkv.numel() / (all * e), all * e, [&](int64_t r) {
    for (int64_t h = 0; h < heads + kv_heads; h++) {
      float* head = to + (r * all + h) * e;
      norm_row(head, h < heads ? q_weight : k_weight, e, eps, head);
    }
  });
}

// Rotates the queries and keys of qkv [B, T, H + 2 Hkv, E]. Writes: keys and values at their slots.
// Returns: the queries.
at::Tensor rotate_and_store(const at::Tensor& qkv, const at::Tensor& k, const at::Tensor& v, const Rows& rows) {
  RECORD_FUNCTION("gpt_eagle::rotary", std::vector<c10::IValue>{});
  const int64_t B = qkv.size(0), T = qkv.size(1), kv_heads = k.size(1), e = k.size(3);
  const int64_t heads = qkv.size(2) - 2 * kv_heads;
  at::Tensor q = at::empty({B, T, heads, e}, qkv.options());
  float* to_q = q.mutable_data_ptr<float>();
  Value *to_k = k.mutable_data_ptr<Value>(), *to_v = v.mutable_data_ptr<Value>();
  const float *cos = rows.cos.const_data_ptr<float>(), *sin = rows.sin.const_data_ptr<float>();
  const int64_t* slot = rows.slots.const_data_ptr<int64_t>();
  const float* all = rows_of(qkv);
  each_row(B * T, (heads + 2 * kv_heads) * e, [&](int64_t r) {
    const float* from = all + r * (heads + 2 * kv_heads) * e;
    for (int64_t h = 0; h < heads; h++) rotate(from + h * e, cos + r * e, sin + r * e, e, to_q + (r * heads + h) * e);
    for (int64_t h = 0; h < kv_heads; h++) {
      const int64_t at_k = r / T * k.stride(0) + h * k.stride(1) + slot[r] * k.stride(2);
      const int64_t at_v = r / T * v.stride(0) + h * v.stride(1) + slot[r] * v.stride(2);
      rotate(from + (heads + h) * e, cos + r * e, sin + r * e, e, to_k + at_k);
      for (int64_t i = 0; i < e; i++) put(to_v + at_v + i, from[(heads + kv_heads + h) * e + i]);
    }
  });
  return q;
}

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Rows& rows) {
  RECORD_FUNCTION("gpt_eagle::attention", std::vector<c10::IValue>{});
  return attention::attention(q, k, v, rows.start, rows.mask);
}

// A layer: x [B, T, F] -> [B, T, F]. h: the input of attention, where it is not the norm of x. Writes: k and v at the
// tokens' slots. next: the layer behind it, or null.
at::Tensor run_layer(const Prepared& prepared, const Layer& layer, const Layer* next, const at::Tensor& x,
                     const std::optional<at::Tensor>& h, const at::Tensor& k, const at::Tensor& v, const Rows& rows) {
  const int64_t B = x.size(0), T = x.size(1), F = x.size(2), all = prepared.heads + 2 * k.size(1), e = k.size(3);
  const at::Tensor normed = h ? *h : layer.attention_norm ? norm(x, *layer.attention_norm, prepared.eps) : x;
  then_read(&layer.wo);
  at::Tensor qkv = multiply(normed, layer.wqkv, all * e).view({B, T, all, e});
  norm_heads(qkv, layer, prepared.heads, k.size(1), prepared.eps);
  const at::Tensor q = rotate_and_store(qkv, k, v, rows);
  const at::Tensor heads = attend(q, k, v, rows);
  then_read(layer.router ? nullptr : &layer.w13);
  at::Tensor attended = multiply(heads, layer.wo, F);
  add_to(x, attended);
  at::Tensor y = feed_forward(prepared, layer, next, norm(attended, layer.ffn_norm, prepared.eps));
  add_to(attended, y);
  return y;
}

// Copies x [..., F] to the columns of y [..., whole], of fp32 or bfloat16, from `first` on.
void copy_columns(const at::Tensor& x, const at::Tensor& y, int64_t first) {
  const int64_t width = x.size(-1), whole = y.size(-1);
  const float* from = rows_of(x);
  fill(y, [&](auto* to) {
    each_row(x.numel() / width, width, [&](int64_t r) {
      for (int64_t i = 0; i < width; i++) put(to + r * whole + first + i, from[r * width + i]);
    });
  });
}

// Columns first .. first + width of x [..., F], of fp32 or bfloat16, in fp32.
at::Tensor columns_of(const at::Tensor& x, int64_t first, int64_t width) {
  const int64_t whole = x.size(-1);
  TORCH_CHECK(first >= 0 && width > 0 && first + width <= whole, "rows of ", whole, " have no ", width, " features");
  const at::Tensor y = empty_rows(x, width, at::kFloat);
  float* to = y.mutable_data_ptr<float>();
  const auto copy = [&](const auto* from) {
    each_row(y.numel() / width, width, [&](int64_t r) {
      for (int64_t i = 0; i < width; i++) to[r * width + i] = widen(from[r * whole + first + i]);
    });
  };
  if (x.scalar_type() == at::kFloat) copy(rows_of(x));
  else copy(data(x));
  return y;
}

// a [..., F] and b [..., G] -> [..., F + G], side by side.
at::Tensor side_by_side(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor y = empty_rows(a, a.size(-1) + b.size(-1), at::kFloat);
  copy_columns(a, y, 0), copy_columns(b, y, a.size(-1));
  return y;
}

// tokens [B, T] -> their rows of the weight [V, F], or of packed bytes with their table, [B, T, F]
at::Tensor embed(const at::Tensor& tokens, const at::Tensor& weight, const std::optional<at::Tensor>& table) {
  TORCH_CHECK(tokens.dim() == 2 && weight.is_contiguous(), "tokens must be [B, T], and weights contiguous");
  const int64_t F = table ? Weight(weight, table).k : weight.size(1), count = tokens.numel();
  const at::Tensor x = at::empty({tokens.size(0), tokens.size(1), F}, weight.options().dtype(at::kFloat));
  if (table) {
    blocks::read_rows(weight, *table, tokens.flatten(), x);
    return x;
  }
  const Whole token(tokens, tokens.sizes(), "tokens");
  float* to = x.mutable_data_ptr<float>();
  for (int64_t r = 0; r < count; r++) {
    const Value* from = data(weight) + within(token[r], weight.size(0), "a token") * F;
    for (int64_t i = 0; i < F; i++) to[r * F + i] = widen(from[i]);
  }
  return x;
}

struct Cache {  // the slots of the new tokens, and the slots that they see
  at::TensorList k, v;
  const at::Tensor &slots, &start, &mask;
};

// Runs x [B, T, F] through all layers. positions: [B, T]; h: as in `run_layer`, of the first. Where `aux_layers`
// ascend, copies these layers' inputs (aux hidden states) side by side to `kept` [B, T, any], from column F on. Writes:
// the cache.
at::Tensor run_layers(const Prepared& prepared, at::Tensor x, const at::Tensor& freq, double factor,
                      const at::Tensor& positions, const Cache& cache, at::IntArrayRef aux_layers, const at::Tensor& kept,
                      const std::optional<at::Tensor>& h) {
  const int64_t B = x.size(0), T = x.size(1), F = x.size(2), count = int64_t(cache.k.size()), S = cache.k[0].size(2);
  TORCH_CHECK(cache.k.size() == prepared.layers.size() && cache.v.size() == cache.k.size(), "the cache is of ", count,
              " layers, not of ", prepared.layers.size());
  TORCH_CHECK(x.scalar_type() == at::kFloat, "rows must be float32");
  TORCH_CHECK(positions.numel() == B * T && cache.slots.numel() == B * T && cache.k[0].size(0) == B,
              "a position and a slot per row, and a cache row per batch row");
  const at::Tensor to = cache.slots.contiguous();
  for (int64_t r = 0; r < B * T; r++) {
    const int64_t slot = to.const_data_ptr<int64_t>()[r];
    TORCH_CHECK(slot >= 0 && slot < S, "the cache has ", S, " slots, and no slot ", slot);
  }
  const auto [cos, sin] = rotary::angles(freq, positions, factor);
  const Rows rows{cos, sin, to, cache.start, cache.mask};
  size_t tap = 0;
  for (int64_t i = 0; i <= count; i++) {
    if (tap < aux_layers.size() && aux_layers[tap] == i) copy_columns(x, kept, int64_t(++tap) * F);
    if (i == count) break;
    const Layer* next = i + 1 < count ? &prepared.layers[i + 1] : nullptr;
    x = run_layer(prepared, prepared.layers[i], next, x, i ? std::nullopt : h, cache.k[i], cache.v[i], rows);
  }
  TORCH_CHECK(tap == aux_layers.size(), "aux_layers must ascend, from 0 to ", count, "; they are ", aux_layers);
  return x;
}

// ------------------------------------------------------------------------------------------------- a draft head

// The parts of a head besides its layers, in this order; some heads lack some. Then one norm per aux hidden state.
enum Part { EMBEDDING, EMBEDDING_TABLE, FREQ, NORM, EMBEDDING_NORM, HIDDEN_NORM, INPUT_NORM, FC, FC_TABLE, FC_BIAS, FC_NORMS };

struct Head {
  const Prepared& prepared;
  const Weights& parts;
  double factor;
  bool normed_residual;  // EAGLE-3: the residual stream begins with the normed hidden state
  int64_t inputs;        // EAGLE-3: inputs of fc

  std::optional<at::Tensor> part(int64_t i) const { return parts.get(i); }
  bool of_version_3() const { return part(HIDDEN_NORM).has_value(); }
  at::Tensor fc(const at::Tensor& x) const {
    const int64_t dim = prepared.layers[0].ffn_norm.numel();
    return multiply(x, Matrix{*part(FC), part(FC_TABLE), part(FC_BIAS)}, dim);
  }
  at::Tensor normed(const at::Tensor& x, int64_t i) const { return norm(x, *part(i), prepared.eps); }

  // The target's features, in bfloat16 -> those that `step` takes: [B, T, (1 + aux_layers) F] -> [B, T, F].
  at::Tensor fuse(const at::Tensor& features) const {
    const int64_t each = int64_t(parts.size()) - FC_NORMS, width = features.size(-1), aux_layers = std::max<int64_t>(each, 1);
    const bool fuses = of_version_3() && part(FC);
    at::Tensor x = fuses ? columns_of(features, width - inputs, inputs) : columns_of(features, 0, width);
    if (part(INPUT_NORM)) x = normed(x, INPUT_NORM);
    if (!fuses) return x;
    if (each)
      for (int64_t i = 0; i < aux_layers; i++)
        copy_columns(normed(columns_of(x, i * inputs / aux_layers, inputs / aux_layers), FC_NORMS + i), x, i * inputs / aux_layers);
    return fc(x);
  }
  // One forward pass. tokens: [B, T]; features: [B, T, F]. Writes: the cache. Returns: [B, T, F] in bfloat16.
  at::Tensor step(const at::Tensor& tokens, const at::Tensor& features, const at::Tensor& positions,
                  const Cache& cache) const {
    const at::Tensor embedded = embed(tokens, *part(EMBEDDING), part(EMBEDDING_TABLE));
    at::Tensor x = features;
    std::optional<at::Tensor> h;
    if (of_version_3()) {
      const at::Tensor hidden = normed(features, HIDDEN_NORM);
      x = normed_residual ? hidden : features;
      h = side_by_side(normed(embedded, EMBEDDING_NORM), hidden);
    } else {
      x = fc(side_by_side(embedded, features));
    }
    const at::Tensor y = run_layers(prepared, x, *part(FREQ), factor, positions, cache, {}, x, h);
    const at::Tensor out = empty_rows(y, y.size(-1), at::kBFloat16);
    copy_columns(part(NORM) ? normed(y, NORM) : y, out, 0);
    return out;
  }
};

}  // namespace

// -------------------------------------------------------------------------------------------------- operators

// `Transformer.forward` of model.py: tokens, positions, slots [B, T] -> features after the final norm, and behind them
// the inputs of the layers in aux_layers: [B, T, (1 + aux_layers) F]. Writes: k, v at the slots.
at::Tensor model(const at::Tensor& tokens, const at::Tensor& positions, const at::Tensor& holder,
                 const at::Tensor& embedding, const std::optional<at::Tensor>& embedding_table, const at::Tensor& freq,
                 const at::Tensor& final_norm, double factor, at::TensorList k, at::TensorList v, const at::Tensor& slots, const at::Tensor& start,
                 const at::Tensor& mask, at::IntArrayRef aux_layers) {
  const Prepared& prepared = prepared_in(holder);
  const at::Tensor x = embed(tokens, embedding, embedding_table);
  const at::Tensor features = empty_rows(x, (1 + int64_t(aux_layers.size())) * x.size(2), at::kBFloat16);
  const Cache cache{k, v, slots, start, mask};
  const at::Tensor y = run_layers(prepared, x, freq, factor, positions, cache, aux_layers, features, std::nullopt);
  copy_columns(norm(y, final_norm, prepared.eps), features, 0);
  return features;
}

// `EagleHead.forward` of eagle_draft.py over nodes [B, R] of a level. out: [B, R', F], outputs of the nodes before;
// parent: [B, R], the index of each node's parent among these. Writes: k, v at the slots. Returns: [B, R, F].
at::Tensor head_step(const at::Tensor& tokens, const at::Tensor& out, const at::Tensor& parent,
                     const at::Tensor& positions, const at::Tensor& holder, const Weights& parts, double factor,
                     bool normed_residual, at::TensorList k, at::TensorList v, const at::Tensor& slots,
                     const at::Tensor& start, const at::Tensor& mask) {
  TORCH_CHECK(tokens.dim() == 2 && out.dim() == 3, "tokens must be [B, R], out [B, R', F]");
  const int64_t B = tokens.size(0), R = tokens.size(1), before = out.size(1), F = out.size(2);
  const Operand<Value> of(out, {B, before, F}, "out");
  const Whole from(parent, {B, R}, "parent");
  const at::Tensor rows = at::empty({B, R, F}, out.options().dtype(at::kFloat));
  float* to = rows.mutable_data_ptr<float>();
  for (int64_t r = 0; r < B * R; r++) {
    const int64_t place = r / R * before + within(from[r], before, "a parent");
    for (int64_t i = 0; i < F; i++) to[r * F + i] = widen(of.data[place * F + i]);
  }
  const Head head{prepared_in(holder), parts, factor, normed_residual, 0};
  return head.step(tokens, rows, positions, {k, v, slots, start, mask});
}

// `EagleDrafter.extend` of eagle_draft.py. tokens: [B, R + 1]; features: [B, R, (1 + aux_layers) F]; count, length:
// [B]; hidden: [B, 1, F]; inputs: of fc. Writes: k, v from slot `length` on. Returns: hidden and length after the first
// `count` tokens.
std::tuple<at::Tensor, at::Tensor> head_extend(const at::Tensor& tokens, const at::Tensor& features,
                                               const at::Tensor& count, const at::Tensor& length,
                                               const at::Tensor& hidden, const at::Tensor& holder, const Weights& parts,
                                               double factor, bool normed_residual, int64_t inputs, at::TensorList k,
                                               at::TensorList v) {
  TORCH_CHECK(features.dim() == 3 && features.scalar_type() == at::kBFloat16 && hidden.dim() == 3,
              "features and hidden have 3 dimensions, and features are bfloat16");
  const Head head{prepared_in(holder), parts, factor, normed_residual, inputs};
  const int64_t B = features.size(0), R = features.size(1), F = hidden.size(2);
  const Whole token(tokens, {B, R + 1}, "tokens"), real(count, {B}, "count"), before(length, {B}, "length");
  const Operand<Value> held(hidden, {B, 1, F}, "hidden");
  const at::Tensor next = at::empty({B, R}, tokens.options()), total = at::empty({B}, length.options());
  const at::Tensor last = at::empty({B, 1, F}, hidden.options());
  for (int64_t b = 0; b < B; b++)
    std::copy_n(token.data + b * (R + 1) + 1, R, next.mutable_data_ptr<int64_t>() + b * R);
  const auto [slots, start, mask] = tree::causal(length, R, 0);
  const at::Tensor y = head.step(next, head.fuse(features.contiguous()), slots, {k, v, slots, start, mask});
  const Operand<Value> out(y, {B, R, F}, "the head's output");
  for (int64_t b = 0; b < B; b++) {
    const int64_t rows = within(real[b], R + 1, "a count");
    const Value* from = rows ? out.data + (b * R + rows - 1) * F : held.data + b * F;
    std::copy_n(from, F, last.mutable_data_ptr<Value>() + b * F);
    total.mutable_data_ptr<int64_t>()[b] = before[b] + rows;
  }
  return {last, total};
}

// `rms_norm` of ops/norm.py for bfloat16 weights. x: [..., F], fp32 or bfloat16; weight: [F]
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const bool known = x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat;
  TORCH_CHECK(known && weight.scalar_type() == at::kBFloat16, "x must be bfloat16 or float32, and weight bfloat16");
  return norm(x.contiguous(), weight.contiguous(), eps);
}

// `swiglu` of ops/norm.py. both: [..., 2 F], fp32 or bfloat16
at::Tensor swiglu(const at::Tensor& both) { return gate(both.contiguous()); }

}  // namespace layers
