// The int4 matmul of decoding in CUDA C++, y = x W^T for up to 32 rows of x, in bf16 (int4.py).
//
// 1. A block of 16 warps computes 32 outputs at a time, and goes on to those that lie `gridDim`
//    places further: one wave of blocks. K is cut into chunks of 128 inputs, and a warp has the
//    same 16th of them for all outputs.
// 2. A warp reads its codes and scales through its own ring in shared memory, by cp.async. The ring
//    is filled before the wait for the kernel in front, which may still run (dependent launch).
// 3. `mma.m16n8k16`: 16 outputs are the rows of A, unpacked in registers, and 8 rows of x the
//    columns of B. Dot products of a group are over codes, then scaled and added in fp32.
// 4. The sums of the 16 warps are added in their order. So a row has the same bits for every number
//    of rows, blocks and stages: no atomics, no order that a scheduler chooses.
//
// Options: ROWS 8, 16 or 32, the most rows of x; GROUP 32, 64 or 128 inputs that share a scale;
// ZEROS 1: with zero points; STAGES of a ring; RESIDENT 1: x lies in shared memory, 0: it is read
// from L2 for every 32 outputs; BLOCKS that share a multiprocessor; EPILOGUE as below.
// Trade-off: more than 16 rows read x again and again, and the kernel is meant for a token and for
// short chains. Source: Marlin (arXiv 2408.11743) for operands that are unpacked in registers.

constexpr int WARPS = 16;
constexpr int THREADS = 32 * WARPS;
constexpr int TILES = 2;  // of 16 outputs, that a block computes at a time
constexpr int OUTPUTS = 16 * TILES;
constexpr int PLACES = ROWS / 8;  // tiles of 8 rows of x
constexpr int INPUTS = 128;  // of a chunk
// a tile's chunk: for each group its codes, then its scales, in bfloat16 or words with a zero point
constexpr int UNIT = 8 * GROUP + (ZEROS ? 64 : 32);  // bytes of a group
constexpr int CHUNK = INPUTS / GROUP * UNIT;         // bytes
constexpr int SLOT = TILES * CHUNK;                  // of a ring (bytes)
// steps of 32 inputs that are unrolled, of groups and inside a group; more would spill
constexpr int UNROLLED = ROWS > 8 ? 1 : BLOCKS == 2 ? 2 : 4;
constexpr int INNER = UNROLLED < GROUP / 32 ? UNROLLED : GROUP / 32;
constexpr int OUTER = UNROLLED / INNER;
constexpr int PAD = 64;  // bytes between rows of x: neighbours then lie in different banks

enum Epilogue { NONE, FP32, SWIGLU };

// -------------------------------------------------------------------------------------- assembly
#ifdef __CUDACC__

#define DEVICE static __device__ __forceinline__

DEVICE void copy_async(void* to, const void* from) {  // 16 bytes
  unsigned shared_address = __cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address), "l"(from)
               : "memory");
}

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
DEVICE void wait_for_copies() {  // of this thread, but for the last PENDING commits
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

DEVICE void let_the_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE void wait_for_the_kernel_in_front() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// nibbles I and I + 4 of a word as two bfloat16s, plus `bias`, exactly: 0x4300 | code is 128 + code
template <int I>
DEVICE unsigned unpack(unsigned word, unsigned bias) {
  unsigned fields;
  unsigned values;
  asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(fields) : "r"(word >> (4 * I)));
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(values) : "r"(fields), "r"(0x3f803f80), "r"(bias));
  return values;
}

DEVICE void mma(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE unsigned short to_bf16(float value) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

#endif  // else the emulator of the tests has these
// ---------------------------------------------------------------------------------------- pieces

typedef float Sums[TILES][PLACES][4];  // as `mma` leaves them

// Where the chunks of a warp lie, and the rows of x that its lanes read.
struct Slice {
  int first;              // chunk
  int width;              // chunks
  unsigned row[PLACES];  // bytes from x to this lane's rows and inputs
};

// what zero is in bfloat16 behind `unpack`, negative and twice, of outputs g and g + 8 in a group
DEVICE void read_bias(unsigned (&bias)[2], const char* scales, int g) {
  bias[0] = bias[1] = 0xc308c308;  // -(128 + 8)
  if constexpr (ZEROS) {
    const uint2 words = *(const uint2*)(scales + 8 * g);
    bias[0] = (words.x & 31) * 0x10001 | 0xc300c300;
    bias[1] = (words.y & 31) * 0x10001 | 0xc300c300;
  }
}

DEVICE void read_scale(float (&scale)[2], const char* scales, int g) {
  unsigned upper, lower;  // outputs g + 8 and g
  if constexpr (ZEROS) {
    const uint2 words = *(const uint2*)(scales + 8 * g);
    upper = words.y & ~31u;
    lower = words.x & ~31u;
  } else {
    const unsigned both = *(const unsigned*)(scales + 4 * g);
    upper = both & 0xffff0000;
    lower = both << 16;
  }
  scale[0] = __uint_as_float(lower);
  scale[1] = __uint_as_float(upper);
}

// total += the product of a slot and 128 inputs of x, which begin `at` bytes behind `slice.row`
DEVICE void multiply(Sums& total, const char* slot, const char* x, const Slice& slice, int at) {
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
#pragma unroll OUTER
  for (int group = 0; group < INPUTS / GROUP; ++group) {
    const char* unit = slot + group * UNIT;
    Sums part = {};
#pragma unroll INNER
    for (int k = 0; k < GROUP; k += 32) {
      uint4 b[PLACES];  // 8 inputs of a row each
#pragma unroll
      for (int place = 0; place < PLACES; ++place) {
        const uint4* from = (const uint4*)(x + (slice.row[place] + at + 2 * (group * GROUP + k)));
        b[place] = RESIDENT ? *from : __ldcg(from);  // past the L1 cache
      }
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const uint2 words = *(const uint2*)(unit + tile * CHUNK + 8 * k + 8 * lane);
        unsigned bias[2];
        read_bias(bias, unit + tile * CHUNK + 8 * GROUP, g);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned word = half ? words.y : words.x;
          const unsigned a[4] = {unpack<0>(word, bias[0]), unpack<1>(word, bias[1]),
                                 unpack<2>(word, bias[0]), unpack<3>(word, bias[1])};
#pragma unroll
          for (int place = 0; place < PLACES; ++place) {
            const uint4& of_row = b[place];
            mma(part[tile][place], a, half ? of_row.z : of_row.x, half ? of_row.w : of_row.y);
          }
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      float scale[2];
      read_scale(scale, unit + tile * CHUNK + 8 * GROUP, g);
#pragma unroll
      for (int place = 0; place < PLACES; ++place)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          total[tile][place][i] = fmaf(part[tile][place][i], scale[i / 2], total[tile][place][i]);
    }
  }
}

// the place of an output in a row of sums: what lanes of a warp write at once has different banks
DEVICE int place_of(int output, int row) { return row * OUTPUTS + (output ^ row / 2 % 4 * 8); }

// leave a warp's sums, [M, OUTPUTS], in shared memory
DEVICE void store_sums(float* sums, const Sums& total, int M) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int place = 0; place < PLACES; ++place)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * place + lane % 4 * 2 + i % 2;
        const int output = 16 * tile + lane / 4 + i / 2 * 8;
        if (row < M) sums[place_of(output, row)] = total[tile][place][i];
      }
}

// add the warps' sums of an output, the first warp's first
DEVICE float sum_of(const float* sums, int output, int row, int M) {
  const float* at = sums + place_of(output, row);
  float total = at[0];
#pragma unroll
  for (int warp = 1; warp < WARPS; ++warp) total += at[warp * M * OUTPUTS];
  return total;
}

// the factor that divides a row's results by the root mean square of K features, for a whole warp
DEVICE float inverse_rms(const float* squares, int row, int M, int K) {
  float sum = 0;
  for (int part = threadIdx.x % 32; part < K / 64; part += 32)
    sum += __ldcg(squares + part * M + row);
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  return rsqrtf(sum / K);
}

// ---------------------------------------------------------------------------------------- kernel

// x: [M, K] bfloat16; weight: [N / 16, K / 128, CHUNK] bytes, as int4.py packs them
// squares: [K / 64, M] fp32, of `backends.epilogues.UnnormalizedRows`, or null
// y: [M, N] bfloat16 or with FP32 float; with SWIGLU [M, N / 2], of gate rows above up rows
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    int4_matmul(const char* x, const char* weight, const float* squares, void* y, int M, int N,
                int K) {
  extern __shared__ __align__(16) char shared[];
  let_the_next_kernel_start();
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int chunks = K / INPUTS;
  const int passes = N / OUTPUTS;
  char* ring = shared + warp * STAGES * SLOT;
  float* sums = (float*)(shared + WARPS * STAGES * SLOT);  // [WARPS, M, OUTPUTS]
  float* factor = sums + WARPS * M * OUTPUTS;              // [ROWS]
  char* resident = (char*)(factor + ROWS);                 // [M, 2 K], PAD apart
  const int stride = RESIDENT ? 2 * K + PAD : 2 * K;
  Slice slice;
  slice.first = warp * chunks / WARPS;
  slice.width = (warp + 1) * chunks / WARPS - slice.first;
#pragma unroll
  for (int place = 0; place < PLACES; ++place) {
    const int row = min(8 * place + lane / 4, M - 1);  // beyond M the last one, to no effect
    slice.row[place] = row * stride + slice.first * 2 * INPUTS + lane % 4 * 16;
  }

  // the other tile of a pass is the next one, or the up rows' with the same outputs
  const int other_tile = EPILOGUE == SWIGLU ? passes * chunks : chunks;  // so many chunks further
  const int next_pass = EPILOGUE == SWIGLU ? chunks : TILES * chunks;
  int ahead = blockIdx.x * next_pass + slice.first;  // the chunk of the weight to be read next
  int read = 0;                                      // chunks of its pass
  auto fetch = [&](int slot) {
    if (ahead < passes * next_pass && slice.width) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        char* to = ring + slot * SLOT + tile * CHUNK + lane * 16;
        const char* from = weight + (long long)(ahead + tile * other_tile) * CHUNK + lane * 16;
#pragma unroll
        for (int at = 0; at < CHUNK; at += 512)
          if (at + lane * 16 < CHUNK) copy_async(to + at, from + at);
      }
      ++ahead;
      if (++read == slice.width) {
        read = 0;
        ahead += gridDim.x * next_pass - slice.width;
      }
    }
    commit_copies();  // of none at the end, so that the number of commits is that of slots
  };
#pragma unroll
  for (int slot = 0; slot < STAGES; ++slot) fetch(slot);

  wait_for_the_kernel_in_front();
  if (RESIDENT) {  // a warp's inputs are its own: no barrier of the block
    const int pieces = slice.width * 2 * INPUTS / 16;
    for (int i = lane; i < M * pieces; i += 32) {
      const int row = i / pieces;
      const int at = slice.first * 2 * INPUTS + i % pieces * 16;
      *(uint4*)(resident + row * stride + at) = __ldcg((const uint4*)(x + row * 2 * K + at));
    }
  }
  if (squares)
    for (int row = warp; row < M; row += WARPS) {
      const float inverse = inverse_rms(squares, row, M, K);
      if (lane == 0) factor[row] = inverse;
    }

  int slot = 0;
#pragma unroll 1
  for (int pass = blockIdx.x; pass < passes; pass += gridDim.x) {
    Sums total = {};
#pragma unroll 1
    for (int chunk = 0; chunk < slice.width; ++chunk) {
      wait_for_copies<STAGES - 1>();
      __syncwarp();
      multiply(total, ring + slot * SLOT, RESIDENT ? resident : x, slice, 2 * INPUTS * chunk);
      __syncwarp();  // all lanes have read the slot
      fetch(slot);
      slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    __syncthreads();  // the sums of the pass before have been read
    store_sums(sums + warp * M * OUTPUTS, total, M);
    __syncthreads();
    constexpr int WIDTH = EPILOGUE == SWIGLU ? OUTPUTS / 2 : OUTPUTS;
    // a few rows are work for a few warps: other ones in every pass
    const int thread = (threadIdx.x + pass / gridDim.x * 32) % THREADS;
    for (int i = thread; i < M * WIDTH; i += THREADS) {
      const int row = i / WIDTH;
      const float by = squares ? factor[row] : 1;
      float value = sum_of(sums, i % WIDTH, row, M) * by;
      if (EPILOGUE == SWIGLU) {
        const float up = sum_of(sums, WIDTH + i % WIDTH, row, M) * by;
        value = value / (1 + __expf(-value)) * up;
      }
      const long long at = (long long)row * passes * WIDTH + pass * WIDTH + i % WIDTH;
      if (EPILOGUE == FP32)
        ((float*)y)[at] = value;
      else
        ((unsigned short*)y)[at] = to_bf16(value);
    }
  }
}
