// Run streamed.cu on a processor: every block of a grid, one after the other.

#define ON_CPU
#include "cuda_on_cpu.h"
#include "../../ops/cuda/streamed.cu"

Words shared[STAGES * STAGE_BYTES / 16 + TOKENS / 4];

static const unsigned char* x;
static const unsigned char* weights;
static const u32* scales;
static const float* squares;
static void* y;
static int sizes[6];

// sizes: M, N, K, parts, F, splits. Returns: the number of copies out of x that came too early.
extern "C" int run(const void* x_, const void* weights_, const void* scales_, const void* squares_,
                   void* y_, const int* sizes_) {
    x = static_cast<const unsigned char*>(x_);
    weights = static_cast<const unsigned char*>(weights_);
    scales = static_cast<const u32*>(scales_);
    squares = static_cast<const float*>(squares_);
    y = y_;
    std::memcpy(sizes, sizes_, sizeof(sizes));
    int M = sizes[0];
    x_begin = static_cast<const char*>(x_);
    x_end = x_begin + 2LL * M * sizes[2];
    faults = 0;
    gridDim = {(M + TOKENS - 1) / TOKENS, (sizes[1] + ROWS - 1) / ROWS, sizes[5]};
    kernel = [] {
        streamed_product(x, weights, scales, squares, y, sizes[0], sizes[1], sizes[2], sizes[3],
                         sizes[4]);
    };
    for (int i = 0; i < gridDim.x; i++) {
        for (int tile = 0; tile < gridDim.y; tile++) {
            for (int split = 0; split < gridDim.z; split++) {
                std::memset(static_cast<void*>(shared), 0xff, sizeof(shared));
                run_block({i, tile, split}, THREADS);
            }
        }
    }
    return faults;
}
