// The rotary embedding on a CPU.
//
// 1. `angles` computes cosines and sines once for all layers.
// 2. `rotary` rotates the heads of queries and keys.
//
// Products are rounded before they are added, as in PyTorch's operators, so that the bits equal
// those of eager code.

#include "rotary.h"

#include "operands.h"
#include "operators.h"
#include "threads.h"

#include <algorithm>
#include <cmath>

namespace rotary {
namespace {

constexpr int64_t GRAIN = 1 << 15;  // elements that pay for a thread's wake-up

template <class T>
void rotate_rows(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                 const at::Tensor& q, const at::Tensor& k, T* to_q) {
  const int64_t rows = qkv.size(0) * qkv.size(1);
  const int64_t all = qkv.size(2);
  const int64_t e = qkv.size(3);
  const int64_t heads = q.size(2);
  const int64_t kv_heads = k.size(2);
  const int64_t turned = cos.numel() / rows;
  const T* x = qkv.const_data_ptr<T>();
  T* to_k = k.mutable_data_ptr<T>();
  const float* c = cos.const_data_ptr<float>();
  const float* s = sin.const_data_ptr<float>();
  each_row(rows, GRAIN / (all * e), [&](int64_t r) {
    for (int64_t h = 0; h < heads + kv_heads; h++) {
      T* y = h < heads ? to_q + (r * heads + h) * e : to_k + (r * kv_heads + h - heads) * e;
      rotate(x + (r * all + h) * e, c + r * turned, s + r * turned, turned, e, y);
    }
  });
}

}  // namespace

// Computes `rotary` of reference.py, for bfloat16 and float32.
Tensors<2> rotary(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                  int64_t heads, int64_t kv_heads) {
  const int64_t B = qkv.size(0);
  const int64_t T = qkv.size(1);
  const int64_t e = qkv.size(3);
  TORCH_CHECK(e % 2 == 0 && heads + kv_heads <= qkv.size(2), heads, " + ", kv_heads, " heads of ",
              e, " elements are not in ", qkv.size(2), " heads");
  const int64_t turned = cos.size(-1);
  TORCH_CHECK(turned % 2 == 0 && turned <= e && cos.numel() == B * T * turned &&
                  sin.sizes() == cos.sizes(),
              "cos and sin must hold an angle per row and element, or for the first ones");
  const at::Tensor q = at::empty({B, T, heads, e}, qkv.options());
  const at::Tensor k = at::empty({B, T, kv_heads, e}, qkv.options());
  const at::Tensor x = qkv.contiguous();
  const at::Tensor c = cos.contiguous();
  const at::Tensor s = sin.contiguous();
  fill(q, [&](auto* to_q) { rotate_rows(x, c, s, q, k, to_q); });
  return {q, k};
}

// Computes `rope_angles` of reference.py: cosines and sines of positions [B, T] int64 times
// freq [E/2] fp32, times factor; both [B, T, 1, E] fp32.
Tensors<2> angles(const at::Tensor& freq, const at::Tensor& positions, double factor) {
  const at::Tensor at_row = positions.contiguous();
  const at::Tensor of = freq.contiguous();
  const int64_t rows = at_row.numel();
  const int64_t half = of.numel();
  const at::Tensor cos =
      at::empty({positions.size(0), positions.size(1), 1, 2 * half}, of.options());
  const at::Tensor sin = at::empty(cos.sizes(), of.options());
  const float* f = of.const_data_ptr<float>();
  const int64_t* position = at_row.const_data_ptr<int64_t>();
  float* c = cos.mutable_data_ptr<float>();
  float* s = sin.mutable_data_ptr<float>();
  each_row(rows, GRAIN / (64 * half), [&](int64_t r) {
    for (int64_t j = 0; j < half; j++) {
      const int64_t to = 2 * r * half + j;
      const float angle = float(position[r]) * f[j];
      c[to] = std::cos(angle) * float(factor);
      s[to] = std::sin(angle) * float(factor);
      c[to + half] = c[to];
      s[to + half] = s[to];
    }
  });
  return {cos, sin};
}

OPERATORS(m) {
  m.def(
      "rotary(Tensor qkv, Tensor cos, Tensor sin, int heads, int kv_heads) -> (Tensor, Tensor)",
      cpu(rotary));
  m.def("angles(Tensor freq, Tensor positions, float factor=1.0) -> (Tensor, Tensor)", cpu(angles));
}

}  // namespace rotary
