// The threads of the CPU operators.
//
// A loop is cut into pieces. Each thread takes those of its own share, then those that others have
// not begun. Threads are the caller, and workers that spin for a moment after their last piece,
// then sleep. The caller waits for pieces that a worker has begun, never for a worker: on a busy
// machine a worker without a processor delays nothing, while the barrier of an OpenMP team would
// wait for it in every one of the hundreds of loops of a step.
//
// A thread that waits fetches weights of a coming loop, if they are named: memory is idle between
// two products.
//
// A result does not depend on the thread that runs a piece. A loop that begins while another
// thread's loop runs, runs on its caller alone; so do all loops of a forked process, which has no
// workers.

#include "threads.h"

#include "operators.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

// pieces per thread: small enough to even out, large enough to be worth taking
constexpr int64_t PIECES = 4;
constexpr int64_t MOST_THREADS = 256;
// bytes of coming weights that a thread fetches: half of a Zen 3's L2
constexpr int64_t MOST_FETCHED = 256 << 10;
constexpr int SPINS = 20000;  // pauses before a worker sleeps or a caller gives way: 0.2 to 1 ms

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Weights that a coming loop reads.
struct Weights {
  const char* at;
  int64_t bytes;
};

// A thread's share of coming weights, fetched a few lines at a time.
class Fetcher {
 public:
  // Fetches some lines of share `own` of `count`. Returns: whether any was left.
  bool some(const Weights& coming, int64_t own, int64_t count) {
    if (coming.at != weights) {
      weights = coming.at;
      line = coming.at + coming.bytes * own / count;
      end = line + std::min(coming.bytes / count, MOST_FETCHED);
    }
    if (line >= end) return false;
    for (int i = 0; i < LINES; i++, line += 64) to_l2(line);
    return true;
  }

 private:
  static constexpr int LINES = 8;
  const char *weights = nullptr, *line = nullptr, *end = nullptr;
};

class Pool {
 public:
  void run(const Loop& next, int64_t threads, const Weights& then) {
    const std::unique_lock<std::mutex> alone(busy, std::try_to_lock);
    if (!alone) return next.run(next.body, 0, next.size);
    hire(threads - 1);
    coming_at.store(then.at, std::memory_order_relaxed);
    coming_bytes.store(then.bytes, std::memory_order_relaxed);
    coming_threads.store(threads, std::memory_order_relaxed);
    // pieces that are worth their while
    const int64_t most = (next.size + next.grain - 1) / next.grain;
    loop = next;
    shares = std::min(threads, most);
    each = std::min(PIECES, most / shares);
    finished.store(0, std::memory_order_relaxed);
    const uint32_t now = round.load(std::memory_order_relaxed) + 1;
    for (int64_t share = 0; share < shares; share++)
      left[share].store(uint64_t(now) << 32 | uint64_t(each), std::memory_order_release);
    helpers.store(shares, std::memory_order_relaxed);
    round.store(now, std::memory_order_release);
    round.notify_all();
    work_on(now, 0, shares);
    for (int spins = 0; finished.load(std::memory_order_acquire) < shares * each; spins++) {
      if (fetched.some(then, 0, threads)) continue;
      if (spins < SPINS) pause();
      else std::this_thread::yield();
    }
  }

 private:
  // Starts workers until there are this many, or as many as the system allows.
  void hire(int64_t wanted) {
    try {
      for (; workers < wanted; workers++)
        std::thread([this, number = workers + 1] { work(number); }).detach();
    } catch (const std::system_error&) {
    }
  }

  // Runs pieces until none is left, those of its own share first: they lie side by side in memory.
  void work_on(uint32_t now, int64_t own, int64_t count) {
    for (int64_t i = 0; i < count; i++)
      while (take(now, (own + i) % count)) {
      }
  }

  // Runs one piece of a share, if one is left. The loop may be read only after a piece of it is
  // taken.
  bool take(uint32_t now, int64_t share) {
    uint64_t state = left[share].load(std::memory_order_acquire);
    do
      if (uint32_t(state >> 32) != now || uint32_t(state) == 0) return false;
    while (!left[share].compare_exchange_weak(state, state - 1, std::memory_order_acq_rel));
    const int64_t piece = share * each + each - int64_t(uint32_t(state));
    const int64_t pieces = shares * each;
    loop.run(loop.body, loop.size * piece / pieces, loop.size * (piece + 1) / pieces);
    finished.fetch_add(1, std::memory_order_release);
    return true;
  }

  void work(int64_t number) {
    Fetcher own;
    for (uint32_t seen = 0;;) {
      int spins = 0;
      uint32_t now = round.load(std::memory_order_acquire);
      const Weights coming{coming_at.load(std::memory_order_relaxed),
                           coming_bytes.load(std::memory_order_relaxed)};
      const int64_t all = coming_threads.load(std::memory_order_relaxed);
      for (; now == seen; now = round.load(std::memory_order_acquire)) {
        if (number < all && own.some(coming, number, all)) continue;
        if (spins++ < SPINS) pause();
        else round.wait(seen, std::memory_order_acquire);
      }
      seen = now;
      const int64_t count = helpers.load(std::memory_order_relaxed);
      if (number < count) work_on(now, number, count);
    }
  }

  Fetcher fetched;  // of the caller
  std::mutex busy;
  int64_t workers = 0;
  int64_t shares = 0;
  int64_t each = 0;  // pieces of a share
  Loop loop{};
  std::atomic<uint32_t> round{0};  // of the loop that runs
  // of every share: its round, and its pieces that are not taken
  std::atomic<uint64_t> left[MOST_THREADS] = {};
  std::atomic<int64_t> finished{0}, helpers{0};
  // weights of a loop behind the one that runs, and its threads. A worker may read values of two
  // loops: then it fetches lines for nothing
  std::atomic<const char*> coming_at{nullptr};
  std::atomic<int64_t> coming_bytes{0}, coming_threads{0};
};

thread_local Weights then{};  // from `read_next`
// threads of loops that this thread begins; 0: as many as PyTorch's own
thread_local int64_t own = 0;

}  // namespace

void own_threads(int64_t count) { own = count; }

void read_next(const void* weights, int64_t bytes) {
  then = {static_cast<const char*>(weights), bytes};
}

void run_loop(const Loop& loop) {
  static Pool& pool = *new Pool;  // never destroyed: its workers run until the process ends
  const int64_t threads = std::min<int64_t>(own > 0 ? own : at::get_num_threads(), MOST_THREADS);
  if (threads > 1 && loop.size > loop.grain) pool.run(loop, threads, then);
  else if (loop.size > 0) loop.run(loop.body, 0, loop.size);
}

OPERATORS(m) { m.def("own_threads(int count) -> ()", own_threads); }
