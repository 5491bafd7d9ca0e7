// Multiply-adds that one call does on all threads with everything in registers: the peaks that
// linear.py compares with. A library of its own, built from the operators' sources.

#define NO_TILES
#include "matmul.cpp"
#include "matmul_bf16.h"
#include "operators.cpp"
#include "threads.cpp"

namespace {

// Runs f(thread), which does `each` multiply-adds, on all threads. Returns: how many these are together.
template <class F> double peak(double each, const F& f) {
  const int64_t threads = at::get_num_threads();
  std::vector<float> sink(threads);  // or the compiler would leave the work out
  parallel(threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      float lanes[LANES];
      store(lanes, f(t));
      sink[t] = lanes[0];
    }
  });
  return threads * each + 0 * sink[0];
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace matmul {
// int8
EXPORT double dot_peak(int64_t rounds) {
  constexpr int CHAINS = 16;
  return peak(double(rounds) * CHAINS * LANES * 4, [&](int64_t thread) {
    Ints acc[CHAINS], w = splat(0x01020304 + int32_t(thread));
    for (int i = 0; i < CHAINS; i++) acc[i] = splat(i);
    for (int64_t r = 0; r < rounds; r++)
      for (int i = 0; i < CHAINS; i++) acc[i] = dot<true>(acc[i], w, acc[i]);  // cannot be folded
    Floats total = splat(0.0f);
    for (int i = 0; i < CHAINS; i++) total = add_scaled(acc[i], splat(1.0f), total);
    return total;
  });
}
}  // namespace matmul

namespace matmul::bf16 {
// bf16
EXPORT double pair_peak(int64_t rounds) {
  constexpr int CHAINS = 16;
  return peak(double(rounds) * CHAINS * LANES * 2, [&](int64_t thread) {
    Floats acc[CHAINS], total = splat(0.0f);
    const Pairs w = pairs(splat(0x3f803f80 + int32_t(thread)));
    for (int i = 0; i < CHAINS; i++) acc[i] = splat(float(i));
    for (int64_t r = 0; r < rounds; r++)
      for (int i = 0; i < CHAINS; i++) acc[i] = dot(w, w, acc[i]);
    for (int i = 0; i < CHAINS; i++) total = multiply_add(acc[i], splat(1.0f), total);
    return total;
  });
}
}  // namespace matmul::bf16
