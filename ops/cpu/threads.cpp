// The threads of the CPU operators.
//
// A loop is cut into pieces, and whoever is free takes the next one: the caller, and workers that spin for a moment
// after their last piece, then sleep. The caller waits for pieces that a worker has begun, never for a worker: on a
// busy machine one that gets no processor delays nothing, where the barrier of an OpenMP team would wait for it in
// every one of the hundreds of loops of a step.
//
// Which thread runs a piece never shows in a result. A loop that begins while another thread's runs, runs on its own
// caller alone.

#include "common.h"

#include <atomic>
#include <mutex>
#include <thread>

namespace {

constexpr int64_t PIECES = 4;  // per thread: small enough to even out, large enough to be worth taking
constexpr int SPINS = 2000;    // pauses before a worker sleeps or a caller gives way, 40 to 100 us

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

class Pool {
 public:
  void run(const Loop& next, int64_t threads) {
    const std::unique_lock<std::mutex> alone(busy, std::try_to_lock);
    if (!alone) return next.run(next.body, 0, next.size);
    for (; workers + 1 < threads; workers++) std::thread([this, number = workers] { work(number); }).detach();
    loop = next, pieces = std::min((next.size + next.grain - 1) / next.grain, threads * PIECES);
    finished.store(0, std::memory_order_relaxed), helpers.store(threads - 1, std::memory_order_relaxed);
    const uint32_t now = round.load(std::memory_order_relaxed) + 1;
    left.store(uint64_t(now) << 32 | uint64_t(pieces), std::memory_order_release);
    round.store(now, std::memory_order_release);
    round.notify_all();
    while (take(now)) {
    }
    for (int spins = 0; finished.load(std::memory_order_acquire) < pieces; spins++)
      if (spins < SPINS) pause();
      else std::this_thread::yield();
  }

 private:
  // Runs one piece of a round, if there is one left. What a loop is may be read only once a piece of it is taken.
  bool take(uint32_t now) {
    uint64_t state = left.load(std::memory_order_acquire);
    do
      if (uint32_t(state >> 32) != now || uint32_t(state) == 0) return false;
    while (!left.compare_exchange_weak(state, state - 1, std::memory_order_acq_rel));
    const int64_t piece = pieces - int64_t(uint32_t(state));
    loop.run(loop.body, loop.size * piece / pieces, loop.size * (piece + 1) / pieces);
    finished.fetch_add(1, std::memory_order_release);
    return true;
  }

  void work(int64_t number) {
    for (uint32_t seen = 0;;) {
      int spins = 0;
      uint32_t now = round.load(std::memory_order_acquire);
      for (; now == seen; now = round.load(std::memory_order_acquire))
        if (spins++ < SPINS) pause();
        else round.wait(seen, std::memory_order_acquire);
      seen = now;
      if (number < helpers.load(std::memory_order_relaxed))
        while (take(now)) {
        }
    }
  }

  std::mutex busy;
  int64_t workers = 0, pieces = 0;
  Loop loop{};
  std::atomic<uint32_t> round{0};     // of the loop that runs
  std::atomic<uint64_t> left{0};      // its round, and how many pieces nobody has taken
  std::atomic<int64_t> finished{0}, helpers{0};
};

}  // namespace

void run_loop(const Loop& loop) {
  static Pool& pool = *new Pool;  // never destroyed: its workers run until the process ends
  const int64_t threads = at::get_num_threads();
  if (threads > 1 && loop.size > loop.grain) pool.run(loop, threads);
  else if (loop.size > 0) loop.run(loop.body, 0, loop.size);
}
