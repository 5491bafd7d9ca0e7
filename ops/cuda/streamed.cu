// A few rows of activations times int4, int8 or 16-bit weights, y = x W^T, as qmatmul.py computes
// them, from the same layouts, with the same epilogues.
//
// 1. Weights are copied into shared memory by cp.async, STAGES - 1 blocks of K ahead; the first of
//    them before the kernels in front have finished, which Triton's pipeline cannot do. So none of
//    these may write weights or scales.
// 2. A warp has MT x 16 outputs, as the rows of m16n8k16 tensor-core products; tokens are its
//    columns, eight to a product. Each column has the same instruction whatever the others are, so
//    a row's bits do not depend on their number.
// 3. Lane (g, t) = (lane / 4, lane % 4) takes 8 words in a row of a block, so that one load of 16
//    bytes serves two products, of weights and of activations alike. The products then take columns
//    of K in another order than they lie in, the same for both factors.
// 4. Rows of 128 bytes of weights are stored with their halves exchanged in every other row: the
//    eight lanes of a load then touch all 32 banks.
//
// Compiled by streamed.py, with the constants in capitals given: BITS, GROUP (0: a scale per
// output), TOKENS, ROWS, WARPS, STAGES, GATED, HALF (fp16, else bf16), FP32 (results unrounded, as
// partial sums are), OVERLAPS. ON_CPU: the machine's part comes from tests/cuda/cuda_on_cpu.h.
// Not run on a GPU yet. Not here: zero points, fp32 activations, widths that are no multiple of 8.
// Sources: mma and cp.async in the PTX manual; Marlin (arXiv 2408.11743).

using u32 = unsigned int;

struct alignas(16) Words {
    u32 word[4];
};

#ifndef ON_CPU

// Returns: c + a b, of 16 x 16 and 16 x 8, in the fragments of the PTX manual.
__device__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if HALF
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Returns: a b + c, of two 16-bit numbers each.
__device__ u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn." TYPE "x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ unsigned short to_16_bits(float x) {
    unsigned short bits;
    asm("cvt.rn." TYPE ".f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// Begins to copy 16 bytes into shared memory: the first `valid` of them, then zeros.
__device__ void copy_16(void* to, const void* from, int valid) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(valid)
                 : "memory");
}

// Copies 16 bytes at once, or writes zeros.
__device__ void copy_16_now(void* to, const void* from, bool valid) {
    *static_cast<Words*>(to) = valid ? *static_cast<const Words*>(from) : Words{};
}

__device__ void copy_4(void* to, const void* from) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
}

__device__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's copies, but for the last PENDING groups of them.
template <int PENDING>
__device__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// As launch.py's: no result of another kernel is read, and nothing is written, before it.
__device__ void after_others() {
#if OVERLAPS
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ float as_float(u32 bits) { return __uint_as_float(bits); }
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int MT = ROWS / (16 * WARPS);          // tiles of 16 outputs of a warp
constexpr int NT = TOKENS / 8;                   // tiles of 8 tokens
constexpr int PLANES = 16 / BITS;                // weights of a word
constexpr int COLUMNS = 64;                      // words of a row and block, as in layout.py
constexpr int BLOCK = PLANES * COLUMNS;          // inputs of a block
// steps of a block that are unrolled; with more, many sums spill
constexpr int AT_ONCE = MT * NT > 4 ? 2 : BLOCK / 32;
constexpr int SCALES = GROUP ? 128 / GROUP : 0;  // words with scales of a row and block
constexpr int X_BYTES = 2 * BLOCK + 64;          // of a token: two of them touch all banks
constexpr int SCALES_AT = ROWS * 2 * COLUMNS;    // in a stage, behind its weights
constexpr int X_AT = SCALES_AT + ROWS * SCALES * 4;
constexpr int STAGE_BYTES = X_AT + TOKENS * X_BYTES;
constexpr int FACTORS_AT = STAGES * STAGE_BYTES;  // TOKENS of them in fp32
static_assert(ROWS == MT * 16 * WARPS && TOKENS == NT * 8 && STAGES > 1);

// Returns: the row of the weight that row r of a block's tile is, of N. With GATED rows g and
// g + 8 of a tile of 16 are a gate and the up row of the same output.
__device__ int row_of(int tile, int r, int N) {
    if (!GATED) return min(tile * ROWS + r, N - 1);
    int output = tile * (ROWS / 2) + r / 16 * 8 + r % 8;
    return min(output, N / 2 - 1) + (r % 16 < 8 ? 0 : N / 2);
}

__device__ void fetch_weights(unsigned char* stage, const unsigned char* weights, const u32* scales,
                              int block, int tile, int N, int K) {
    for (int i = threadIdx.x; i < ROWS * 8; i += THREADS) {
        int r = i / 8;
        int part = i % 8;  // 16 bytes each
        int row = row_of(tile, r, N);
        unsigned char* to = stage + r * 128 + (part ^ (r & 1) << 2) * 16;
        if (BITS == 16) {
            int k = block * BLOCK + part * 8;
            bool inside = k < K;  // K is a multiple of 8
            const unsigned char* from = weights + (static_cast<long long>(row) * K + k) * 2;
            copy_16(to, inside ? from : weights, inside ? 16 : 0);
        } else {
            copy_16(to, weights + (static_cast<long long>(block) * N + row) * 128 + part * 16, 16);
        }
    }
    for (int i = threadIdx.x; i < ROWS * SCALES; i += THREADS) {
        long long row = static_cast<long long>(block) * N + row_of(tile, i / SCALES, N);
        copy_4(stage + SCALES_AT + i * 4, scales + row * SCALES + i % SCALES);
    }
}

// NOW: not by cp.async, whose groups end in order: x would wait for the weights in front of it
template <bool NOW>
__device__ void fetch_x(unsigned char* stage, const unsigned char* x, int block, int M, int K) {
    constexpr int PARTS = BLOCK / 8;  // 16 bytes each
    for (int i = threadIdx.x; i < TOKENS * PARTS; i += THREADS) {
        int token = blockIdx.x * TOKENS + i / PARTS;
        int k = block * BLOCK + i % PARTS * 8;
        bool inside = token < M && k < K;
        const unsigned char* from = x + (static_cast<long long>(token) * K + k) * 2;
        unsigned char* to = stage + X_AT + i / PARTS * X_BYTES + i % PARTS * 16;
        if (NOW) {
            copy_16_now(to, from, inside);
        } else {
            copy_16(to, inside ? from : x, inside ? 16 : 0);
        }
    }
}

// Writes: what the results of each token are multiplied by.
__device__ void find_factors(float* factors, const float* squares, int M, int parts, int F) {
    for (int i = threadIdx.x; i < TOKENS; i += THREADS) {
        int token = blockIdx.x * TOKENS + i;
        float sum = 0;
#pragma unroll 16
        for (int part = 0; part < parts; part++) {
            sum += token < M ? squares[part * M + token] : 0;
        }
        factors[i] = rsqrtf(sum / F);
    }
}

// Returns: two weights of a plane, exactly. A field that is OR-ed into the mantissa of 2^m (1024 in
// fp16, 128 in bf16) gives 2^m + field; the subtraction is exact. int4 fields are code + 8, int8
// fields a sign and a magnitude, as a bf16 mantissa has 7 bits.
__device__ u32 unpack(u32 words, int plane) {
    constexpr u32 BASE = HALF ? 0x64006400 : 0x43004300;
    constexpr u32 ONE = HALF ? 0x3c003c00 : 0x3f803f80;
    constexpr u32 SIGNS = 0x80008000;
    if (BITS == 16) return words;
    if (BITS == 4) {
        u32 field = (words >> 4 * plane & 0x000f000f) | BASE;
        return fma_pair(field, ONE, HALF ? 0xe408e408 : 0xc308c308);
    }
    u32 base = (words << (8 - 8 * plane) & SIGNS) | BASE;
    u32 field = (words >> 8 * plane & 0x007f007f) | base;
    return fma_pair(base, ONE | SIGNS, field);
}

// Adds a block of K to the sums. total: [MT][NT], in fragments of 16 x 8
__device__ void add_block(float (&total)[MT][NT][4], const unsigned char* stage) {
    int lane = threadIdx.x % 32;
    int g = lane / 4;
    int t = lane % 4;
    int first = threadIdx.x / 32 * MT * 16 + g;  // row of the first tile
    float group[MT][NT][4] = {};
#pragma unroll AT_ONCE
    for (int k = 0; k < BLOCK; k += 32) {
        int plane = k / COLUMNS;
        int part = k % COLUMNS / 8 + t;
        u32 w[MT][2][4];  // of two products, each as the manual has it
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int below = 0; below < 2; below++) {
                int row = first + m * 16 + below * 8;
                const unsigned char* from = stage + row * 128 + (part ^ (row & 1) << 2) * 16;
                Words words = *reinterpret_cast<const Words*>(from);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    w[m][i / 2][i % 2 * 2 + below] = unpack(words.word[i], plane);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const unsigned char* from = stage + X_AT + (n * 8 + g) * X_BYTES + (k + t * 8) * 2;
            Words x = *reinterpret_cast<const Words*>(from);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                auto& sum = GROUP ? group[m][n] : total[m][n];
                multiply_add(sum, w[m][0], x.word[0], x.word[1]);
                multiply_add(sum, w[m][1], x.word[2], x.word[3]);
            }
        }
        if (GROUP && (k + 32) % GROUP == 0) {
            int number = k / GROUP;
#pragma unroll
            for (int m = 0; m < MT; m++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int row = first + m * 16 + i / 2 * 8;
                    int at = row * SCALES + number / 2;
                    u32 word = reinterpret_cast<const u32*>(stage + SCALES_AT)[at];
                    // a bf16 is the upper half of an fp32
                    float scale = as_float(number % 2 ? word & 0xffff0000 : word << 16);
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        total[m][n][i] = fmaf(group[m][n][i], scale, total[m][n][i]);
                        group[m][n][i] = 0;
                    }
                }
            }
        }
    }
}

__device__ void store(void* y, long long at, float value) {
    if (FP32) {
        static_cast<float*>(y)[at] = value;
    } else {
        static_cast<unsigned short*>(y)[at] = to_16_bits(value);
    }
}

// Computes a tile of y^T, or of its partial sums over a split of K.
// x: [M, K]; weights: [blocks, N, COLUMNS] 16-bit words, or [N, K]; scales: [blocks, N, SCALES]
// words, [N] fp32 or none; squares: [parts, M] fp32 as in `ops.fused.Unscaled`, or none
// y: [M, N] or [splits, M, N]; with GATED [M, N / 2]. Writes: y.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    streamed_product(const unsigned char* x, const unsigned char* weights, const u32* scales,
                     const float* squares, void* y, int M, int N, int K, int parts, int F) {
    extern __shared__ Words shared[];
    unsigned char* ring = reinterpret_cast<unsigned char*>(shared);
    int tile = blockIdx.y;
    int split = blockIdx.z;
    int blocks = (K + BLOCK - 1) / BLOCK;
    int splits = gridDim.z;
    int begin = split * blocks / splits;
    int end = (split + 1) * blocks / splits;
    for (int ahead = 0; ahead < STAGES - 1; ahead++) {
        unsigned char* stage = ring + ahead * STAGE_BYTES;
        if (begin + ahead < end) {
            fetch_weights(stage, weights, scales, begin + ahead, tile, N, K);
        }
        end_of_copies();
    }
    after_others();
    for (int ahead = 0; ahead < STAGES - 1 && begin + ahead < end; ahead++) {
        fetch_x<true>(ring + ahead * STAGE_BYTES, x, begin + ahead, M, K);
    }
    float* factors = reinterpret_cast<float*>(ring + FACTORS_AT);
    if (squares) find_factors(factors, squares, M, parts, F);
    float total[MT][NT][4] = {};
    for (int block = begin; block < end; block++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();  // the copies of all threads are there, and the block before is done with
        int next = block + STAGES - 1;
        if (next < end) {
            unsigned char* stage = ring + (next - begin) % STAGES * STAGE_BYTES;
            fetch_weights(stage, weights, scales, next, tile, N, K);
            fetch_x<false>(stage, x, next, M, K);
        }
        end_of_copies();
        add_block(total, ring + (block - begin) % STAGES * STAGE_BYTES);
    }
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) {  // columns 2 t and 2 t + 1 of a tile of 8 tokens
        int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
        int token = blockIdx.x * TOKENS + column;
        if (token >= M) continue;
        float factor = squares ? factors[column] : 1;
#pragma unroll
        for (int m = 0; m < MT; m++) {
            int r = (threadIdx.x / 32 * MT + m) * 16 + lane / 4;
            float upper = total[m][i / 2][i % 2] * factor;
            float lower = total[m][i / 2][i % 2 + 2] * factor;
            if (BITS == 8) {
                upper *= as_float(scales[row_of(tile, r, N)]);
                lower *= as_float(scales[row_of(tile, r + 8, N)]);
            }
            if (GATED) {
                int output = tile * (ROWS / 2) + r / 16 * 8 + r % 8;
                float gated = upper / (1 + expf(-upper)) * lower;
                if (output < N / 2) store(y, token * (N / 2LL) + output, gated);
            } else {
                long long at = (static_cast<long long>(split) * M + token) * N;
                int output = tile * ROWS + r;
                if (output < N) store(y, at + output, upper);
                if (output + 8 < N) store(y, at + output + 8, lower);
            }
        }
    }
}
