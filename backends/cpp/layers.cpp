// A forward pass of a model, or of a draft head, on a CPU in one call: a list of steps is executed.
//
// 1. Lists are made in Python (steps.py; model.py and models/ for models, eagle_draft.py for heads)
//    and passed once, with their weights (`prepare_steps`). A step reads a register of rows, and
//    writes one.
// 2. `run` calls the function of each step (OPS), with the matmuls and the attention of the other
//    files between them. As separate operators, the hundreds of small ones of a pass cost more in
//    dispatch, guards and allocations than in work.
// 3. All rows are in fp32, as in Python; keys, values and features are kept in bfloat16.
//
// A row's result does not depend on the other rows, bit for bit, as in matmuls and in attention: a
// norm's sum runs over the row in one order, everything else is computed element by element.

#include "attention.h"
#include "blocks.h"
#include "delta.h"
#include "exponential.h"
#include "kv_codes.h"
#include "matmul.h"
#include "numbers.h"
#include "operands.h"
#include "operators.h"
#include "rotary.h"
#include "threads.h"
#include "tree.h"
#include "weight_layout.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/softmax.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace layers {
namespace {

using Value = at::BFloat16;  // of weights, and of what is kept between passes
using Weights = c10::List<std::optional<at::Tensor>>;

constexpr int64_t GRAIN = 1 << 14;  // elements that pay for a thread's wake-up

const Value* data(const at::Tensor& t) { return t.const_data_ptr<Value>(); }
const float* rows_of(const at::Tensor& t) { return t.const_data_ptr<float>(); }

// ----------------------------------------------------------------------------------------- weights

struct Matrix {  // of a linear layer, or a stack of them: see `Weight` in weight_layout.h
  at::Tensor weight;
  std::optional<at::Tensor> table, bias;
};

// Names the weight of the product behind the next one, or null where it is not known.
void then_read(const at::Tensor* weight) {
  if (weight) read_next(weight->const_data_ptr(), weight->nbytes());
  else read_next(nullptr, 0);
}

// x [..., K] -> [..., n]. expert: of each row, int64, for a stack.
at::Tensor multiply(const at::Tensor& x, const Matrix& by, int64_t n,
                    const std::optional<at::Tensor>& expert = {}) {
  RECORD_FUNCTION("gpt_eagle::linear", std::vector<c10::IValue>{});
  return matmul::matmul(x, by.weight, by.table, by.bias, n, true, expert);
}

// -------------------------------------------------------------------------------------------- rows

// row [width] -> to [width], normed; `to` may be the row itself. w: [width], in bfloat16 or fp32
template <class T, class W>
void norm_row(const T* row, const W* w, int64_t width, double eps, T* to) {
  const float scale = 1.0f / std::sqrt(sum_of_squares(row, width) / float(width) + float(eps));
  for (int64_t i = 0; i < width; i++) {
    T normed;
    put(&normed, widen(row[i]) * scale);
    put(to + i, widen(normed) * widen(w[i]));
  }
}

// Calls f(weights of a norm), which are in bfloat16, or in fp32 where they count from one.
template <class F>
void with_gain(const at::Tensor& gain, const F& f) {
  if (gain.scalar_type() == at::kFloat)
    f(rows_of(gain));
  else
    f(data(gain));
}

// x [..., F], of fp32 or bfloat16 -> the same; a shorter gain norms each part of a row
at::Tensor norm(const at::Tensor& x, const at::Tensor& gain, double eps) {
  const int64_t width = gain.numel();
  TORCH_CHECK(x.size(-1) % width == 0, "a norm of ", width, " features does not fit ", x.size(-1));
  RECORD_FUNCTION("gpt_eagle::rms_norm", std::vector<c10::IValue>{});
  const at::Tensor y = empty_rows(x, x.size(-1), x.scalar_type());
  with_gain(gain, [&](const auto* w) {
    fill(y, [&]<class T>(T* to) {
      const T* from = x.const_data_ptr<T>();
      each_row(x.numel() / width, GRAIN / width,
               [&](int64_t r) { norm_row(from + r * width, w, width, eps, to + r * width); });
    });
  });
  return y;
}

// x times one number
at::Tensor scale(const at::Tensor& x, double factor) {
  const at::Tensor y = at::empty(x.sizes(), x.options());
  const int64_t width = x.size(-1);
  const float* from = rows_of(x);
  float* to = y.mutable_data_ptr<float>();
  each_row(x.numel() / width, GRAIN / width, [&](int64_t r) {
    for (int64_t i = r * width; i < (r + 1) * width; i++) to[i] = from[i] * float(factor);
  });
  return y;
}

// y += x, in place.
void add_to(const at::Tensor& x, at::Tensor& y) {
  RECORD_FUNCTION("gpt_eagle::add", std::vector<c10::IValue>{});
  const int64_t width = x.size(-1);
  const float* from = rows_of(x);
  float* to = y.mutable_data_ptr<float>();
  each_row(x.numel() / width, GRAIN / width, [&](int64_t r) {
    for (int64_t i = r * width; i < (r + 1) * width; i++) to[i] += from[i];
  });
}

enum class Activation { SILU, GELU_TANH };

// Returns the x of `x / (1 + e^-x)`, by which the activation multiplies its argument.
inline float logit_of(Activation activation, float x) {
  constexpr float TWICE_ROOT = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  return activation == Activation::SILU ? x : TWICE_ROOT * (x + 0.044715f * x * x * x);
}

// gate and up [..., 2 inner], of fp32 or bfloat16, side by side -> f(gate, up)
template <class F>
at::Tensor gate_by(const at::Tensor& both, const F& f) {
  RECORD_FUNCTION("gpt_eagle::gate", std::vector<c10::IValue>{});
  constexpr int64_t CHUNK = 256;
  const int64_t inner = both.size(-1) / 2, chunks = (inner + CHUNK - 1) / CHUNK;
  const at::Tensor y = empty_rows(both, inner, both.scalar_type());
  fill(y, [&]<class T>(T* to) {
    const T* from = both.const_data_ptr<T>();
    // an exponential is worth several sums
    each_row(y.numel() / inner * chunks, GRAIN / (8 * CHUNK), [&](int64_t piece) {
      const int64_t r = piece / chunks, first = piece % chunks * CHUNK;
      const int64_t n = std::min(CHUNK, inner - first);
      const T *gates = from + r * 2 * inner + first, *ups = gates + inner;
      T* out = to + r * inner + first;
      for (int64_t i = 0; i < n; i++) f(widen(gates[i]), widen(ups[i]), out + i);
    });
  });
  return y;
}

// Returns 1 / (1 + e^-x).
inline float sigmoid(float x) {
  const float e = exponential(x < 0 ? x : -x);
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}

// activation(gate) * up
template <Activation A>
at::Tensor gate(const at::Tensor& both) {
  return gate_by(both, []<class T>(float g, float up, T* to) {
    T activated;
    put(&activated, g * sigmoid(logit_of(A, g)));
    put(to, widen(activated) * up);
  });
}

// `clamped_swiglu` of reference.py
at::Tensor clamped_gate(const at::Tensor& both, float alpha, float limit) {
  return gate_by(both, [=]<class T>(float g, float up, T* to) {
    const float least = std::min(g, limit);
    const float within = std::max(std::min(up, limit), -limit);
    put(to, least * sigmoid(alpha * least) * (within + 1));
  });
}

// ------------------------------------------------------------------------------------ feed-forward

struct Routes {  // of the rows' experts, in the router's order: a row's first, its second, the next
                 // row's first ...
  at::Tensor expert, share,
      rows;  // [P] int64; [P / J, J] fp32, softmax over a row's own or all; [P, F], inputs
};

// x [..., F] -> a router's scores of the experts, [..., E] fp32
at::Tensor score(const at::Tensor& x, const at::Tensor& router,
                 const std::optional<at::Tensor>& bias) {
  RECORD_FUNCTION("gpt_eagle::linear", std::vector<c10::IValue>{});
  return matmul::matmul(x, router, {}, bias, router.size(0), true, {});
}

// The best experts of every row of x [..., F] by scores [..., E]; of equal ones the first.
// every: what the shares are taken of, [..., E]
Routes route(const at::Tensor& x, const at::Tensor& scores, const at::Tensor& every,
             int64_t chosen) {
  RECORD_FUNCTION("gpt_eagle::route", std::vector<c10::IValue>{});
  const int64_t experts = scores.size(-1), rows = scores.numel() / experts, width = x.size(-1);
  Routes to{at::empty({rows * chosen}, x.options().dtype(at::kLong)),
            at::empty({rows, chosen}, x.options()), at::empty({rows * chosen, width}, x.options())};
  const float *all = rows_of(scores), *shares = rows_of(every);
  int64_t* expert = to.expert.mutable_data_ptr<int64_t>();
  float* share = to.share.mutable_data_ptr<float>();
  float* copy = to.rows.mutable_data_ptr<float>();
  each_row(rows, GRAIN / (chosen * width), [&](int64_t r) {
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
  return to;
}

// Softmaxes are PyTorch's, so that the bits are the modules'. factor: of each expert's share, [E]
Routes route_by_softmax(const at::Tensor& x, const at::Tensor& scores, int64_t chosen, bool norm,
                        const std::optional<at::Tensor>& factor) {
  Routes to = route(x, scores, norm ? scores : at::softmax(scores, -1), chosen);
  if (norm) to.share = at::softmax(to.share, -1);
  if (factor) {
    const int64_t* expert = to.expert.const_data_ptr<int64_t>();
    float* shares = to.share.mutable_data_ptr<float>();
    for (int64_t p = 0; p < to.share.numel(); p++) shares[p] *= widen(data(*factor)[expert[p]]);
  }
  return to;
}

// Shares are sigmoids of the scores; a correction, [E] fp32, is added to choose by.
Routes route_by_sigmoid(const at::Tensor& x, const at::Tensor& scores, int64_t chosen, bool norm,
                        const at::Tensor& correction, float factor, float eps) {
  const at::Tensor every = scores.sigmoid();
  Routes to = route(x, every.add(correction), every, chosen);
  float* shares = to.share.mutable_data_ptr<float>();
  for (int64_t r = 0; r < to.share.size(0); r++, shares += chosen) {
    float total = 0;
    for (int64_t j = 0; j < chosen; j++) total += shares[j];
    total += eps;
    for (int64_t j = 0; j < chosen; j++) shares[j] = (norm ? shares[j] / total : shares[j]) * factor;
  }
  return to;
}

// y [P, F] -> [..., F] like x: the sum of each row's experts times their shares, always in the
// router's order.
at::Tensor merge(const at::Tensor& y, const Routes& routes, const at::Tensor& x) {
  RECORD_FUNCTION("gpt_eagle::merge", std::vector<c10::IValue>{});
  const int64_t width = x.size(-1), rows = x.numel() / width, chosen = y.size(0) / rows;
  const at::Tensor sum = empty_rows(x, width, at::kFloat);
  const float *from = rows_of(y), *share = routes.share.const_data_ptr<float>();
  float* to = sum.mutable_data_ptr<float>();
  each_row(rows, GRAIN / (chosen * width), [&](int64_t r) {
    for (int64_t i = 0; i < width; i++) {
      float total = 0;
      for (int64_t p = r * chosen; p < (r + 1) * chosen; p++)
        total += from[p * width + i] * share[p];
      to[r * width + i] = total;
    }
  });
  return sum;
}

// --------------------------------------------------------------------------------------- attention

struct Cache {  // a layer each; the slots of the new tokens, and the slots that they see
  at::TensorList k, v;  // of a recurrent layer its inputs and its state
  const at::Tensor &slots, &start, &mask;
  at::TensorList lengths = {};  // of states, where a layer is recurrent
  std::optional<at::Tensor> kept = std::nullopt;
};
struct Window {  // what the layers of one window see
  int64_t size;  // tokens; 0: all
  at::Tensor mask;
  std::optional<at::Tensor> first;
};

// Returns the mask and the first slots of a layer that sees the last `size` tokens:
// kv_cache.sliding
Window sliding(const Cache& cache, int64_t size) {
  const at::Tensor all = cache.mask.contiguous(), begin = cache.start.contiguous();
  const int64_t B = all.size(0), T = all.size(1), W = all.size(2);
  Window window{size, at::empty(all.sizes(), all.options()),
                at::empty({B, T}, begin.options().dtype(at::kLong))};
  const bool* seen = all.const_data_ptr<bool>();
  bool* mask = window.mask.mutable_data_ptr<bool>();
  int64_t* first = window.first->mutable_data_ptr<int64_t>();
  for (int64_t r = 0; r < B * T; r++) {
    int64_t count = 0;  // tokens of the path in the window, from the row's own back
    for (int64_t w = W - 1; w >= 0; w--) {
      mask[r * W + w] = seen[r * W + w] && count < size;
      count += seen[r * W + w];
    }
    const int64_t end = begin.const_data_ptr<int64_t>()[r / T] + count;
    first[r] = std::max<int64_t>(0, end - size);
  }
  return window;
}

// Norms the queries and keys of qkv [B, T, H + 2 Hkv, E] in place, and with a third gain the values.
void norm_heads(at::Tensor& qkv, int64_t heads, int64_t kv_heads,
                const std::optional<at::Tensor> (&gains)[3], double eps) {
  RECORD_FUNCTION("gpt_eagle::rms_norm", std::vector<c10::IValue>{});
  const int64_t all = heads + 2 * kv_heads, e = qkv.size(3);
  const int64_t normed = gains[2] ? all : heads + kv_heads;
  float* to = qkv.mutable_data_ptr<float>();
  with_gain(*gains[0], [&]<class W>(const W* of_q) {
    const W* of_k = gains[1]->const_data_ptr<W>();
    const W* of_v = gains[2] ? gains[2]->const_data_ptr<W>() : nullptr;
    each_row(qkv.numel() / (all * e), GRAIN / (all * e), [&](int64_t r) {
      for (int64_t h = 0; h < normed; h++) {
        float* head = to + (r * all + h) * e;
        norm_row(head, h < heads ? of_q : h < heads + kv_heads ? of_k : of_v, e, eps, head);
      }
    });
  });
}

// x [e] -> its row of the cache, a key or a value
inline void keep(const float* x, int64_t e, Value* row) {
  for (int64_t i = 0; i < e; i++) put(row + i, x[i]);
}
inline void keep(const float* x, int64_t e, int8_t* row) { kv_encode(x, e, row); }

// Rotates the queries and keys of qkv [B, T, H + 2 Hkv, E]. Writes: keys and values at their slots,
// of type T. Returns: the queries. kv_heads: 0 leaves the cache alone
template <class T>
at::Tensor rotate_and_store(const at::Tensor& qkv, int64_t kv_heads, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& slots,
                            const std::tuple<at::Tensor, at::Tensor>& rope) {
  RECORD_FUNCTION("gpt_eagle::rotary", std::vector<c10::IValue>{});
  const int64_t B = qkv.size(0), count = qkv.size(1), e = qkv.size(3);
  const int64_t heads = qkv.size(2) - 2 * kv_heads, turned = std::get<0>(rope).size(-1);
  TORCH_CHECK(turned <= e, "RoPE turns ", turned, " elements of heads of ", e);
  at::Tensor q = at::empty({B, count, heads, e}, qkv.options());
  float* to_q = q.mutable_data_ptr<float>();
  T *to_k = k.mutable_data_ptr<T>(), *to_v = v.mutable_data_ptr<T>();
  const float *cos = rows_of(std::get<0>(rope)), *sin = rows_of(std::get<1>(rope));
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const float* all = rows_of(qkv);
  each_row(B * count, GRAIN / ((heads + 2 * kv_heads) * e), [&](int64_t r) {
    const float* from = all + r * (heads + 2 * kv_heads) * e;
    std::vector<float> key(e);
    for (int64_t h = 0; h < heads; h++)
      rotate(from + h * e, cos + r * turned, sin + r * turned, turned, e,
             to_q + (r * heads + h) * e);
    for (int64_t h = 0; h < kv_heads; h++) {
      const int64_t b = r / count;
      const int64_t at_k = b * k.stride(0) + h * k.stride(1) + slot[r] * k.stride(2);
      const int64_t at_v = b * v.stride(0) + h * v.stride(1) + slot[r] * v.stride(2);
      rotate(from + (heads + h) * e, cos + r * turned, sin + r * turned, turned, e, key.data());
      keep(key.data(), e, to_k + at_k);
      keep(from + (heads + kv_heads + h) * e, e, to_v + at_v);
    }
  });
  return q;
}

// qkv [B, T, (2 H + 2 Hkv) E], with a gate behind each query -> without; the gates, [B, T, H E].
std::array<at::Tensor, 2> split_gate(const at::Tensor& qkv, int64_t heads, int64_t e) {
  const int64_t width = qkv.size(-1), inner = heads * e;
  TORCH_CHECK(width > 2 * inner, "rows of ", width, " have no ", heads, " gates");
  const at::Tensor rest = empty_rows(qkv, width - inner, at::kFloat);
  const at::Tensor gates = empty_rows(qkv, inner, at::kFloat);
  const float* from = rows_of(qkv);
  float *to = rest.mutable_data_ptr<float>(), *to_gates = gates.mutable_data_ptr<float>();
  each_row(qkv.numel() / width, GRAIN / width, [&](int64_t r) {
    const float* row = from + r * width;
    float* y = to + r * (width - inner);
    for (int64_t h = 0; h < heads; h++) {
      std::copy_n(row + 2 * h * e, e, y + h * e);
      std::copy_n(row + (2 * h + 1) * e, e, to_gates + r * inner + h * e);
    }
    std::copy_n(row + 2 * inner, width - 2 * inner, y + inner);
  });
  return {rest, gates};
}

// qkv [B, T, H + 2 Hkv, E] -> the same, with the even ones of the first `turned` elements of each of
// the first `heads` before the odd ones.
at::Tensor split_pairs(const at::Tensor& qkv, int64_t heads, int64_t turned) {
  const int64_t all = qkv.size(2), e = qkv.size(3), half = turned / 2;
  TORCH_CHECK(heads <= all && turned <= e, "RoPE turns ", turned, " elements of heads of ", e);
  const at::Tensor y = qkv.clone();
  const float* from = rows_of(qkv);
  float* to = y.mutable_data_ptr<float>();
  each_row(qkv.numel() / (all * e), GRAIN / (all * e), [&](int64_t r) {
    for (int64_t h = r * all; h < r * all + heads; h++)
      for (int64_t i = 0; i < half; i++) {
        to[h * e + i] = from[h * e + 2 * i];
        to[h * e + half + i] = from[h * e + 2 * i + 1];
      }
  });
  return y;
}

// x [..., F] times the sigmoid of the gate, [..., F] or [..., 1].
at::Tensor gate_output(const at::Tensor& x, const at::Tensor& gate) {
  const int64_t width = x.size(-1), each = gate.size(-1);
  TORCH_CHECK((each == 1 || each == width) && gate.numel() * width == x.numel() * each,
              "a gate must have the size of the output, or one number for each row");
  const at::Tensor y = at::empty(x.sizes(), x.options());
  const float *from = rows_of(x), *gates = rows_of(gate);
  float* to = y.mutable_data_ptr<float>();
  each_row(x.numel() / width, GRAIN / width, [&](int64_t r) {
    for (int64_t i = 0; i < width; i++) {
      const float g = gates[each == 1 ? r : r * width + i], e = exponential(g < 0 ? g : -g);
      to[r * width + i] = from[r * width + i] * ((g < 0 ? e : 1.0f) / (1.0f + e));
    }
  });
  return y;
}

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Cache& cache,
                  const Window& window, double scale, const std::optional<at::Tensor>& sinks) {
  RECORD_FUNCTION("gpt_eagle::attention", std::vector<c10::IValue>{});
  return attention::attention(q, k, v, cache.start, window.mask, window.first, scale, sinks);
}

// ----------------------------------------------------------------------------------------- columns

// Copies x [..., F] to the columns of y [..., whole], of fp32 or bfloat16, from `first` on.
void copy_columns(const at::Tensor& x, const at::Tensor& y, int64_t first) {
  const int64_t width = x.size(-1), whole = y.size(-1);
  const float* from = rows_of(x);
  fill(y, [&](auto* to) {
    each_row(x.numel() / width, GRAIN / width, [&](int64_t r) {
      for (int64_t i = 0; i < width; i++) put(to + r * whole + first + i, from[r * width + i]);
    });
  });
}

// Columns first .. first + width of x [..., F], of fp32 or bfloat16, in fp32.
at::Tensor columns_of(const at::Tensor& x, int64_t first, int64_t width) {
  const int64_t whole = x.size(-1);
  TORCH_CHECK(first >= 0 && width > 0 && first + width <= whole, "rows of ", whole, " have no ",
              width, " features");
  const at::Tensor y = empty_rows(x, width, at::kFloat);
  float* to = y.mutable_data_ptr<float>();
  const auto copy = [&](const auto* from) {
    each_row(y.numel() / width, GRAIN / width, [&](int64_t r) {
      for (int64_t i = 0; i < width; i++) to[r * width + i] = widen(from[r * whole + first + i]);
    });
  };
  if (x.scalar_type() == at::kFloat)
    copy(rows_of(x));
  else
    copy(data(x));
  return y;
}

// The columns of x from `first` on.
at::Tensor columns_from(const at::Tensor& x, int64_t first) {
  return columns_of(x, first, x.size(-1) - first);
}

// a [..., F] and b [..., G] -> [..., F + G], side by side.
at::Tensor side_by_side(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor y = empty_rows(a, a.size(-1) + b.size(-1), at::kFloat);
  copy_columns(a, y, 0);
  copy_columns(b, y, a.size(-1));
  return y;
}

// tokens [B, T] -> their rows of the weight [V, F], or of packed blocks with their table, [B, T, F]
at::Tensor embed(const at::Tensor& tokens, const at::Tensor& weight,
                 const std::optional<at::Tensor>& table) {
  TORCH_CHECK(tokens.dim() == 2 && weight.is_contiguous(),
              "tokens must be [B, T], and weights contiguous");
  const int64_t F = table ? Weight(weight, table).k : weight.size(1);
  const int64_t count = tokens.numel();
  const at::Tensor x =
      at::empty({tokens.size(0), tokens.size(1), F}, weight.options().dtype(at::kFloat));
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

// ---------------------------------------------------------------------------------------- the list

// In the order of REGISTERS in layers.py.
enum Register { STREAM, H, EMBEDDED, FEATURES, NORMED, GATE, SHARED, PER_LAYER, REGISTERS };

struct Machine;
struct Step {  // operands: what steps.py beside this says of each kind
  std::string op;
  at::Tensor (*run)(Machine&, const Step&);
  Register source, to;
  int64_t layer;  // -1: before the first
  int64_t counts[4];
  double numbers[2];
  std::optional<at::Tensor> weights[3];
  const at::Tensor* next = nullptr;  // the weight of the next projection, where it is known

  const at::Tensor& weight(int i = 0) const { return *weights[i]; }
};

struct Program {        // steps, and what a pass begins with
  const Program* self;  // the content of the tensor that owns this record
  std::vector<Step> steps;
  int64_t layers;
  int64_t with_slots;  // a layer whose cache has slots
  at::Tensor embedding;
  std::optional<at::Tensor> embedding_table;
  double embedding_scale;
  std::vector<at::Tensor> freqs;
  std::vector<double> factors;
};

// Lets every projection know the one behind it, whose weight may be fetched meanwhile. Experts are
// known only when they are chosen.
void link_projections(std::vector<Step>& steps) {
  const at::Tensor* next = nullptr;
  for (int64_t i = int64_t(steps.size()) - 1; i >= 0; i--) {
    Step& step = steps[i];
    const bool is_projection = step.op == "project";
    const bool is_mixture = is_projection && step.counts[1];
    if (is_projection && !is_mixture) {
      step.next = next;
      next = &step.weight();
    }
    if (is_mixture || step.op == "route") next = nullptr;
  }
}

// Returns the program in a tensor of `prepare_steps`.
const Program& program_in(const at::Tensor& holder) {
  const void* at = holder.const_data_ptr();
  TORCH_CHECK(holder.nbytes() == sizeof(void*) && *static_cast<const void* const*>(at) == at,
              "a copy of prepared layers holds nothing: prepare the layers of the copied model");
  return *static_cast<const Program*>(at);
}

// ------------------------------------------------------------------------------------- the machine

struct Machine {
  std::optional<at::Tensor> rows[REGISTERS];  // [B, T, F] each
  at::Tensor tokens;                          // [B, T] int64

  explicit Machine(const Program& program) : program(program) {}

  // Makes the angles, and checks the operands of a pass over a cache. positions: [B, T]
  void use(const Cache& cache, const at::Tensor& positions, int64_t B, int64_t T) {
    const int64_t count = int64_t(cache.k.size());
    TORCH_CHECK(count == program.layers && int64_t(cache.v.size()) == count, "the cache is of ",
                count, " layers, not of ", program.layers);
    TORCH_CHECK(
        positions.numel() == B * T && cache.slots.numel() == B * T && cache.k[0].size(0) == B,
        "a position and a slot per row, and a cache row per batch row");
    const int64_t S = cache.k[program.with_slots].size(2);
    slots = cache.slots.contiguous();
    for (int64_t r = 0; r < B * T; r++) {
      const int64_t slot = slots.const_data_ptr<int64_t>()[r];
      TORCH_CHECK(slot >= 0 && slot < S, "the cache has ", S, " slots, and no slot ", slot);
    }
    for (size_t i = 0; i < program.freqs.size(); i++)
      ropes.push_back(rotary::angles(program.freqs[i], positions, program.factors[i]));
    this->cache = &cache;
    windows.push_back({0, cache.mask, std::nullopt});
  }

  // Runs all steps. Where `aux_layers` ascend, copies these layers' inputs (aux hidden states) side
  // by side to `kept` [B, T, any], from column F on. Writes: the cache. Returns: the last result,
  // H.
  const at::Tensor& run(at::IntArrayRef aux_layers = {}, const at::Tensor* kept = nullptr) {
    size_t tap = 0;
    int64_t begun = -1;  // layers, and what is behind them
    for (const Step& step : program.steps) {
      if (step.layer > begun && tap < aux_layers.size() && aux_layers[tap] == step.layer) {
        const at::Tensor& stream = *rows[STREAM];
        copy_columns(stream, *kept, int64_t(++tap) * stream.size(-1));
      }
      begun = step.layer;
      rows[step.to] = step.run(*this, step);
    }
    TORCH_CHECK(tap == aux_layers.size(), "aux_layers must ascend, from 0 to ", program.layers,
                "; they are ", aux_layers);
    return at(H);
  }

  const Program& program;
  const Cache* cache = nullptr;
  at::Tensor slots;
  std::vector<std::tuple<at::Tensor, at::Tensor>> ropes;  // cosines and sines
  std::vector<Window> windows;
  Routes routes;

  const at::Tensor& at(Register of) const {
    TORCH_CHECK(rows[of] && rows[of]->defined(),
                "a step reads a register that no step has written");
    return *rows[of];
  }

  const at::Tensor& source(const Step& step) const { return at(step.source); }

  // Takes a register, for a step that works in place. What another register still holds is copied.
  at::Tensor take(Register of) {
    at::Tensor x = at(of);
    rows[of].reset();
    return x.use_count() > 1 ? x.clone() : x;
  }

  at::Tensor project(const Step& step) {
    const bool is_mixture = step.counts[1] > 0;
    then_read(step.next);
    const Matrix by{step.weight(0), step.weights[1], step.weights[2]};
    return multiply(source(step), by, step.counts[0],
                    is_mixture ? std::optional<at::Tensor>(routes.expert) : std::nullopt);
  }

  at::Tensor norm_part(const Step& step) {
    const at::Tensor& x = source(step);
    const int64_t width = x.size(-1) / step.counts[1], first = step.counts[0] * width;
    const at::Tensor y = x.clone();
    copy_columns(norm(columns_of(x, first, width), step.weight(), step.numbers[0]), y, first);
    return y;
  }

  // Returns [B, T, H + 2 Hkv, E] of the result of a projection.
  at::Tensor as_heads(const at::Tensor& x, const Step& step) {
    const int64_t all = step.counts[0] + 2 * step.counts[1], e = step.counts[2];
    TORCH_CHECK(x.size(-1) == all * e || x.dim() == 4, "rows of ", x.size(-1), " are not ", all,
                " heads");
    return x.view({x.size(0), x.size(1), all, e});
  }

  // Works in place.
  at::Tensor head_norm(const Step& step) {
    at::Tensor qkv = as_heads(take(step.source), step);
    norm_heads(qkv, step.counts[0], step.counts[1], step.weights, step.numbers[0]);
    return qkv;
  }

  at::Tensor rotate(const Step& step) {
    const at::Tensor &k = cache->k[step.layer], &v = cache->v[step.layer];
    const int64_t kv_heads = step.counts[1];
    const bool coded = k.scalar_type() == at::kChar;
    const int64_t width = coded ? kv_row_bytes(step.counts[2]) : step.counts[2];
    TORCH_CHECK(k.size(3) == width && v.sizes() == k.sizes() &&
                    (!kv_heads || k.size(1) == kv_heads),
                "the cache has other heads than the layer");
    const auto store = coded ? rotate_and_store<int8_t> : rotate_and_store<Value>;
    return store(as_heads(source(step), step), kv_heads, k, v, slots, ropes.at(step.counts[3]));
  }

  at::Tensor attend_by(const Step& step) {
    const int64_t size = step.counts[0];
    auto at = std::find_if(windows.begin(), windows.end(),
                           [&](const Window& w) { return w.size == size; });
    if (at == windows.end()) {
      windows.push_back(sliding(*cache, size));
      at = windows.end() - 1;
    }
    const at::Tensor &k = cache->k[step.layer], &v = cache->v[step.layer];
    return attend(source(step), k, v, *cache, *at, step.numbers[0], step.weights[0]);
  }

  at::Tensor split(const Step& step) {
    auto [rest, gates] = split_gate(source(step), step.counts[0], step.counts[1]);
    rows[GATE] = gates;
    return rest;
  }

  at::Tensor recur(const Step& step) {
    TORCH_CHECK(cache->lengths.size() == cache->k.size(), "the cache has no states");
    const at::Tensor &inputs = cache->k[step.layer], &state = cache->v[step.layer];
    const delta::State kept{state, inputs, cache->lengths[step.layer]};
    const delta::Window window{cache->slots, cache->start, cache->mask, cache->kept};
    const at::Tensor& x = source(step);
    if (step.op == "short_conv") return delta::short_conv(x, kept, window, step.weight(0));
    return delta::delta_rule(x, kept, window,
                             {step.weight(0), step.weight(1), step.weight(2), step.numbers[0],
                              step.counts[0] != 0});
  }

  // Works in place.
  at::Tensor add(const Step& step) {
    at::Tensor x = take(step.source);
    add_to(at(Register(step.counts[0])), x);
    return x;
  }

  at::Tensor choose(const Step& step) {
    const int64_t chosen = step.counts[0];
    const bool norm = step.counts[1], by_sigmoid = step.counts[2];
    const auto bias = by_sigmoid ? std::nullopt : step.weights[1];
    at::Tensor scores = score(source(step), step.weight(), bias);  // [..., E]
    if (!by_sigmoid && step.numbers[0] != 1) scores = scale(scores, step.numbers[0]);
    routes = by_sigmoid ? route_by_sigmoid(at(H), scores, chosen, norm, step.weight(1),
                                           float(step.numbers[0]), float(step.numbers[1]))
                        : route_by_softmax(at(H), scores, chosen, norm, step.weights[2]);
    return routes.rows;
  }
};

// What every kind of step computes from its source register.
const std::pair<const char*, at::Tensor (*)(Machine&, const Step&)> OPS[] = {
    {"norm", [](auto& m, auto& s) { return norm(m.source(s), s.weight(), s.numbers[0]); }},
    {"part_norm", [](auto& m, auto& s) { return m.norm_part(s); }},
    {"head_norm", [](auto& m, auto& s) { return m.head_norm(s); }},
    {"project", [](auto& m, auto& s) { return m.project(s); }},
    {"rotate", [](auto& m, auto& s) { return m.rotate(s); }},
    {"attend", [](auto& m, auto& s) { return m.attend_by(s); }},
    {"add", [](auto& m, auto& s) { return m.add(s); }},
    {"silu", [](auto& m, auto& s) { return gate<Activation::SILU>(m.source(s)); }},
    {"gelu_tanh", [](auto& m, auto& s) { return gate<Activation::GELU_TANH>(m.source(s)); }},
    {"clamped_swiglu",
     [](auto& m, auto& s) { return clamped_gate(m.source(s), s.numbers[0], s.numbers[1]); }},
    {"route", [](auto& m, auto& s) { return m.choose(s); }},
    {"merge", [](auto& m, auto& s) { return merge(m.source(s), m.routes, m.at(STREAM)); }},
    {"copy", [](auto& m, auto& s) { return m.source(s); }},
    {"columns", [](auto& m, auto& s) { return columns_from(m.source(s), s.counts[0]); }},
    {"beside",
     [](auto& m, auto& s) { return side_by_side(m.source(s), m.at(Register(s.counts[0]))); }},
    {"keys_as_values",
     [](auto& m, auto& s) {
       return side_by_side(m.source(s), columns_from(m.source(s), s.counts[0]));
     }},
    {"split_gate", [](auto& m, auto& s) { return m.split(s); }},
    {"split_pairs",
     [](auto& m, auto& s) {
       return split_pairs(m.as_heads(m.source(s), s), s.counts[0] + s.counts[1], s.counts[3]);
     }},
    {"gate_output", [](auto& m, auto& s) { return gate_output(m.source(s), m.at(GATE)); }},
    {"gate_per_layer",
     [](auto& m, auto& s) {
       const at::Tensor own = columns_of(m.at(PER_LAYER), s.layer * s.counts[0], s.counts[0]);
       return gate<Activation::GELU_TANH>(side_by_side(m.source(s), own));
     }},
    {"scale", [](auto& m, auto& s) { return scale(m.source(s), rows_of(s.weight())[0]); }},
    {"look_up",
     [](auto& m, auto& s) {
       return scale(embed(m.tokens, s.weight(0), s.weights[1]), s.numbers[0]);
     }},
    {"delta_rule", [](auto& m, auto& s) { return m.recur(s); }},
    {"short_conv", [](auto& m, auto& s) { return m.recur(s); }},
};

// tokens [B, T] -> their embeddings, [B, T, F]
at::Tensor embed(const at::Tensor& tokens, const Program& program) {
  const at::Tensor x = embed(tokens, program.embedding, program.embedding_table);
  return program.embedding_scale == 1 ? x : scale(x, program.embedding_scale);
}

// Runs a draft head over tokens [B, T] and features [B, T, F]. Writes: the cache. Returns: [B, T,
// F] in bfloat16.
at::Tensor step_head(const Program& program, const at::Tensor& tokens, const at::Tensor& features,
                     const at::Tensor& positions, const Cache& cache) {
  Machine machine(program);
  machine.rows[EMBEDDED] = embed(tokens, program);
  machine.tokens = tokens;
  machine.rows[FEATURES] = features;
  machine.use(cache, positions, features.size(0), features.size(1));
  const at::Tensor& y = machine.run();
  const at::Tensor out = empty_rows(y, y.size(-1), at::kBFloat16);
  copy_columns(y, out, 0);
  return out;
}

}  // namespace

// --------------------------------------------------------------------------------------- operators

// Makes a program of steps, each of which has an op, PER_STEP counts (source, to, layer, its own),
// 2 numbers and 3 weights. Returns: a tensor that owns it.
constexpr int64_t PER_STEP = 7;
at::Tensor prepare_steps(std::vector<std::string> ops, at::IntArrayRef counts,
                         at::ArrayRef<double> numbers, const Weights& weights,
                         const at::Tensor& embedding,
                         const std::optional<at::Tensor>& embedding_table, double embedding_scale,
                         at::TensorList freqs, at::ArrayRef<double> factors) {
  const int64_t count = int64_t(ops.size());
  TORCH_CHECK(count && int64_t(counts.size()) == count * PER_STEP &&
                  int64_t(numbers.size()) == 2 * count && int64_t(weights.size()) == 3 * count &&
                  freqs.size() == factors.size(),
              weights.size(), " weights do not fit ", count, " steps of 3");
  Program* program = new Program{
      nullptr, {}, 0, 0, embedding, embedding_table, embedding_scale, freqs.vec(), factors.vec()};
  program->self = program;
  const at::Tensor holder = at::from_blob(
      program, {1}, [program](void*) { delete program; }, at::TensorOptions().dtype(at::kLong));
  for (int64_t i = 0; i < count; i++) {
    const int64_t* of = counts.data() + i * PER_STEP;
    TORCH_CHECK(of[0] >= 0 && of[0] < REGISTERS && of[1] >= 0 && of[1] < REGISTERS,
                "no such register");
    const auto kind = std::find_if(std::begin(OPS), std::end(OPS),
                                   [&](const auto& each) { return ops[i] == each.first; });
    TORCH_CHECK(kind != std::end(OPS), "there is no step ", ops[i]);
    Step step{ops[i], kind->second, Register(of[0]), Register(of[1]), of[2], {}, {}, {}};
    std::copy_n(of + 3, 4, step.counts);
    std::copy_n(numbers.data() + 2 * i, 2, step.numbers);
    for (int64_t w = 0; w < 3; w++) step.weights[w] = weights.get(3 * i + w);
    if (step.op == "attend" || step.op == "delta_rule" || step.op == "short_conv")
      program->layers = std::max(program->layers, step.layer + 1);
    if (step.op == "rotate") program->with_slots = step.layer;
    program->steps.push_back(std::move(step));
  }
  link_projections(program->steps);
  return holder;
}

// `Transformer.forward` of model.py: tokens, positions, slots [B, T] -> features after the final
// norm, and behind them the inputs of the layers in aux_layers: [B, T, (1 + aux_layers) F]. k, v and
// lengths: `KVCache.for_cpp`. Writes: k, v at the slots; states.
at::Tensor run_model(const at::Tensor& holder, const at::Tensor& tokens,
                     const at::Tensor& positions, at::TensorList k, at::TensorList v,
                     at::TensorList lengths, const at::Tensor& slots, const at::Tensor& start,
                     const at::Tensor& mask, const std::optional<at::Tensor>& kept,
                     at::IntArrayRef aux_layers) {
  const Program& program = program_in(holder);
  Machine machine(program);
  const at::Tensor x = embed(tokens, program);
  machine.rows[STREAM] = x;
  machine.rows[H] = x;
  machine.tokens = tokens;
  const Cache cache{k, v, slots, start, mask, lengths, kept};
  machine.use(cache, positions, x.size(0), x.size(1));
  const at::Tensor features =
      empty_rows(x, (1 + int64_t(aux_layers.size())) * x.size(2), at::kBFloat16);
  const at::Tensor& y = machine.run(aux_layers, &features);
  TORCH_CHECK(y.sizes() == x.sizes(), "the last step must end in rows of ", x.size(2));
  copy_columns(y, features, 0);
  return features;
}

// `EagleHead.forward` of eagle_draft.py over nodes [B, R] of a level. out: [B, R', F], outputs of
// the nodes before; parent: [B, R], the index of each node's parent among these. Writes: k, v at
// the slots. Returns: [B, R, F].
at::Tensor head_step(const at::Tensor& holder, const at::Tensor& tokens, const at::Tensor& out,
                     const at::Tensor& parent, const at::Tensor& positions, at::TensorList k,
                     at::TensorList v, const at::Tensor& slots, const at::Tensor& start,
                     const at::Tensor& mask) {
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
  return step_head(program_in(holder), tokens, rows, positions, {k, v, slots, start, mask});
}

// `EagleDrafter.extend` of eagle_draft.py. inputs: the program of `EagleHead.inputs`; tokens: [B, R
// + 1]; features: [B, R, (1 + aux_layers) F]; count, length: [B]; hidden: [B, 1, F]. Writes: k, v
// from slot `length` on. Returns: hidden and length after the first `count` tokens.
std::tuple<at::Tensor, at::Tensor> head_extend(const at::Tensor& holder, const at::Tensor& inputs,
                                               const at::Tensor& tokens, const at::Tensor& features,
                                               const at::Tensor& count, const at::Tensor& length,
                                               const at::Tensor& hidden, at::TensorList k,
                                               at::TensorList v) {
  TORCH_CHECK(features.dim() == 3 && features.scalar_type() == at::kBFloat16 && hidden.dim() == 3,
              "features and hidden have 3 dimensions, and features are bfloat16");
  const int64_t B = features.size(0), R = features.size(1), F = hidden.size(2);
  const Whole token(tokens, {B, R + 1}, "tokens"), real(count, {B}, "count"),
      before(length, {B}, "length");
  const Operand<Value> held(hidden, {B, 1, F}, "hidden");
  const at::Tensor next = at::empty({B, R}, tokens.options()),
                   total = at::empty({B}, length.options());
  const at::Tensor last = at::empty({B, 1, F}, hidden.options());
  for (int64_t b = 0; b < B; b++)
    std::copy_n(token.data + b * (R + 1) + 1, R, next.mutable_data_ptr<int64_t>() + b * R);
  const auto [slots, start, mask] = tree::causal(length, R, 0);
  Machine reader(program_in(inputs));
  reader.rows[FEATURES] = features.contiguous();
  const at::Tensor& x = reader.run();
  const at::Tensor y = step_head(program_in(holder), next, x, slots, {k, v, slots, start, mask});
  const Operand<Value> out(y, {B, R, F}, "the head's output");
  for (int64_t b = 0; b < B; b++) {
    const int64_t rows = within(real[b], R + 1, "a count");
    const Value* from = rows ? out.data + (b * R + rows - 1) * F : held.data + b * F;
    std::copy_n(from, F, last.mutable_data_ptr<Value>() + b * F);
    total.mutable_data_ptr<int64_t>()[b] = before[b] + rows;
  }
  return {last, total};
}

// Computes `rms_norm` of reference.py. x: [..., F], weight: [F]; each fp32 or bfloat16
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const bool known = x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat;
  const bool fits = weight.scalar_type() == at::kBFloat16 || weight.scalar_type() == at::kFloat;
  TORCH_CHECK(known && fits, "x and weight must be bfloat16 or float32");
  return norm(x.contiguous(), weight.contiguous(), eps);
}

// `swiglu`, `geglu` and `clamped_swiglu` of reference.py. both: [..., 2 F], fp32 or
// bfloat16
at::Tensor swiglu(const at::Tensor& both) { return gate<Activation::SILU>(both.contiguous()); }
at::Tensor geglu(const at::Tensor& both) { return gate<Activation::GELU_TANH>(both.contiguous()); }
at::Tensor clamped_swiglu(const at::Tensor& both, double alpha, double limit) {
  return clamped_gate(both.contiguous(), alpha, limit);
}

OPERATORS(m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", cpu(rms_norm));
  m.def("swiglu(Tensor both) -> Tensor", cpu(swiglu));
  m.def("geglu(Tensor both) -> Tensor", cpu(geglu));
  m.def("clamped_swiglu(Tensor both, float alpha, float limit) -> Tensor", cpu(clamped_swiglu));
  m.def(
      "prepare_steps(str[] ops, int[] counts, float[] numbers, Tensor?[] weights, Tensor "
      "embedding, "
      "Tensor? embedding_table, float embedding_scale, Tensor[] freqs, float[] factors) -> Tensor",
      cpu(prepare_steps));
  m.def(
      "run_model(Tensor program, Tensor tokens, Tensor positions, Tensor(a!)[] k, Tensor(b!)[] v, "
      "Tensor(c!)[] lengths, Tensor slots, Tensor start, Tensor mask, Tensor? kept, "
      "int[] aux_layers) -> Tensor", cpu(run_model));
  m.def(
      "head_step(Tensor program, Tensor tokens, Tensor out, Tensor parent, Tensor positions, "
      "Tensor(a!)[] k, Tensor(b!)[] v, Tensor slots, Tensor start, Tensor mask) -> Tensor",
      cpu(head_step));
  m.def(
      "head_extend(Tensor program, Tensor inputs, Tensor tokens, Tensor features, Tensor count, "
      "Tensor length, Tensor hidden, Tensor(a!)[] k, Tensor(b!)[] v) -> (Tensor, Tensor)",
      cpu(head_extend));
}

}  // namespace layers
