// Loops on several threads, which fetch weights where they would wait (threads.cpp).
#pragma once

#include <algorithm>
#include <cstdint>

struct Loop {
  // several threads may run it at once
  void (*run)(const void* body, int64_t begin, int64_t end) noexcept;
  const void* body;
  int64_t size, grain;
};
void run_loop(const Loop& loop);

// Names the weights that a coming loop of this thread reads in order. From the next loop on,
// threads that wait fetch the first lines of their share of them into L2: memory would be idle in
// the steps between two products.
void read_next(const void* weights, int64_t bytes);

namespace {

// Calls f(begin, end) for parts of 0 .. size of about `grain` or more, 1 at least, on several threads
// where that pays.
template <class F> void parallel(int64_t size, int64_t grain, const F& f) {
  const auto run = [](const void* body, int64_t begin, int64_t end) noexcept {
    (*static_cast<const F*>(body))(begin, end);
  };
  run_loop({run, &f, size, std::max<int64_t>(1, grain)});
}

// Calls f(row) for every row below `rows`, as `parallel` does.
template <class F> void each_row(int64_t rows, int64_t grain, const F& f) {
  parallel(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) f(r);
  });
}

// Fetches a cache line of weights that are needed soon. A line that is fetched into L1 holds one of
// its few miss buffers until memory answers, which bounds a core's bandwidth.
inline void to_l2(const void* line) { __builtin_prefetch(line, 0, 2); }

}  // namespace
