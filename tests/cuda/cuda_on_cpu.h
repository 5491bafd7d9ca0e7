// The machine's part of streamed.cu on a processor: the threads of a block are fibers.
//
// 1. A fiber runs until it meets the others: __syncthreads for the block, a product for its warp.
// 2. A copy takes place as late as it may, when its group is waited for; until then its target is
//    NaN, so that what is read too early, or overwritten too early, is seen in the result.
// 3. Copies out of x before `after_others` are counted as faults.

#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

using std::min;
using u32 = unsigned int;

#define __device__ static
#define __global__
#define __shared__
#define __launch_bounds__(threads, blocks)

struct Index {
    int x, y, z;
};

struct Copy {
    void* to;
    const void* from;
    int bytes;  // the rest of 16 is zeros
    int all;
};

struct Meeting {
    int members = 0;
    int arrived = 0;
    int round = 0;
};

struct Warp {
    Meeting meeting;
    float a[16][16], b[16][8];
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    std::deque<std::vector<Copy>> groups{1};  // the last one is not ended yet
    bool waited = false;
    bool done = false;
};

static Index threadIdx, blockIdx, gridDim;
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static Meeting block_meeting;
static ucontext_t scheduler;
static const char* x_begin;
static const char* x_end;
static int faults;  // copies of x before `after_others`

static Fiber& here() { return fibers[threadIdx.x]; }

static void meet(Meeting& meeting) {
    int round = meeting.round;
    if (++meeting.arrived == meeting.members) {
        meeting.arrived = 0;
        meeting.round++;
    }
    int thread = threadIdx.x;
    while (meeting.round == round) {
        swapcontext(&fibers[thread].context, &scheduler);
    }
}

static void __syncthreads() { meet(block_meeting); }

static float as_float(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static float rsqrtf(float x) { return 1 / std::sqrt(x); }

static float widened(u32 half) {
#if HALF
    unsigned short bits = half;
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return value;
#else
    return as_float(half << 16);
#endif
}

static unsigned short to_16_bits(float x) {
#if HALF
    _Float16 value = x;
    unsigned short bits;
    std::memcpy(&bits, &value, 2);
    return bits;
#else
    u32 bits;
    std::memcpy(&bits, &x, 4);
    if (std::isnan(x)) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
}

static u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 low = to_16_bits(std::fma(widened(a & 0xffff), widened(b & 0xffff), widened(c & 0xffff)));
    u32 high = to_16_bits(std::fma(widened(a >> 16), widened(b >> 16), widened(c >> 16)));
    return high << 16 | low;
}

// The fragments are those of mma.m16n8k16 in the PTX manual.
static void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    Warp& warp = warps[threadIdx.x / 32];
    int g = threadIdx.x % 32 / 4;
    int t = threadIdx.x % 4;
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < 4; i++) {
            warp.a[g + i % 2 * 8][2 * t + i / 2 * 8 + half] = widened(a[i] >> 16 * half & 0xffff);
        }
        warp.b[2 * t + half][g] = widened(b0 >> 16 * half & 0xffff);
        warp.b[2 * t + 8 + half][g] = widened(b1 >> 16 * half & 0xffff);
    }
    meet(warp.meeting);
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < 16; k++) c[i] += warp.a[g + i / 2 * 8][k] * warp.b[k][2 * t + i % 2];
    }
    meet(warp.meeting);
}

static void check_turn(const void* from) {
    faults += from >= x_begin && from < x_end && !here().waited;
}

static void begin_copy(Copy copy) {
    if (copy.bytes) check_turn(copy.from);
    std::memset(copy.to, 0xff, copy.all);
    here().groups.back().push_back(copy);
}

static void copy_16(void* to, const void* from, int valid) { begin_copy({to, from, valid, 16}); }
static void copy_16_now(void* to, const void* from, bool valid) {
    std::memset(to, 0, 16);
    if (!valid) return;
    check_turn(from);
    std::memcpy(to, from, 16);
}
static void copy_4(void* to, const void* from) { begin_copy({to, from, 4, 4}); }
static void end_of_copies() { here().groups.emplace_back(); }
static void after_others() { here().waited = true; }

template <int PENDING>
static void wait_for_copies() {
    auto& groups = here().groups;
    while (groups.size() > PENDING + 1) {
        for (Copy& copy : groups.front()) {
            std::memset(copy.to, 0, copy.all);
            std::memcpy(copy.to, copy.from, copy.bytes);
        }
        groups.pop_front();
    }
}

static void (*kernel)();

static void run_fiber() {
    kernel();
    here().done = true;
}

// Runs one block to its end.
static void run_block(Index block, int threads) {
    blockIdx = block;
    fibers = std::vector<Fiber>(threads);
    warps = std::vector<Warp>(threads / 32);
    for (Warp& warp : warps) warp.meeting.members = 32;
    block_meeting = {threads};
    for (Fiber& fiber : fibers) {
        constexpr int STACK = 1 << 16;
        fiber.stack.reset(new char[STACK]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, run_fiber, 0);
    }
    for (bool running = true; running;) {
        running = false;
        for (int thread = 0; thread < threads; thread++) {
            threadIdx.x = thread;
            if (fibers[thread].done) continue;
            running = true;
            swapcontext(&scheduler, &fibers[thread].context);
        }
    }
}
