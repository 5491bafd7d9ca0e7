// The kernel of backends/triton/int4.cu on a CPU, block after block, for test_int4.py.
#include "emulator.h"

#include "int4.cu"

namespace {
const char *x, *weight;
const float* squares;
void* y;
int M, N, K;
}  // namespace

// Returns: whether the blocks kept to their shared memory.
extern "C" bool run(int blocks, int threads, int shared_bytes, const char* x_, const char* weight_,
                    const float* squares_, void* y_, int M_, int N_, int K_) {
  x = x_, weight = weight_, squares = squares_, y = y_, M = M_, N = N_, K = K_;
  emulator::body = [] { int4_matmul(x, weight, squares, y, M, N, K); };
  emulator::grid.x = blocks;
  for (emulator::block.x = 0; emulator::block.x < (unsigned)blocks; ++emulator::block.x) {
    emulator::run_block(threads);
    for (int i = shared_bytes; i < (int)sizeof shared; ++i)
      if (shared[i] != (char)0xff) return false;
  }
  return true;
}
