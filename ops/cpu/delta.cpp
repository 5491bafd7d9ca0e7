// The recurrence of GatedDeltaNet on a CPU: `delta_rule` of ops/torch_backend.py.
//
// 1. The rows of a sequence are the accepted nodes of the last pass, then the nodes of this one.
//    Every row is convolved with the rows before it on its path.
// 2. Every head goes through the rows in order, heads on several threads. The first rows go into
//    the kept state, in place. A node of a tree reads its parent's state; a leaf makes none, and a
//    last child takes its parent's memory, so that a chain needs one state and a tree one per
//    branch that is open.
// 3. The inputs of nodes that may be dropped are saved for the next pass.
//
// Sums run over keys in one order, for columns side by side: a node's bits depend on its path alone.

#include "delta.h"

#include "exponential.h"
#include "numbers.h"
#include "operands.h"
#include "operators.h"
#include "simd.h"
#include "threads.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

namespace delta {
namespace {

const float* rows_of(const at::Tensor& t) { return t.const_data_ptr<float>(); }

constexpr int64_t TAPS = 4;        // kv_cache.TAPS
constexpr int64_t GRAIN = 1 << 15;  // elements that pay for a thread's wake-up
constexpr int64_t CHUNK = 256;     // channels that are convolved at once

inline float silu(float x) {
  const float e = exponential(x < 0 ? x : -x);
  return x * ((x < 0 ? e : 1.0f) / (1.0f + e));
}

inline float sigmoid(float x) { return float(1 / (1 + std::exp(-double(x)))); }

// Returns the factor of a state, from A_log, and the input plus dt_bias.
inline float decay_of(float rate, float x) {
  const double soft = x > 20 ? double(x) : std::log1p(std::exp(double(x)));
  return float(std::exp(-std::exp(double(rate)) * soft));
}

float dot(const float* a, const float* b, int64_t n) {
  float sums[32] = {}, total = 0;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32)
    for (int64_t s = 0; s < 32; s++) sums[s] += a[i + s] * b[i + s];
  for (; i < n; i++) sums[0] += a[i] * b[i];
  for (float sum : sums) total += sum;
  return total;
}

// ------------------------------------------------------------------------------------------- states

struct Sizes {
  int64_t keys, values;  // Dk, Dv
  int64_t numbers() const { return keys * values; }
};

// Columns from `first` on of s [Dk, Dv]: their sums by k, and by q unless it is null.
template <int VECTORS>
void read_columns(const float* s, const Sizes& size, int64_t first, const float* k, const float* q,
                  float* by_k, float* by_q) {
  Floats of_k[VECTORS], of_q[VECTORS];
  for (int v = 0; v < VECTORS; v++) of_k[v] = of_q[v] = splat(0.0f);
  for (int64_t i = 0; i < size.keys; i++) {
    const float* row = s + i * size.values + first;
    const Floats key = splat(k[i]), query = splat(q ? q[i] : 0.0f);
    for (int v = 0; v < VECTORS; v++) {
      const Floats held = load(row + v * LANES);
      of_k[v] = multiply_add(held, key, of_k[v]);
      if (q) of_q[v] = multiply_add(held, query, of_q[v]);
    }
  }
  for (int v = 0; v < VECTORS; v++) {
    store(by_k + first + v * LANES, of_k[v]);
    if (q) store(by_q + first + v * LANES, of_q[v]);
  }
}

// s [Dk, Dv] -> the sums of its rows by k, and by q unless it is null: [Dv] each.
void read(const float* s, const Sizes& size, const float* k, const float* q, float* by_k,
          float* by_q) {
  int64_t c = 0;
  for (; c + 4 * LANES <= size.values; c += 4 * LANES)
    read_columns<4>(s, size, c, k, q, by_k, by_q);
  for (; c + LANES <= size.values; c += LANES) read_columns<1>(s, size, c, k, q, by_k, by_q);
  for (; c < size.values; c++) {
    by_k[c] = 0;
    if (q) by_q[c] = 0;
    for (int64_t i = 0; i < size.keys; i++) {
      by_k[c] = std::fma(s[i * size.values + c], k[i], by_k[c]);
      if (q) by_q[c] = std::fma(s[i * size.values + c], q[i], by_q[c]);
    }
  }
}

// from [Dk, Dv] -> to, which may be the same: times `decay`, and k change^T added.
void write(const float* from, float* to, const Sizes& size, float decay, const float* k,
           const float* change) {
  const Floats factor = splat(decay);
  for (int64_t i = 0; i < size.keys; i++) {
    const Floats key = splat(k[i]);
    const float* old = from + i * size.values;
    float* row = to + i * size.values;
    int64_t c = 0;
    for (; c + LANES <= size.values; c += LANES)
      store(row + c, multiply_add(key, load(change + c), multiply(factor, load(old + c))));
    for (; c < size.values; c++) row[c] = std::fma(k[i], change[c], decay * old[c]);
  }
}

// ---------------------------------------------------------------------------------------- the rows

struct Sequence {  // and its rows: `count` of the last pass, then T nodes
  int64_t count;   // accepted nodes of the last pass
  int64_t kept;    // nodes of this pass that are sure to stay
  int64_t first;   // of its rows among those of all sequences
  bool live;       // its state is written
  const float *inputs, *x;
  std::vector<int64_t> parent;    // [T]; -1: behind the prefix
  std::vector<int64_t> children;  // [T], of each node

  // The row before row r along its path, counted from -TAPS + 1, the oldest of the inputs.
  int64_t above(int64_t r) const {
    if (r < count) return r - 1;
    const int64_t p = parent[r - count];
    return p < 0 ? count - 1 : count + p;
  }
};

struct Pass {
  int64_t B, T, H, left, channels, C, width;  // left: R; C: saved inputs; width: of a row of x
  Sizes size;
  std::vector<Sequence> sequences;
  int64_t rows = 0;

  const float* raw(const Sequence& of, int64_t r) const {
    return r < of.count ? of.inputs + (TAPS - 1 + r) * C : of.x + (r - of.count) * width;
  }
};

void link(Sequence& to, const bool* mask, int64_t T, int64_t W) {
  to.parent.assign(T, -1);
  to.children.assign(T, 0);
  for (int64_t t = 0; t < T; t++) {
    int64_t p = t - 1;
    while (p >= 0 && !mask[t * W + p]) p--;
    to.parent[t] = p;
    if (p >= 0) to.children[p]++;
  }
}

// Makes the sequences, and zeroes the states of those that begin.
Pass begin(const at::Tensor& x, const State& state, const Window& window, int64_t channels) {
  const auto sizes = state.state.sizes();
  Pass pass{x.size(0), x.size(1), sizes[1], state.inputs.size(1) - (TAPS - 1), channels,
            state.inputs.size(2), x.size(2), {sizes[2], sizes[3]}, {}};
  const int64_t B = pass.B, T = pass.T, W = window.mask.size(2);
  const Whole slot(window.slots, {B, T}, "slots"), start(window.start, {B}, "start");
  const Truth mask(window.mask, {B, T, W}, "mask");
  const auto kept = optional<int64_t>(window.kept, {B}, "kept");
  int64_t* length = state.length.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < B; b++) {
    const int64_t first = slot[b * T];
    float* inputs = state.inputs.mutable_data_ptr<float>() + b * state.inputs.stride(0);
    if (first == 0) {
      length[b] = 0;
      float* zeros = state.state.mutable_data_ptr<float>() + b * state.state.stride(0);
      std::fill_n(zeros, pass.H * pass.size.numbers(), 0.0f);
      std::fill_n(inputs, (TAPS - 1) * pass.C, 0.0f);
    }
    const bool live = first == start[b];  // else a sequence is done, and its rows are not read
    Sequence to{live ? first - length[b] : 0, live && kept ? (*kept)[b] : 0, pass.rows, live};
    TORCH_CHECK(to.count >= 0 && to.count <= pass.left && to.kept >= 0 && to.kept <= T,
                "a state behind ", length[b], " tokens does not go on at token ", first);
    to.inputs = inputs;
    to.x = rows_of(x) + b * T * pass.width;
    link(to, mask.data + b * T * W, T, W);
    pass.rows += to.count + T;
    pass.sequences.push_back(std::move(to));
  }
  return pass;
}

// Returns queries, keys and values of all rows behind the convolution: [rows, channels].
at::Tensor convolve(const Pass& pass, const float* conv, const at::TensorOptions& options) {
  const at::Tensor mixed = at::empty({pass.rows, pass.channels}, options);
  float* to = mixed.mutable_data_ptr<float>();
  const int64_t chunks = (pass.channels + CHUNK - 1) / CHUNK;
  for (const Sequence& of : pass.sequences) {
    parallel((of.count + pass.T) * chunks, GRAIN / (8 * CHUNK), [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; piece++) {
        const int64_t r = piece / chunks, first = piece % chunks * CHUNK;
        const int64_t last = std::min(pass.channels, first + CHUNK);
        const float* taps[TAPS];  // the row's own, the one before ...
        int64_t at = r;
        for (const float*& tap : taps) {
          tap = pass.raw(of, at);
          at = of.above(at);
        }
        float* y = to + (of.first + r) * pass.channels;
        for (int64_t c = first; c < last; c++) {
          float sum = 0;
          for (int64_t tap = 0; tap < TAPS; tap++)
            sum += taps[tap][c] * conv[c * TAPS + TAPS - 1 - tap];
          y[c] = silu(sum);
        }
      }
    });
  }
  return mixed;
}

// ----------------------------------------------------------------------------------------- a head

// The states of a tree's nodes, in memory that is used again.
class States {
 public:
  explicit States(int64_t numbers) : numbers(numbers) {}

  float* take() {
    if (unused.empty()) {
      every.emplace_back(new float[numbers]);
      return every.back().get();
    }
    float* state = unused.back();
    unused.pop_back();
    return state;
  }
  void give(float* state) { unused.push_back(state); }

 private:
  int64_t numbers;
  std::vector<std::unique_ptr<float[]>> every;
  std::vector<float*> unused;
};

class Head {  // of one sequence
 public:
  Head(const Pass& pass, const Sequence& of, int64_t h, const float* mixed, const Weights& weights)
      : pass(pass), of(of), h(h), mixed(mixed), weights(weights), size(pass.size),
        numbers(2 * size.keys + 3 * size.values) {}

  // Runs all rows from the state on. Writes: the state, behind the nodes that stay; y [T, H Dv].
  void run(float* state, States& states, float* y) {
    for (int64_t r = 0; r < of.count; r++) {
      recall(r, state, nullptr);
      write(state, state, size, decay, k(), change());
    }
    for (int64_t t = 0; t < of.kept; t++) {
      recall(of.count + t, state, y + t * pass.H * size.values);
      write(state, state, size, decay, k(), change());
    }
    grow(state, states, y);
  }

 private:
  const Pass& pass;
  const Sequence& of;
  int64_t h;
  const float* mixed;
  const Weights& weights;
  const Sizes size;
  std::vector<float> numbers;  // q, k [Dk]; change, by_k, by_q [Dv]
  float decay = 0;

  float* q() { return numbers.data(); }
  float* k() { return q() + size.keys; }
  float* change() { return k() + size.keys; }

  // Runs the nodes that may be dropped.
  void grow(float* kept, States& states, float* y) {
    std::vector<float*> own(pass.T);
    std::vector<int64_t> waiting = of.children;  // children that did not run
    for (int64_t t = of.kept; t < pass.T; t++) {
      const int64_t p = of.parent[t];
      const bool is_first = p < of.kept;
      float* above = is_first ? kept : own[p];
      recall(of.count + t, above, y + t * pass.H * size.values);
      const bool is_last_child = !is_first && --waiting[p] == 0;
      if (waiting[t]) {
        own[t] = is_last_child ? above : states.take();
        write(above, own[t], size, decay, k(), change());
      } else if (is_last_child) {
        states.give(above);
      }
    }
  }

  // Makes q, k, change and decay of a row behind a state, and the row's output unless y is null.
  void recall(int64_t r, const float* state, float* y) {
    const float* row = mixed + (of.first + r) * pass.channels;
    const int64_t keys = (pass.channels - pass.H * size.values) / 2;
    const int64_t group = h * keys / (pass.H * size.keys);  // of keys
    to_unit(row + group * size.keys, 1 / std::sqrt(float(size.keys)), q());
    to_unit(row + keys + group * size.keys, 1.0f, k());
    const float* v = row + 2 * keys + h * size.values;
    const float* raw = pass.raw(of, r) + pass.channels;
    const float* gates = rows_of(weights.gates);
    const float beta = sigmoid(raw[h]);
    decay = decay_of(gates[h], raw[pass.H + h] + gates[pass.H + h]);
    float *by_k = change() + size.values, *by_q = by_k + size.values;
    read(state, size, k(), y ? q() : nullptr, by_k, by_q);
    for (int64_t c = 0; c < size.values; c++) change()[c] = (v[c] - decay * by_k[c]) * beta;
    if (!y) return;
    const float together = dot(k(), q(), size.keys);
    for (int64_t c = 0; c < size.values; c++)
      by_q[c] = decay * by_q[c] + change()[c] * together;
    const float* gate = pass.raw(of, r) + pass.C + h * size.values;
    const float* gain = rows_of(weights.gain);
    const float mean = sum_of_squares(by_q, size.values) / float(size.values);
    const float scale = 1.0f / std::sqrt(mean + float(weights.eps));
    for (int64_t c = 0; c < size.values; c++)
      y[h * size.values + c] = by_q[c] * scale * gain[c] * silu(gate[c]);
  }

  void to_unit(const float* x, float factor, float* y) const {
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, size.keys) + 1e-6f) * factor;
    for (int64_t i = 0; i < size.keys; i++) y[i] = x[i] * scale;
  }
};

// Saves the inputs of the nodes that may be dropped, and of the tokens before them.
void save(const Pass& pass, const Sequence& of, float* inputs) {
  for (int64_t i = 0; i < TAPS - 1 + pass.left; i++) {
    const int64_t r = of.count + of.kept + i - (TAPS - 1);  // sources lie behind what is written
    if (r >= of.count + pass.T) break;
    const float* from = pass.raw(of, r);
    if (from != inputs + i * pass.C) std::copy_n(from, pass.C, inputs + i * pass.C);
  }
}

}  // namespace

at::Tensor delta_rule(const at::Tensor& x, const State& state, const Window& window,
                      const Weights& weights) {
  const auto sizes = state.state.sizes();
  TORCH_CHECK(x.dim() == 3 && sizes.size() == 4 && state.inputs.dim() == 3, "x must be [B, T, W]");
  const int64_t B = x.size(0), T = x.size(1), H = sizes[1], Dv = sizes[3];
  const int64_t channels = weights.conv.size(0), C = channels + 2 * H;
  for (const at::Tensor& t : {x, weights.conv, weights.gates, weights.gain, state.inputs, state.state})
    TORCH_CHECK(t.scalar_type() == at::kFloat, "operands must be float32");
  for (const at::Tensor& t : {weights.conv, weights.gates, weights.gain, state.length})
    TORCH_CHECK(t.is_contiguous(), "weights must be in one piece");
  TORCH_CHECK(x.size(2) == C + H * Dv && state.inputs.size(2) == C && sizes[0] == B &&
                  state.inputs.size(0) == B && weights.conv.size(1) == TAPS &&
                  state.inputs.size(1) >= TAPS - 1 && weights.gates.numel() == 2 * H &&
                  weights.gain.numel() == Dv && state.length.numel() == B,
              "the state has other sizes than the layer");
  TORCH_CHECK(state.state[0].is_contiguous() && state.inputs[0].is_contiguous(),
              "the buffers of a sequence must be in one piece");
  RECORD_FUNCTION("gpt_eagle::delta_rule", std::vector<c10::IValue>{});
  const at::Tensor y = at::empty({B, T, H * Dv}, x.options());
  const at::Tensor whole = x.contiguous();
  const Pass pass = begin(whole, state, window, channels);
  const at::Tensor mixed = convolve(pass, rows_of(weights.conv), x.options());
  const int64_t work = pass.rows / B * pass.size.numbers();
  float* states = state.state.mutable_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  parallel(B * H, std::max<int64_t>(1, GRAIN / work), [&](int64_t begin, int64_t end) {
    States unused(pass.size.numbers());
    for (int64_t i = begin; i < end; i++) {
      const Sequence& of = pass.sequences[i / H];
      float* own = states + i / H * state.state.stride(0) + i % H * pass.size.numbers();
      float* head = own;
      if (!of.live) {
        head = unused.take();
        std::copy_n(own, pass.size.numbers(), head);
      }
      Head(pass, of, i % H, rows_of(mixed), weights).run(head, unused, to + i / H * T * H * Dv);
      if (!of.live) unused.give(head);
    }
  });
  for (int64_t b = 0; b < B; b++) {
    const Sequence& of = pass.sequences[b];
    if (!of.live) continue;
    save(pass, of, const_cast<float*>(of.inputs));
    state.length.mutable_data_ptr<int64_t>()[b] += of.count + of.kept;
  }
  return y;
}

namespace {

at::Tensor as_operator(const at::Tensor& x, const at::Tensor& state, const at::Tensor& inputs,
                       const at::Tensor& length, const at::Tensor& slots, const at::Tensor& start,
                       const at::Tensor& mask, const std::optional<at::Tensor>& kept,
                       const at::Tensor& conv, const at::Tensor& gates, const at::Tensor& gain,
                       double eps) {
  return delta_rule(x, {state, inputs, length}, {slots, start, mask, kept},
                    {conv, gates, gain, eps});
}

}  // namespace

OPERATORS(m) {
  m.def(
      "delta_rule(Tensor x, Tensor(a!) state, Tensor(b!) inputs, Tensor(c!) length, Tensor slots, "
      "Tensor start, Tensor mask, Tensor? kept, Tensor conv, Tensor gates, Tensor gain, float eps) "
      "-> Tensor");
  m.impl("delta_rule", at::kCPU, as_operator);
}

}  // namespace delta
