// A block of threads on a CPU, for a kernel in CUDA C++ with `extern __shared__ char shared[]`.
//
// Every thread is a fiber, and gives way where a real one would wait for others; one warp at a time
// stands still for some turns. Blocks run one after the other. Shared memory begins as NaN. An
// asynchronous copy lands at once or when it is waited for, by chance, and until then its place
// holds NaN. `mma` computes by the tables of the PTX manual. So an early read, a copy into what is
// still read, a lost barrier and a fragment of another lane are wrong numbers. Not emulated: time,
// caches, the order of memory between blocks.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#define __global__
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define DEVICE static inline
#define threadIdx (emulator::now->at)
#define blockIdx emulator::block
#define gridDim emulator::grid
#define __expf expf

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
using std::min;

constexpr int MOST_SHARED_BYTES = 227 * 1024;
alignas(16) char shared[MOST_SHARED_BYTES + 1];

namespace emulator {

struct Index { unsigned x; };
struct Copy { void* to; const void* from; };

struct Warp {
  int arrived = 0, turns = 0;
  float given[32];
  float* sums[32];
  unsigned a[32][4], b[32][2];
};

struct Thread {
  Index at;
  Warp* warp;
  std::vector<std::vector<Copy>> commits{1};  // on their way; the last one is open
  jmp_buf state;
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool begun = false, ended = false;
};

constexpr int STACK_BYTES = 1 << 15;
Thread* now;
Index block, grid;
jmp_buf scheduler;
ucontext_t home;
int arrived, turns, count;  // of the block's barrier
void (*body)();
unsigned random_state = 1;

unsigned chance() {
  random_state = random_state * 1664525 + 1013904223;
  return random_state >> 24;
}

void give_way() {
  if (!_setjmp(now->state)) _longjmp(scheduler, 1);
}

void begin() {
  body();
  now->ended = true;
  _longjmp(scheduler, 1);
}

void wait_for_all(int& arrived, int& turns, int count) {
  const int turn = turns;
  if (++arrived == count) {
    arrived = 0;
    ++turns;
  }
  while (turns == turn) give_way();
}

void run_block(int threads) {
  std::vector<Warp> warps(threads / 32);
  std::vector<Thread> all(threads);
  for (int i = 0; i < threads; ++i) {
    all[i].at.x = i;
    all[i].warp = &warps[i / 32];
    all[i].stack.reset(new char[STACK_BYTES]);
    getcontext(&all[i].context);
    all[i].context.uc_stack.ss_sp = all[i].stack.get();
    all[i].context.uc_stack.ss_size = STACK_BYTES;
    all[i].context.uc_link = nullptr;
    makecontext(&all[i].context, begin, 0);
  }
  memset(shared, 0xff, sizeof shared);
  arrived = turns = 0;
  count = threads;
  const Warp* slow = nullptr;  // a warp that stands still for some turns
  int turns_left = 0;
  for (int left = threads; left; --turns_left) {
    if (turns_left == 0) {
      slow = &warps[chance() % warps.size()];
      turns_left = 1 + chance();
    }
    for (int i = 0; i < threads; ++i) {
      now = &all[i];
      if (now->ended || now->warp == slow) continue;
      if (!_setjmp(scheduler)) {
        if (now->begun) _longjmp(now->state, 1);
        now->begun = true;
        swapcontext(&home, &now->context);
      }
      left -= now->ended;
    }
  }
}

float half_of(unsigned word, int upper) {  // one of its two bfloat16s
  const unsigned bits = upper ? word & 0xffff0000 : word << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// sums += A B of a warp, from the lanes' fragments of m16n8k16
void multiply(Warp& warp) {
  float A[16][16], B[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8; ++i)
      A[i / 2 % 2 * 8 + g][i / 4 * 8 + 2 * t + i % 2] = half_of(warp.a[lane][i / 2], i % 2);
    for (int i = 0; i < 4; ++i)
      B[i / 2 * 8 + 2 * t + i % 2][g] = half_of(warp.b[lane][i / 2], i % 2);
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += A[row][k] * B[k][column];
      warp.sums[lane][i] += sum;
    }
}

}  // namespace emulator

DEVICE void __syncthreads() {
  emulator::wait_for_all(emulator::arrived, emulator::turns, emulator::count);
}

DEVICE void __syncwarp() {
  emulator::wait_for_all(emulator::now->warp->arrived, emulator::now->warp->turns, 32);
}

DEVICE float __shfl_xor_sync(unsigned, float value, int apart) {
  emulator::Warp& warp = *emulator::now->warp;
  const int lane = threadIdx.x % 32;
  warp.given[lane] = value;
  __syncwarp();
  value = warp.given[lane ^ apart];
  __syncwarp();
  return value;
}

DEVICE void copy_async(void* to, const void* from) {
  if (emulator::chance() % 2) {
    memcpy(to, from, 16);
  } else {
    memset(to, 0xff, 16);
    emulator::now->commits.back().push_back({to, from});
  }
}

DEVICE void commit_copies() { emulator::now->commits.emplace_back(); }

template <int PENDING>
DEVICE void wait_for_copies() {
  auto& commits = emulator::now->commits;
  while (commits.size() > PENDING + 1) {
    for (const auto& copy : commits.front()) memcpy(copy.to, copy.from, 16);
    commits.erase(commits.begin());
  }
}

DEVICE void mma(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  emulator::Warp& warp = *emulator::now->warp;
  const int lane = threadIdx.x % 32;
  warp.sums[lane] = sum;
  memcpy(warp.a[lane], a, sizeof a);
  warp.b[lane][0] = b0;
  warp.b[lane][1] = b1;
  if (warp.arrived == 31) emulator::multiply(warp);
  __syncwarp();
}

template <int I>
DEVICE unsigned unpack(unsigned word, unsigned bias) {
  const unsigned fields = (word >> (4 * I) & 0x000f000f) | 0x43004300;
  unsigned both = 0;
  for (int upper = 0; upper < 2; ++upper) {
    const float value = emulator::half_of(fields, upper) + emulator::half_of(bias, upper);
    unsigned bits;
    memcpy(&bits, &value, 4);
    both |= bits >> 16 << (16 * upper);
  }
  return both;
}

DEVICE unsigned short to_bf16(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

DEVICE float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

template <class T>
DEVICE T __ldcg(const T* from) {
  return *from;
}

DEVICE float rsqrtf(float x) { return 1 / sqrtf(x); }
DEVICE void let_the_next_kernel_start() {}
DEVICE void wait_for_the_kernel_in_front() {}
