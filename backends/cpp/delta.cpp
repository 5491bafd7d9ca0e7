// The recurrent layers on a CPU: `delta_rule` and `short_conv` of reference.py, GatedDeltaNet
// and a gated convolution. The second has no state but inputs, and none of the second item.
//
// 1. The rows of a sequence are the accepted nodes of the last pass, then the nodes of this one.
//    Every row is convolved with the rows before it on its path.
// 2. Every head goes through the rows in order, for some columns of its state at a time; heads run
//    on several threads. The first rows go into the kept state. A node of a tree reads its parent's
//    state; a leaf makes none, and a last child takes its parent's memory, so that a chain needs
//    one state and a tree one per branch that is open.
// 3. The inputs of nodes that may be dropped are saved for the next pass.
//
// Sums run over keys in one order: a node's bits depend on its path alone.

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

// COLUMNS of a state, which stay in L1 while a head goes through the rows: [keys, COLUMNS], where an
// odd number of keys has a row of zeros behind it. Columns do not depend on each other.
constexpr int64_t COLUMNS = 32;
constexpr int VECTORS = COLUMNS / LANES;

// s -> the sums of its rows by k, and by q unless it is null: [COLUMNS] each.
void read(const float* s, int64_t keys, const float* k, const float* q, float* by_k, float* by_q) {
  Floats of_k[2][VECTORS], of_q[2][VECTORS];  // of even rows and of odd ones: two chains of sums
  for (int half = 0; half < 2; half++)
    for (int v = 0; v < VECTORS; v++) of_k[half][v] = of_q[half][v] = splat(0.0f);
  for (int64_t i = 0; i < keys; i += 2)
    for (int half = 0; half < 2; half++)
      for (int v = 0; v < VECTORS; v++) {
        const Floats held = load(s + (i + half) * COLUMNS + v * LANES);
        of_k[half][v] = multiply_add(held, splat(k[i + half]), of_k[half][v]);
        if (q) of_q[half][v] = multiply_add(held, splat(q[i + half]), of_q[half][v]);
      }
  const Floats one = splat(1.0f);
  for (int v = 0; v < VECTORS; v++) {
    store(by_k + v * LANES, multiply_add(of_k[0][v], one, of_k[1][v]));
    if (q) store(by_q + v * LANES, multiply_add(of_q[0][v], one, of_q[1][v]));
  }
}

// from -> to, which may be the same: times `decay`, and k change^T added.
void write(const float* from, float* to, int64_t keys, float decay, const float* k,
           const float* change) {
  const Floats factor = splat(decay);
  for (int64_t i = 0; i < keys; i++) {
    const Floats key = splat(k[i]);
    for (int64_t c = i * COLUMNS, v = 0; v < VECTORS; v++, c += LANES)
      store(to + c, multiply_add(key, load(change + v * LANES), multiply(factor, load(from + c))));
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

// Returns f(channels of all rows behind the convolution): [rows, channels].
template <class F>
at::Tensor convolve(const Pass& pass, const float* conv, const at::TensorOptions& options,
                    const F& f) {
  const at::Tensor mixed = at::empty({pass.rows, pass.channels}, options);
  float* to = mixed.mutable_data_ptr<float>();
  const int64_t chunks = (pass.channels + CHUNK - 1) / CHUNK;
  for (const Sequence& of : pass.sequences) {
    each_row((of.count + pass.T) * chunks, GRAIN / (8 * CHUNK), [&](int64_t piece) {
      const int64_t r = piece / chunks, first = piece % chunks * CHUNK;
      const int64_t last = std::min(pass.channels, first + CHUNK);
      const float* taps[TAPS];  // the row's own, the one before ...
      int64_t at = r;
      for (const float*& tap : taps) {
        tap = pass.raw(of, at) + first;
        at = of.above(at);
      }
      float sums[CHUNK] = {};  // of no alias, so that the loops vectorize
      for (int64_t tap = 0; tap < TAPS; tap++) {
        const float* weights = conv + (TAPS - 1 - tap) * pass.channels + first;
        for (int64_t c = 0; c < last - first; c++) sums[c] += taps[tap][c] * weights[c];
      }
      float* y = to + (of.first + r) * pass.channels + first;
      for (int64_t c = 0; c < last - first; c++) y[c] = f(sums[c]);
    });
  }
  return mixed;
}

// ----------------------------------------------------------------------------------------- a head

// Columns of the states of a tree's nodes, in memory that is used again.
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
        keys(size.keys + size.keys % 2), rows(of.count + pass.T), numbers(2 * rows * keys),
        scalars(3 * rows) {
    for (int64_t r = 0; r < rows; r++) prepare(r);
  }

  // Runs all rows from a state [Dk, Dv] on. Writes: the state of a sequence that is live, behind
  // the nodes that are kept; y, [T, H Dv].
  void run(float* state, States& states, float* y) {
    float* kept = states.take();
    for (int64_t first = 0; first < size.values; first += COLUMNS) {
      const int64_t width = std::min(COLUMNS, size.values - first);
      std::fill_n(kept, keys * COLUMNS, 0.0f);
      for (int64_t i = 0; i < size.keys; i++)
        std::copy_n(state + i * size.values + first, width, kept + i * COLUMNS);
      for (int64_t r = 0; r < of.count + of.kept; r++) {
        recall(r, kept, first, width, y);
        write(kept, kept, keys, decay(r), k(r), change);
      }
      grow(kept, states, first, width, y);
      if (!of.live) continue;
      for (int64_t i = 0; i < size.keys; i++)
        std::copy_n(kept + i * COLUMNS, width, state + i * size.values + first);
    }
    states.give(kept);
    for (int64_t t = 0; t < pass.T; t++) finish(t, y + (t * pass.H + h) * size.values);
  }

 private:
  const Pass& pass;
  const Sequence& of;
  const int64_t h;
  const float* mixed;
  const Weights& weights;
  const Sizes size;
  const int64_t keys, rows;    // keys: with a zero behind an odd number of them
  std::vector<float> numbers;  // q and k of every row
  std::vector<float> scalars;  // decay, beta, and q k of every row
  float change[COLUMNS];

  float* q(int64_t r) { return numbers.data() + 2 * r * keys; }
  float* k(int64_t r) { return q(r) + keys; }
  float& decay(int64_t r) { return scalars[3 * r]; }
  float& beta(int64_t r) { return scalars[3 * r + 1]; }
  float& together(int64_t r) { return scalars[3 * r + 2]; }

  int64_t all_keys() const { return (pass.channels - pass.H * size.values) / 2; }  // Hk Dk
  const float* row(int64_t r) const { return mixed + (of.first + r) * pass.channels; }

  void prepare(int64_t r) {
    const int64_t groups = all_keys() / size.keys;  // heads of keys
    const int64_t group = weights.tiled ? h % groups : h * groups / pass.H;
    const float* from = row(r) + group * size.keys;
    to_unit(from, 1 / std::sqrt(float(size.keys)), q(r));
    to_unit(from + all_keys(), 1.0f, k(r));
    together(r) = dot(k(r), q(r), size.keys);
    const float* raw = pass.raw(of, r) + pass.channels;
    const float* gates = rows_of(weights.gates);
    beta(r) = sigmoid(raw[h]);
    decay(r) = decay_of(gates[h], raw[pass.H + h] + gates[pass.H + h]);
  }

  void to_unit(const float* x, float factor, float* y) const {
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, size.keys) + 1e-6f) * factor;
    for (int64_t i = 0; i < size.keys; i++) y[i] = x[i] * scale;
  }

  // Runs the nodes that may be dropped.
  void grow(const float* kept, States& states, int64_t first, int64_t width, float* y) {
    std::vector<float*> own(pass.T);
    std::vector<int64_t> waiting = of.children;  // children that did not run
    for (int64_t t = of.kept; t < pass.T; t++) {
      const int64_t p = of.parent[t], r = of.count + t;
      const bool is_first = p < of.kept;
      recall(r, is_first ? kept : own[p], first, width, y);
      const bool is_last_child = !is_first && --waiting[p] == 0;
      if (waiting[t]) {
        own[t] = is_last_child ? own[p] : states.take();
        write(is_first ? kept : own[p], own[t], keys, decay(r), k(r), change);
      } else if (is_last_child) {
        states.give(own[p]);
      }
    }
  }

  // Makes the change of a row behind a state; of a node its output before the norm, too.
  void recall(int64_t r, const float* state, int64_t first, int64_t width, float* y) {
    float by_k[COLUMNS], by_q[COLUMNS];
    const bool is_node = r >= of.count;
    read(state, keys, k(r), is_node ? q(r) : nullptr, by_k, by_q);
    const float* v = row(r) + 2 * all_keys() + h * size.values + first;
    for (int64_t c = 0; c < COLUMNS; c++)
      change[c] = c < width ? (v[c] - decay(r) * by_k[c]) * beta(r) : 0.0f;
    if (!is_node) return;
    float* to = y + ((r - of.count) * pass.H + h) * size.values + first;
    for (int64_t c = 0; c < width; c++) to[c] = decay(r) * by_q[c] + change[c] * together(r);
  }

  // Norms and gates the output of a node, [Dv], in place.
  void finish(int64_t t, float* y) const {
    const float* gate = pass.raw(of, of.count + t) + pass.C + h * size.values;
    const float* gain = rows_of(weights.gain);
    const float mean = sum_of_squares(y, size.values) / float(size.values);
    const float scale = 1.0f / std::sqrt(mean + float(weights.eps));
    for (int64_t c = 0; c < size.values; c++) y[c] = y[c] * scale * gain[c] * silu(gate[c]);
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

// Saves the inputs of all sequences that are live. Writes: inputs and lengths.
void save_all(const Pass& pass, const State& state) {
  for (int64_t b = 0; b < pass.B; b++) {
    const Sequence& of = pass.sequences[b];
    if (!of.live) continue;
    save(pass, of, const_cast<float*>(of.inputs));
    state.length.mutable_data_ptr<int64_t>()[b] += of.count + of.kept;
  }
}

}  // namespace

at::Tensor delta_rule(const at::Tensor& x, const State& state, const Window& window,
                      const Weights& weights) {
  const auto sizes = state.state.sizes();
  TORCH_CHECK(x.dim() == 3 && sizes.size() == 4 && state.inputs.dim() == 3, "x must be [B, T, W]");
  const int64_t B = x.size(0), T = x.size(1), H = sizes[1], Dv = sizes[3];
  const int64_t channels = weights.conv.size(1), C = channels + 2 * H;
  for (const at::Tensor& t : {x, weights.conv, weights.gates, weights.gain, state.inputs, state.state})
    TORCH_CHECK(t.scalar_type() == at::kFloat, "operands must be float32");
  for (const at::Tensor& t : {weights.conv, weights.gates, weights.gain, state.length})
    TORCH_CHECK(t.is_contiguous(), "weights must be in one piece");
  TORCH_CHECK(x.size(2) == C + H * Dv && state.inputs.size(2) == C && sizes[0] == B &&
                  state.inputs.size(0) == B && weights.conv.size(0) == TAPS &&
                  state.inputs.size(1) >= TAPS - 1 && weights.gates.numel() == 2 * H &&
                  weights.gain.numel() == Dv && state.length.numel() == B,
              "the state has other sizes than the layer");
  TORCH_CHECK(state.state[0].is_contiguous() && state.inputs[0].is_contiguous(),
              "the buffers of a sequence must be in one piece");
  RECORD_FUNCTION("gpt_eagle::delta_rule", std::vector<c10::IValue>{});
  const at::Tensor y = at::empty({B, T, H * Dv}, x.options());
  const at::Tensor whole = x.contiguous();
  const Pass pass = begin(whole, state, window, channels);
  const auto activate = [](float sum) { return silu(sum); };  // a function would not be inlined
  const at::Tensor mixed = convolve(pass, rows_of(weights.conv), x.options(), activate);
  const int64_t work = pass.rows / B * pass.size.numbers();
  float* states = state.state.mutable_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  parallel(B * H, GRAIN / work, [&](int64_t begin, int64_t end) {
    States unused((pass.size.keys + 1) * COLUMNS);
    for (int64_t i = begin; i < end; i++) {
      float* own = states + i / H * state.state.stride(0) + i % H * pass.size.numbers();
      Head head(pass, pass.sequences[i / H], i % H, rows_of(mixed), weights);
      head.run(own, unused, to + i / H * T * H * Dv);
    }
  });
  save_all(pass, state);
  return y;
}

at::Tensor short_conv(const at::Tensor& x, const State& state, const Window& window,
                      const at::Tensor& conv) {
  const int64_t B = x.size(0), T = x.size(1), F = x.size(2) / 3;
  for (const at::Tensor& t : {x, conv, state.inputs})
    TORCH_CHECK(t.scalar_type() == at::kFloat, "operands must be float32");
  TORCH_CHECK(x.dim() == 3 && x.size(2) == 3 * F && conv.is_contiguous() &&
                  conv.size(0) == TAPS && conv.size(1) == F && state.inputs.size(0) == B &&
                  state.inputs.size(1) >= TAPS - 1 && state.inputs.size(2) == F &&
                  state.inputs[0].is_contiguous() && state.length.is_contiguous() &&
                  state.length.numel() == B,
              "the state has other sizes than the layer");
  RECORD_FUNCTION("gpt_eagle::short_conv", std::vector<c10::IValue>{});
  const at::Tensor whole = x.contiguous();
  const at::Tensor inputs = at::empty({B, T, F}, x.options());
  const at::Tensor y = at::empty({B, T, F}, x.options());
  const float* from = rows_of(whole);
  float* gated = inputs.mutable_data_ptr<float>();
  for (int64_t r = 0; r < B * T; r++)
    for (int64_t c = 0; c < F; c++)
      gated[r * F + c] = from[r * 3 * F + c] * from[r * 3 * F + 2 * F + c];
  const Pass pass = begin(inputs, state, window, F);
  const at::Tensor mixed =
      convolve(pass, rows_of(conv), x.options(), [](float sum) { return sum; });
  float* to = y.mutable_data_ptr<float>();
  for (int64_t r = 0; r < B * T; r++) {
    const Sequence& of = pass.sequences[r / T];
    const float* row = rows_of(mixed) + (of.first + of.count + r % T) * F;
    for (int64_t c = 0; c < F; c++) to[r * F + c] = from[r * 3 * F + F + c] * row[c];
  }
  save_all(pass, state);
  return y;
}

namespace {

at::Tensor as_operator(const at::Tensor& x, const at::Tensor& state, const at::Tensor& inputs,
                       const at::Tensor& length, const at::Tensor& slots, const at::Tensor& start,
                       const at::Tensor& mask, const std::optional<at::Tensor>& kept,
                       const at::Tensor& conv, const at::Tensor& gates, const at::Tensor& gain,
                       double eps, bool tiled) {
  return delta_rule(x, {state, inputs, length}, {slots, start, mask, kept},
                    {conv, gates, gain, eps, tiled});
}

}  // namespace

OPERATORS(m) {
  m.def(
      "delta_rule(Tensor x, Tensor(a!) state, Tensor(b!) inputs, Tensor(c!) length, Tensor slots, "
      "Tensor start, Tensor mask, Tensor? kept, Tensor conv, Tensor gates, Tensor gain, float eps, "
      "bool tiled) -> Tensor", cpu(as_operator));
}

}  // namespace delta
