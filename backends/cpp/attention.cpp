// Attention of a few new tokens over a cache on a CPU: the prefix below `start`, and behind it a
// masked window. A layer with a sliding window has for each token the `first` slot that it sees.
//
// 1. A thread takes one key-value head and up to ROWS of the query rows that share it (tokens x
//    heads of its group). It reads the slots from the lowest `first` of its rows on.
// 2. LANES keys at a time are widened, transposed and multiplied by all rows: scores, a register
//    per row.
// 3. Softmax in fp32: exact maximum, exponentials, sums. A head's sink is a further score, which
//    takes part in the maximum and, at the end, in the sum.
// 4. The values are added up, a few columns and up to TILE rows in registers.
//
// Every sum runs in one order for any number of rows: a score over the head's elements, the others
// over the keys in the order of their slots, where a hidden key adds zero. So a node of a draft
// tree gets the bits that its token gets alone. Keys and values in 8 bits are widened in registers:
// the result is that of the same cache in fp32. Trade-off: all scores of a row are kept (4 bytes a
// slot), where an online softmax would round by blocks.

#include "attention.h"

#include "exponential.h"
#include "kv_codes.h"
#include "operands.h"
#include "operators.h"
#include "simd.h"
#include "threads.h"

#include <cmath>

namespace attention {
namespace {

constexpr int64_t ROWS = 64;  // query rows that share the transposed keys
constexpr int64_t TILE = 8;   // of them in registers at a time

struct Shape {
  int64_t rows, heads, kv_heads, width;  // tokens, query heads, key-value heads, elements of a head
  float scale;                           // of the scores
  const float* sinks;                    // [heads], or null
};

template <class T> struct Strided {  // [B, Hkv, S, E], elements of a slot side by side
  const T* data;
  int64_t batch, head, slot;
  explicit Strided(const at::Tensor& t)
      : data(t.const_data_ptr<T>()), batch(t.stride(0)), head(t.stride(1)), slot(t.stride(2)) {}
};

// -------------------------------------------------------------------------------------------- keys

// Element i of a key or value of e elements, widened.
template <class T> float element(const T* row, int64_t i, int64_t) { return widen(row[i]); }
inline float element(const int8_t* row, int64_t i, int64_t e) {
  return float(row[i]) * kv_scale(row, i, e);
}

// Writes the 4 elements of LANES keys in w [LANES], the same of each, times the keys' scales.
inline void store_bytes(Ints w, Floats scale, float* to) {
  store(to, multiply(signed_byte<0>(w), scale));
  store(to + LANES, multiply(signed_byte<1>(w), scale));
  store(to + 2 * LANES, multiply(signed_byte<2>(w), scale));
  store(to + 3 * LANES, multiply(signed_byte<3>(w), scale));
}

// to[i][l] = element i of key l, widened, for the i < e that fill whole blocks. Returns: the number
// of these i.
template <class T> int64_t transpose_words(const T* const (&key)[LANES], int64_t e, float* to) {
  constexpr int64_t PER = 4 / sizeof(T);  // elements of a 32-bit word
  const int64_t whole = e / (LANES * PER) * (LANES * PER);
  for (int64_t i = 0; i < whole; i += LANES * PER) {
    Ints w[LANES];
    for (int l = 0; l < LANES; l++) w[l] = load((const uint8_t*)(key[l] + i));
    transpose(w);
    Floats scale = splat(1.0f);
    for (int j = 0; j < LANES; j++) {
      float* out = to + (i + j * PER) * LANES;
      if constexpr (PER == 1) {
        store((int32_t*)out, w[j]);
      } else if constexpr (PER == 4) {
        if (j * PER % KV_GROUP == 0) {
          float each[LANES];
          for (int l = 0; l < LANES; l++) each[l] = kv_scale(key[l], i + j * PER, e);
          scale = load(each);
        }
        store_bytes(w[j], scale, out);
      } else {  // two bf16: the even element is the low half
        store(out, low_half(w[j]));
        store(out + LANES, high_half(w[j]));
      }
    }
  }
  return whole;
}

// The LANES keys from slot `first` on; from `last` on the key before it is repeated, and those
// scores are not used.
template <class T>
void transpose_keys(const T* keys, int64_t slot, int64_t first, int64_t last, int64_t e,
                    float* to) {
  const T* key[LANES];
  for (int64_t l = 0; l < LANES; l++) key[l] = keys + std::min(first + l, last - 1) * slot;
  for (int64_t i = transpose_words(key, e, to); i < e; i++)
    for (int64_t l = 0; l < LANES; l++) to[i * LANES + l] = element(key[l], i, e);
}

// ------------------------------------------------------------------------------------------- tiles
// M rows at a time; `rows` of `each` pick the M.

struct Scores {  // q [M, E] x keys [E, LANES] -> to [M, stride]
  const float *q, *keys;
  int64_t e;
  float* to;
  int64_t stride;
  template <int M> void run() const {
    Floats sum[M];
    for (int m = 0; m < M; m++) sum[m] = splat(0.0f);
    for (int64_t i = 0; i < e; i++) {
      const Floats k = load(keys + i * LANES);
      for (int m = 0; m < M; m++) sum[m] = multiply_add(splat(q[m * e + i]), k, sum[m]);
    }
    for (int m = 0; m < M; m++) store(to + m * stride, sum[m]);
  }
};

struct Sums {  // of p [M, keys]
  const float* p;
  int64_t stride, keys;
  float* to;
  template <int M> void run() const {
    float sum[M] = {};
    for (int64_t j = 0; j < keys; j++)
      for (int m = 0; m < M; m++) sum[m] += p[m * stride + j];
    for (int m = 0; m < M; m++) to[m] = sum[m];
  }
};

// LANES elements of a value of e elements, from i on, widened.
inline Floats load_wide(const float* row, int64_t i, int64_t) { return load(row + i); }
inline Floats load_wide(const at::BFloat16* row, int64_t i, int64_t) {
  return from_bf16((const uint16_t*)row + i);
}
inline Floats load_wide(const int8_t* row, int64_t i, int64_t e) {
  return multiply(from_int8(row + i), splat(kv_scale(row, i, e)));
}

// p [M, keys] x columns first .. first + C * LANES of values [keys, e] -> those of to [M, e]
template <class T, int C> struct Mix {
  const float* p;
  int64_t stride, keys;
  const T* values;
  int64_t slot, first;
  float* to;
  int64_t e;
  template <int M> void run() const {
    Floats sum[M][C];
    for (int m = 0; m < M; m++)
      for (int c = 0; c < C; c++) sum[m][c] = splat(0.0f);
    for (int64_t j = 0; j < keys; j++) {
      Floats v[C];
      for (int c = 0; c < C; c++) v[c] = load_wide(values + j * slot, first + c * LANES, e);
      for (int m = 0; m < M; m++) {
        const Floats weight = splat(p[m * stride + j]);
        for (int c = 0; c < C; c++) sum[m][c] = multiply_add(weight, v[c], sum[m][c]);
      }
    }
    for (int m = 0; m < M; m++)
      for (int c = 0; c < C; c++) store(to + m * e + first + c * LANES, sum[m][c]);
  }
};

template <int M = TILE, class Step> void each(int64_t rows, const Step& step) {
  if constexpr (M > 1)
    if (rows < M) return each<M - 1>(rows, step);
  step.template run<M>();
}

// --------------------------------------------------------------------------------------- attention

// The slots that the tokens of a sequence see: first[t] .. start - 1, and behind them those that
// the mask allows.
struct Visible {
  int64_t start, window;
  const bool* mask;      // [T, window]
  const int64_t* first;  // [T], or null: 0
  int64_t first_of(int64_t token) const { return first ? first[token] : 0; }
};

struct Slots {
  int64_t begin, end;
};

// Returns the slots from the first to the last one that a token of first .. last sees.
Slots slots_of(const Visible& visible, int64_t first, int64_t last) {
  int64_t begin = visible.first_of(first);
  for (int64_t t = first; t <= last; t++) begin = std::min(begin, visible.first_of(t));
  const auto sees = [&](int64_t offset) {
    for (int64_t t = last; t >= first; t--)
      if (visible.mask[t * visible.window + offset]) return true;
    return false;
  };
  int64_t count = visible.window;
  while (count && !sees(count - 1)) count--;
  return {begin, visible.start + count};
}

// Replaces a token's scores [stride] of the slots from slots.begin on by exponentials; those of
// hidden slots, and those behind slots.end, become 0. Returns: the sink's exponential; 0: no sink.
float softmax_row(float* scores, int64_t stride, const Slots& slots, const Visible& visible,
                  int64_t token, const float* sink) {
  const int64_t first = std::min(visible.first_of(token), slots.end);
  const bool* seen = visible.mask + token * visible.window;
  for (int64_t s = slots.begin; s < first; s++) scores[s - slots.begin] = -INFINITY;
  for (int64_t s = std::max(visible.start, slots.begin); s < slots.end; s++)
    if (!seen[s - visible.start]) scores[s - slots.begin] = -INFINITY;
  for (int64_t j = slots.end - slots.begin; j < stride; j++) scores[j] = -INFINITY;
  float most = largest(scores, stride);
  if (sink) most = std::max(most, *sink);
  for (int64_t j = 0; j < stride; j++) scores[j] = exponential(scores[j] - most);
  return sink ? exponential(*sink - most) : 0.0f;
}

struct Buffers {
  std::vector<float> q, keys, scores, out;
};

// Rows first .. first + n of key-value head h of a sequence; row r is token r / group, head
// h * group + r % group.
template <class Q, class T>
void attend(const Shape& shape, const Q* q, const T* keys, int64_t key_slot, const T* values,
            int64_t value_slot, const Visible& visible, int64_t h, int64_t first, int64_t n, Q* y,
            Buffers& buffer) {
  const int64_t e = shape.width, group = shape.heads / shape.kv_heads;
  const Slots slots = slots_of(visible, first / group, (first + n - 1) / group);
  const int64_t count = slots.end - slots.begin;
  const int64_t stride = (count + LANES - 1) / LANES * LANES;
  const auto offset = [&](int64_t r) {
    return (r / group * shape.heads + h * group + r % group) * e;
  };
  keys += slots.begin * key_slot;
  values += slots.begin * value_slot;
  buffer.q.resize(n * e);
  buffer.keys.resize(e * LANES);
  buffer.scores.resize(n * stride);
  buffer.out.resize(n * e);
  float *rows = buffer.q.data(), *scores = buffer.scores.data(), *out = buffer.out.data();
  for (int64_t r = 0; r < n; r++)
    for (int64_t i = 0; i < e; i++)
      rows[r * e + i] = widen(q[offset(first + r) + i]) * shape.scale;
  for (int64_t j = 0; j < count; j += LANES) {
    for (int64_t l = 0; l < LANES; l++)  // keys of the next blocks, and values, after all keys
      for (int64_t i = 0; i < e; i += 64 / int64_t(sizeof(T))) {
        __builtin_prefetch(keys + std::min(j + 2 * LANES + l, count - 1) * key_slot + i);
        __builtin_prefetch(values + std::min(j + l, count - 1) * value_slot + i, 0, 2);
      }
    transpose_keys(keys, key_slot, j, count, e, buffer.keys.data());
    for (int64_t r = 0; r < n; r += TILE)
      each(n - r, Scores{rows + r * e, buffer.keys.data(), e, scores + r * stride + j, stride});
  }
  float sums[ROWS], of_sinks[ROWS];
  for (int64_t r = 0; r < n; r++) {
    const float* sink = shape.sinks ? shape.sinks + h * group + (first + r) % group : nullptr;
    of_sinks[r] =
        softmax_row(scores + r * stride, stride, slots, visible, (first + r) / group, sink);
  }
  for (int64_t r = 0; r < n; r += TILE) {
    const float* p = scores + r * stride;
    float* to = out + r * e;
    each(n - r, Sums{p, stride, count, sums + r});
    int64_t i = 0;
    for (; i + 2 * LANES <= e; i += 2 * LANES)
      each(n - r, Mix<T, 2>{p, stride, count, values, value_slot, i, to, e});
    for (; i < e; i += LANES)
      each(n - r, Mix<T, 1>{p, stride, count, values, value_slot, i, to, e});
  }
  for (int64_t r = 0; r < n; r++) {
    const float scale = 1.0f / (sums[r] + of_sinks[r]);
    for (int64_t i = 0; i < e; i++) put(y + offset(first + r) + i, out[r * e + i] * scale);
  }
}

// visible: of each sequence
template <class T, class Q>
void run(const Shape& shape, const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
         const std::vector<Visible>& visible, Q* y) {
  const Strided<T> k(keys), v(values);
  const Q* queries = q.const_data_ptr<Q>();
  const int64_t total = shape.rows * shape.heads / shape.kv_heads;
  const int64_t parts = (total + ROWS - 1) / ROWS;
  const int64_t row = shape.rows * shape.heads * shape.width;  // elements of a sequence in q and y
  parallel(q.size(0) * shape.kv_heads * parts, 1, [&](int64_t begin, int64_t end) {
    Buffers buffer;
    for (int64_t item = begin; item < end; item++) {
      const int64_t part = item % parts;
      const int64_t h = item / parts % shape.kv_heads;
      const int64_t b = item / parts / shape.kv_heads;
      const int64_t first = total * part / parts, n = total * (part + 1) / parts - first;
      attend(shape, queries + b * row, k.data + b * k.batch + h * k.head, k.slot,
             v.data + b * v.batch + h * v.head, v.slot, visible[b], h, first, n, y + b * row,
             buffer);
    }
  });
}

}  // namespace

// `attention` of reference.py, for bfloat16 and float32, and queries in float32 over a
// cache in bfloat16 or in 8 bits.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& start, const at::Tensor& mask,
                     const std::optional<at::Tensor>& first, double scale,
                     const std::optional<at::Tensor>& sinks) {
  const int64_t B = q.size(0), T = q.size(1), heads = q.size(2), width = q.size(3);
  const int64_t kv_heads = k.size(1), window = mask.size(2);
  TORCH_CHECK(width % LANES == 0, "heads must have multiples of ", LANES,
              " elements; they have ", width);
  TORCH_CHECK(k.stride(3) == 1 && v.stride(3) == 1, "elements of a slot must lie side by side");
  const bool narrow = k.scalar_type() == at::kBFloat16, coded = k.scalar_type() == at::kChar;
  const bool known = narrow || coded || k.scalar_type() == at::kFloat;
  TORCH_CHECK(v.scalar_type() == k.scalar_type() && known &&
                  (q.scalar_type() == k.scalar_type() || q.scalar_type() == at::kFloat),
              "k and v must have one dtype, and q the same or float32; they have ",
              q.scalar_type(), ", ", k.scalar_type(), ", ", v.scalar_type());
  TORCH_CHECK(k.size(3) == (coded ? kv_row_bytes(width) : width), "rows of ", k.size(3),
              " do not hold heads of ", width);
  TORCH_CHECK(heads % kv_heads == 0 && k.size(0) == B && v.sizes() == k.sizes() &&
                  start.numel() == B && mask.size(0) == B && mask.size(1) == T,
              "heads, batch rows or mask rows do not match");
  const at::Tensor rows = q.contiguous(), begin = start.contiguous(), seen = mask.contiguous();
  const auto lowest = optional<int64_t>(first, {B, T}, "first");
  std::vector<Visible> visible;
  for (int64_t b = 0; b < B; b++) {
    const int64_t at = begin.const_data_ptr<int64_t>()[b];
    TORCH_CHECK(at >= 0 && at + window <= k.size(2), "the window must lie in the cache");
    const int64_t* own = lowest ? lowest->data + b * T : nullptr;
    for (int64_t t = 0; own && t < T; t++) within(own[t], at + window, "first");
    visible.push_back({at, window, seen.const_data_ptr<bool>() + b * T * window, own});
  }
  const float unit = scale ? float(scale) : 1.0f / std::sqrt(float(width));
  TORCH_CHECK(!sinks || sinks->numel() == heads, "there is a sink per head");
  at::Tensor of_heads;  // in fp32
  if (sinks) of_heads = sinks->to(at::kFloat).contiguous();
  const float* sink = sinks ? of_heads.const_data_ptr<float>() : nullptr;
  const Shape shape{T, heads, kv_heads, width, unit, sink};
  const at::Tensor y = at::empty({B, T, heads * width}, q.options());
  fill(y, [&](auto* to) {
    if (narrow) {
      run<at::BFloat16>(shape, rows, k, v, visible, to);
    } else if constexpr (std::is_same_v<decltype(to), float*>) {
      if (coded) run<int8_t>(shape, rows, k, v, visible, to);
      else run<float>(shape, rows, k, v, visible, to);
    }
  });
  return y;
}

OPERATORS(m) {
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor start, Tensor mask, Tensor? first=None, "
      "float scale=0.0, Tensor? sinks=None) -> Tensor", cpu(attention));
}

}  // namespace attention
