// Matmuls on the tiles of Intel's AMX, or on an emulation of them with the same bits.
//
// A tile has up to 16 rows of 64 bytes. An instruction computes C += A . B: A is [rows, k], B holds
// the k of a column side by side, [k / 2, columns, 2] in bfloat16, [k / 4, columns, 4] in bytes, C
// is [rows, columns] of 32 bits.
// 1. `use_tiles` chooses the unit (tiles.py): the hardware needs the processor, the system and its
//    permission.
// 2. Every piece of a loop loads a configuration and releases it: no state lives longer, so threads
//    that are new, forked children and libraries with configurations of their own do not matter.
// 3. `dot_groups`, for dot_amx.h: A is rows of activations, B codes of 16 outputs, C [rows,
//    outputs].
// 4. `multiply_bf16`: A is 16 outputs of a weight where it lies, B the rows, transposed once, C
//    [outputs, rows]. A row's result does not depend on the other rows, bit for bit: each element
//    of C is a sum of its own.
//
// In bfloat16 the order of sums differs from matmul_bf16.h's (backends/linear.py has both plainly): a
// processor with tiles gives other bits than one without. A prototype of the kernels ran on an
// Emerald Rapids, where the emulation had the bits of the hardware. tiles.py compares them on every
// machine before it chooses the hardware.
#pragma once

#include "experts.h"
#include "operands.h"
#include "simd.h"
#include "threads.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cstdlib>
#include <functional>
#include <new>
#include <string>
#include <type_traits>

#if defined(__x86_64__) && defined(__linux__) && \
    !defined(NO_TILES)  // NO_TILES: the assembler does not know them
#define HAS_TILES
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace amx {
namespace {

// -------------------------------------------------------------------------------------------- unit

constexpr int64_t ROWS = 16, BYTES = 64;  // of a tile

// Memory that begins at a cache line: a tile's row that crosses one costs two.
template <class T> struct AtLine {
  using value_type = T;
  AtLine() = default;
  template <class U> AtLine(const AtLine<U>&) {}
  T* allocate(size_t n) {
    return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(BYTES)));
  }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(BYTES)); }
  bool operator==(const AtLine&) const { return true; }
};

struct alignas(64) Config {  // the operand of ldtilecfg
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row of each tile; there are 8
  uint8_t rows[16] = {};
  void set(int tile, int64_t of_rows, int64_t of_bytes) {
    rows[tile] = uint8_t(of_rows);
    bytes[tile] = uint16_t(of_bytes);
  }
};

#ifdef HAS_TILES
// Asm, as gcc 12's intrinsics do not tell the compiler which memory they read: it drops or moves
// the stores before them.
struct Hardware {
  static void configure(const Config& c) { asm volatile("ldtilecfg %0" ::"m"(c) : "memory"); }
  static void release() { asm volatile("tilerelease" ::: "memory"); }
  template <int T> static void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
  template <int T> static void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int T> static void store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int C, int A, int B> static void dot_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  template <int C, int A, int B> static void dot_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};
#endif

// It ends the program where the hardware would: without a configuration, and where tiles do not fit
// each other.
struct Emulation {
  struct State {
    Config config;
    uint8_t tile[8][ROWS][BYTES];
  };
  static State& state() {
    static thread_local State of_thread{{0}, {}};
    return of_thread;
  }
  inline static std::atomic<int64_t> configured{0}, released{0};  // times, for tests
  static void configure(const Config& c) {
    state() = {c, {}};
    configured++;
  }
  static void release() {
    state() = {{0}, {}};
    released++;
  }
  static void require(bool condition) {
    if (!condition) std::abort();
  }
  template <int T> static void zero() {
    require(state().config.rows[T] > 0);
    std::memset(state().tile[T], 0, ROWS * BYTES);
  }
  template <int C, int A, int B> static void check_shapes() {
    const Config& c = state().config;
    require(c.rows[C] > 0 && c.rows[C] == c.rows[A] && c.bytes[C] == c.bytes[B] &&
            c.bytes[A] == 4 * c.rows[B]);
  }
  template <int T> static void load(const void* p, int64_t stride) {
    const Config& c = state().config;
    zero<T>();
    for (int r = 0; r < c.rows[T]; r++)
      std::memcpy(state().tile[T][r], (const char*)p + r * stride, c.bytes[T]);
  }
  template <int T> static void store(void* p, int64_t stride) {
    const Config& c = state().config;
    require(c.rows[T] > 0);
    for (int r = 0; r < c.rows[T]; r++)
      std::memcpy((char*)p + r * stride, state().tile[T][r], c.bytes[T]);
  }

  // A is signed, B unsigned.
  template <int C, int A, int B> static void dot_bytes() {
    check_shapes<C, A, B>();
    State& s = state();
    for (int m = 0; m < s.config.rows[C]; m++) {
      int32_t sum[BYTES / 4];
      std::memcpy(sum, s.tile[C][m], sizeof sum);
      for (int i = 0; i < s.config.bytes[A]; i++) {
        const int32_t a = int8_t(s.tile[A][m][i]);
        const uint8_t* b = s.tile[B][i / 4] + i % 4;
        for (int n = 0; n < BYTES / 4; n++) sum[n] += a * b[4 * n];
      }
      std::memcpy(s.tile[C][m], sum, sizeof sum);
    }
  }

  // Numbers below 2^-126 count as zeros of their sign, as operands and as results.
  static float flushed(float v) { return std::fabs(v) < FLT_MIN ? std::copysign(0.0f, v) : v; }
  static float number(uint32_t bits) {
    float v;
    std::memcpy(&v, &bits, 4);
    return flushed(v);
  }
  // An element has a chain of the even k and one of the odd k, of fused multiply-adds; then C +=
  // even + odd.
  template <int C, int A, int B> static void dot_pairs() {
    constexpr int COLUMNS = BYTES / 4;
    check_shapes<C, A, B>();
    State& s = state();
    uint32_t a[COLUMNS], b[ROWS][COLUMNS];
    std::memcpy(b, s.tile[B], sizeof b);
    for (int m = 0; m < s.config.rows[C]; m++) {
      float even[COLUMNS] = {}, odd[COLUMNS] = {}, sum[COLUMNS];
      std::memcpy(a, s.tile[A][m], sizeof a);
      std::memcpy(sum, s.tile[C][m], sizeof sum);
      for (int i = 0; i < s.config.bytes[A] / 4; i++) {
        const float first = number(a[i] << 16), second = number(a[i] & 0xffff0000);
        for (int n = 0; n < COLUMNS; n++)
          even[n] = flushed(std::fma(first, number(b[i][n] << 16), even[n]));
        for (int n = 0; n < COLUMNS; n++)
          odd[n] = flushed(std::fma(second, number(b[i][n] & 0xffff0000), odd[n]));
      }
      for (int n = 0; n < COLUMNS; n++)
        sum[n] = flushed(flushed(sum[n]) + flushed(even[n] + odd[n]));
      std::memcpy(s.tile[C][m], sum, sizeof sum);
    }
  }
};

enum class Unit { NONE, HARDWARE, EMULATION };
std::atomic<Unit> unit{Unit::NONE};

inline bool in_use() { return unit.load(std::memory_order_relaxed) != Unit::NONE; }

// Calls f with the unit in use.
template <class F> void with_unit(const F& f) {
#ifdef HAS_TILES
  if (unit.load(std::memory_order_relaxed) == Unit::HARDWARE) return f(Hardware{});
#endif
  f(Emulation{});
}

// Asks for the hardware. All threads of the process may use it then, and children that it forks.
// The processor may show tiles that its system (Linux before 5.16, a sandbox) does not save or
// refuses.
bool allowed() {
#ifdef HAS_TILES
  constexpr unsigned SAVES = 1u << 27, PAIRS = 1u << 22, TILES = 1u << 24, DOTS = 1u << 25,
                     STATE = 3u << 17;
  constexpr long GRANTED = 0x1022, REQUEST = 0x1023, DATA = 18;  // of arch_prctl
  unsigned a, b, c, d, low, high;
  if (!__get_cpuid_count(1, 0, &a, &b, &c, &d) || !(c & SAVES)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (~d & (PAIRS | TILES | DOTS))) return false;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if (~low & STATE) return false;
  unsigned long granted = 0;
  return !syscall(SYS_arch_prctl, REQUEST, DATA) && !syscall(SYS_arch_prctl, GRANTED, &granted) &&
         (granted >> DATA & 1);
#else
  return false;
#endif
}

// ---------------------------------------------------------------------------------------- products
// of bytes

constexpr int64_t GROUP_SUMS = ROWS * 32;  // of a group of k, [rows, 32 outputs]

// The configuration of `dot_groups`. k: of a group, 16, 32, 64 or 128
inline Config shape_of_groups(int64_t rows, int64_t k) {
  Config config;
  for (int c : {0, 1, 2, 3}) config.set(c, rows, BYTES);
  config.set(4, rows, std::min(k, BYTES));
  for (int b : {5, 6}) config.set(b, std::min(k / 4, ROWS), BYTES);
  return config;
}

// Computes the sums of `count` groups of k. x: each group's signed codes of rows, `line` bytes
// apart; w: each group's unsigned codes of 32 outputs, [k / 4, 32, 4]. Two sets of C take turns, so
// that no store waits for its products. Calls fetch() once a group.
template <class Unit, class Fetch>
void dot_groups(const int8_t* const* x, int64_t line, const uint8_t* const* w, int64_t k,
                int64_t count, int32_t* sums, const Fetch& fetch) {
  constexpr int64_t STEP_BYTES = 2 * BYTES;
  const auto dot = [&]<int C>(std::integral_constant<int, C>, int64_t g) {
    Unit::template zero<C>();
    Unit::template zero<C + 1>();
    for (int64_t done = 0; done < k; done += BYTES) {
      const uint8_t* codes = w[g] + done / 4 * STEP_BYTES;
      Unit::template load<4>(x[g] + done, line);
      Unit::template load<5>(codes, STEP_BYTES);
      Unit::template load<6>(codes + BYTES, STEP_BYTES);
      Unit::template dot_bytes<C, 4, 5>();
      Unit::template dot_bytes<C + 1, 4, 6>();
    }
  };
  const auto put = [&]<int C>(std::integral_constant<int, C>, int64_t g) {
    fetch();
    Unit::template store<C>(sums + g * GROUP_SUMS, STEP_BYTES);
    Unit::template store<C + 1>(sums + g * GROUP_SUMS + BYTES / 4, STEP_BYTES);
  };
  const std::integral_constant<int, 0> even;
  const std::integral_constant<int, 2> odd;
  dot(even, 0);
  for (int64_t g = 0; g < count; g += 2) {
    if (g + 1 < count) dot(odd, g + 1);
    put(even, g);
    if (g + 2 < count) dot(even, g + 2);
    if (g + 1 < count) put(odd, g + 1);
  }
}

// ------------------------------------------------------------------------------------- products in
// bfloat16

using Value = at::BFloat16;
struct alignas(64) Line {
  float sums[ROWS];
};

constexpr int64_t STRIP = 2 * ROWS;  // outputs: two tiles of weights for every tile of rows
constexpr int64_t STEP = 32;         // k of an instruction
constexpr int64_t PANEL = 16;        // steps that more than 32 rows pass over at a time
constexpr int64_t SEVERAL =
    8;  // strips that more than 64 rows pass over meanwhile: 32 rows stay in L1
constexpr int64_t MOST_BLOCKS = 16;  // of rows, at a time
constexpr int64_t GRAIN =
    1 << 19;  // bytes of weights, or as much work, that pay for a thread's wake-up

struct Matrices {
  const Value *x, *w;  // [rows, k], [experts, n, k]
  int64_t n, k;
  int64_t expert_values;  // from an expert's weight to the next one's
  int64_t steps() const { return (k + STEP - 1) / STEP; }
};

// A group's rows as B tiles, [blocks, steps, 16 pairs, height, 2], padded with zeros: blocks of one
// height, as a configuration has one.
struct Columns {
  const Group* group;
  int64_t blocks, height;
  const Line* tiles;
  int64_t rows(int64_t block) const {
    return std::clamp<int64_t>(group->rows - block * height, 0, height);
  }
};

// Takes the sums of a row, at a place in the order, with `count` outputs; they lie `stride` apart.
using Put = std::function<void(const Group&, int64_t place, int64_t output, const float* sums,
                               int64_t stride, int64_t count)>;

void transpose(const Matrices& of, const Order& order, const Columns& columns, Line* tiles) {
  const int64_t steps = of.steps(), height = columns.height;
  const auto copy = [&](int64_t block, int64_t step, uint32_t* to) {
    const int64_t size = std::min(STEP, of.k - step * STEP);
    for (int64_t m = 0; m < height; m++) {
      Value pairs[STEP] = {};
      if (m < columns.rows(block))
        std::copy_n(
            of.x + order.row[columns.group->first + block * height + m] * of.k + step * STEP, size,
            pairs);
      for (int64_t i = 0; i < STEP / 2; i++) std::memcpy(to + i * height + m, pairs + 2 * i, 4);
    }
  };
  parallel(columns.blocks * steps, std::max<int64_t>(1, GRAIN / 16 / (BYTES * height)),
           [&](int64_t begin, int64_t end) {
             for (int64_t i = begin; i < end; i++)
               copy(i / steps, i % steps, (uint32_t*)(tiles + i * height));
           });
}

// Adds `steps` steps to the sums of two tiles of outputs and of one or two blocks of rows, [blocks,
// 2, 16, height]. w: of both tiles, outputs `line` bytes apart; x: of the first block, the second
// is `next` behind; first: sums begin at 0
template <class Unit, bool TWO>
void add_steps(const Value* const (&w)[2], int64_t line, const Line* x, int64_t next, int64_t steps,
               int64_t height, bool first, float* sums) {
  const int64_t size = ROWS * height, row = height * 4;
  const char *left = (const char*)w[0], *right = (const char*)w[1];
  Unit::template zero<0>();
  Unit::template zero<1>();
  if (TWO) {
    Unit::template zero<2>();
    Unit::template zero<3>();
  }
  if (!first) {
    Unit::template load<0>(sums, row);
    Unit::template load<1>(sums + size, row);
    if (TWO) {
      Unit::template load<2>(sums + 2 * size, row);
      Unit::template load<3>(sums + 3 * size, row);
    }
  }
  for (int64_t s = 0; s < steps; s++, left += BYTES, right += BYTES, x += height) {
    Unit::template load<6>(x, row);
    Unit::template load<4>(left, line);
    Unit::template dot_pairs<0, 4, 6>();
    Unit::template load<5>(right, line);
    Unit::template dot_pairs<1, 5, 6>();
    if (TWO) {
      Unit::template load<7>(x + next, row);
      Unit::template dot_pairs<2, 4, 7>();
      Unit::template dot_pairs<3, 5, 7>();
    }
  }
  Unit::template store<0>(sums, row);
  Unit::template store<1>(sums + size, row);
  if (TWO) {
    Unit::template store<2>(sums + 2 * size, row);
    Unit::template store<3>(sums + 3 * size, row);
  }
}

// Strips first .. last of the outputs, and some blocks of a group's rows.
template <class Unit> class Strips {
 public:
  Strips(const Matrices& of, const Columns& columns)
      : of(of), columns(columns), height(columns.height), outputs(std::min(ROWS, of.n)) {
    Config config;
    for (int c : {0, 1, 2, 3}) config.set(c, outputs, height * 4);
    for (int a : {4, 5}) config.set(a, outputs, BYTES);
    for (int b : {6, 7}) config.set(b, ROWS, height * 4);
    Unit::configure(config);
  }
  ~Strips() { Unit::release(); }

  // first: the block of rows
  void multiply(int64_t begin, int64_t end, int64_t first, int64_t blocks, const Put& put) {
    static thread_local std::vector<Line> kept;  // its memory is kept from call to call
    const int64_t several = blocks > 4 ? SEVERAL : 1,
                  size = blocks * 2 * height;  // lines of a strip
    if (int64_t(kept.size()) < several * size) kept.resize(several * size);
    const int64_t steps = of.steps(), whole = of.k / STEP, panel = blocks > 2 ? PANEL : steps;
    for (int64_t strip = begin; strip < end; strip += several) {
      const int64_t count = std::min(several, end - strip);
      for (int64_t step = 0, next; step < steps; step = next) {
        next = step < whole ? std::min(step + panel, whole) : steps;
        for (int64_t b = 0; b < blocks; b += 2)
          for (int64_t s = 0; s < count; s++)
            add(strip + s, first + b, std::min<int64_t>(2, blocks - b), step, next,
                kept[s * size + b * 2 * height].sums);
      }
      for (int64_t s = 0; s < count; s++)
        put_strip(strip + s, first, blocks, kept[s * size].sums, put);
    }
  }

 private:
  // The first output of a tile of a strip: the last tiles overlap those before, and never leave the
  // weight.
  int64_t output_of(int64_t strip, int64_t half) const {
    return std::min(strip * STRIP + half * ROWS, of.n - outputs);
  }

  void add(int64_t strip, int64_t block, int64_t blocks, int64_t step, int64_t end, float* sums) {
    const Value* w[2];
    int64_t line = of.k;
    for (int64_t half = 0; half < 2; half++) {
      w[half] = of.w + columns.group->expert * of.expert_values + output_of(strip, half) * of.k +
                step * STEP;
      if (end * STEP <= of.k) continue;
      for (int64_t o = 0; o < outputs; o++)
        std::copy_n(w[half] + o * of.k, of.k - step * STEP, padded[half][o]);
      w[half] = padded[half][0];
      line = STEP;
    }
    const int64_t next = of.steps() * height;
    const Line* x = columns.tiles + block * next + step * height;
    const auto run = blocks == 2 ? add_steps<Unit, true> : add_steps<Unit, false>;
    run(w, line * sizeof(Value), x, next, end - step, height, step == 0, sums);
  }

  void put_strip(int64_t strip, int64_t first, int64_t blocks, const float* sums, const Put& put) {
    for (int64_t b = first; b < first + blocks; b++)
      for (int64_t half = 0; half < 2; half++, sums += ROWS * height) {
        const int64_t output = output_of(strip, half),
                      skipped = strip * STRIP + half * ROWS - output;
        for (int64_t m = 0; m < columns.rows(b) && skipped < outputs; m++)
          put(*columns.group, columns.group->first + b * height + m, output + skipped,
              sums + skipped * height + m, height, outputs - skipped);
      }
  }

  const Matrices& of;
  const Columns& columns;
  const int64_t height, outputs;
  alignas(64)
      Value padded[2][ROWS][STEP] = {};  // weights of the last step, where k is no multiple of one
};

// Multiplies rows by the weights of their experts, and calls `put` on several threads.
void multiply_bf16(const Matrices& of, const Order& order, const Put& put) {
  static thread_local std::vector<Line> kept;
  std::vector<Columns> all;
  int64_t lines = 0, work = 0;  // work: of a strip
  for (const Group& group : order.groups) {
    const int64_t blocks = (group.rows + ROWS - 1) / ROWS,
                  height = (group.rows + blocks - 1) / blocks;
    all.push_back({&group, blocks, height, nullptr});
    lines += blocks * of.steps() * height;
    work += STRIP * of.k * sizeof(Value) * (1 + group.rows / 64);
  }
  if (int64_t(kept.size()) < lines) kept.resize(lines);
  Line* tiles = kept.data();
  for (Columns& columns : all) {
    columns.tiles = tiles;
    transpose(of, order, columns, tiles);
    tiles += columns.blocks * of.steps() * columns.height;
  }
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, work));
  parallel((of.n + STRIP - 1) / STRIP, grain, [&](int64_t begin, int64_t end) {
    with_unit([&]<class Unit>(Unit) {
      for (const Columns& columns : all) {
        Strips<Unit> strips(of, columns);
        for (int64_t first = 0; first < columns.blocks; first += MOST_BLOCKS)
          strips.multiply(begin, end, first, std::min(MOST_BLOCKS, columns.blocks - first), put);
      }
    });
  });
}

}  // namespace

// Chooses the unit of matmuls: none, hardware or emulation. Returns: whether it may be used;
// else none is.
bool use_tiles(std::string name) {
  const Unit wanted = name == "hardware"    ? Unit::HARDWARE
                      : name == "emulation" ? Unit::EMULATION
                                            : Unit::NONE;
  TORCH_CHECK(wanted != Unit::NONE || name == "none",
              "tiles are none, hardware or emulation; they cannot be ", name);
  const bool refused = wanted == Unit::HARDWARE && !allowed();
  unit.store(refused ? Unit::NONE : wanted, std::memory_order_relaxed);
  return !refused;
}

// Returns the name of the unit, and how often the emulation was configured and released.
std::tuple<std::string, int64_t, int64_t> tiles() {
  constexpr const char* names[] = {"none", "hardware", "emulation"};
  return {names[int(unit.load(std::memory_order_relaxed))], Emulation::configured,
          Emulation::released};
}

}  // namespace amx
