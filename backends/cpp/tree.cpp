// Draft trees on a CPU: growing a level, choosing the nodes, accepting a path, and advancing the
// sequences.
//
// 1. `expand_frontier` scores the children of every node of a frontier, keeps the best, and chooses
//    the next frontier.
// 2. `select_nodes` chooses the nodes of a tree among all candidates, and derives parents, depths
//    and the attention mask.
// 3. `accept` finds the deepest path that is the target's own choice; `advance` writes its tokens
//    and moves the roots.
// 4. `place_rows` (place_tokens in Python) and `causal` compute the cache slots of a step's tokens,
//    and the slots that they see.
//
// Each computes the same as its plain reference in Python, in one call instead of dozens. Trees are
// small: only the scores of `expand_frontier` pay for threads.

#include "tree.h"

#include "exponential.h"
#include "operands.h"
#include "operators.h"
#include "threads.h"
#include "topk.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

namespace tree {
namespace {

using Optional = std::optional<at::Tensor>;

constexpr int64_t GRAIN = 1 << 15;  // scores that pay for a thread's wake-up

int64_t* out(const at::Tensor& t) { return t.mutable_data_ptr<int64_t>(); }

// Writes the indices 0 .. n - 1 by descending score; equal scores keep their order.
void best_first(const float* score, int64_t n, std::vector<int64_t>& order) {
  order.resize(n);
  std::iota(order.begin(), order.end(), int64_t(0));
  const auto better = [&](int64_t a, int64_t b) { return score[a] > score[b]; };
  std::stable_sort(order.begin(), order.end(), better);
}

// The noise of the target's own choice, [V of the target], or null.
struct Shared {
  const float* noise;
  float temperature;
};

// Computes scores [n] of z [n]: with the shared noise, times the sharpness. ids: the token of each
// column, or null.
void score_row(const float* z, int64_t n, const Shared& shared, const int64_t* ids, float sharpness,
               float* scores) {
  const float temperature = shared.temperature;
  if (!shared.noise) {
    for (int64_t i = 0; i < n; i++) scores[i] = sharpness * z[i];
  } else if (ids) {
    for (int64_t i = 0; i < n; i++)
      scores[i] = sharpness * (temperature * (z[i] + shared.noise[ids[i]]));
  } else {
    for (int64_t i = 0; i < n; i++)
      scores[i] = sharpness * (temperature * (z[i] + shared.noise[i]));
  }
}

// The best children of all rows of scores, k each.
struct Children {
  std::vector<float> scores;  // log-probabilities
  std::vector<int64_t> tokens;
};

}  // namespace

// ----------------------------------------------------------------------------------------- growing

// Computes `expand_frontier` of reference.py. Operands are the fields of its records:
// `Scores`; of a `Frontier` index, values and seen, none of the root's; `Level`.
// Returns: tokens, values and parents of the candidates, [B, X]; of the next frontier index,
// tokens, parent and values, [B, R'], and seen, [B, R', W].
Tensors<8> expand_frontier(const at::Tensor& logits, double sharpness, const Optional& ids,
                           const Optional& noise, int64_t level, const Optional& temperature,
                           const Optional& index, const Optional& values, const Optional& seen,
                           int64_t k, int64_t count, int64_t first_candidate, int64_t first_slot,
                           int64_t slots, const Optional& fixed_children) {
  TORCH_CHECK(logits.dim() == 3 && (!noise || noise->dim() == 3),
              "logits and noise have 3 dimensions");
  const int64_t B = logits.size(0);
  const int64_t rows = logits.size(1);  // 1: all nodes share it
  const int64_t V = logits.size(2);
  const int64_t R = rows == 1 && index ? index->size(-1) : rows;
  const int64_t X = R * k;
  TORCH_CHECK(0 < k && k <= V && 0 <= count && count <= X && slots >= 0, "there are no ", k,
              " best of ", V, " scores, or no ", count, " of ", X, " candidates");
  const at::Tensor tokens = logits.new_empty({B, X}, at::kLong);
  const at::Tensor parents = at::empty_like(tokens);
  const at::Tensor path = logits.new_empty({B, X});
  const at::Tensor next = logits.new_empty({B, count}, at::kLong);
  const at::Tensor chosen = at::empty_like(next);
  const at::Tensor above = at::empty_like(next);
  const at::Tensor value = logits.new_empty({B, count});
  const at::Tensor sees = logits.new_empty({B, count, slots}, at::kBool);
  const int64_t draws = noise ? noise->size(1) : 0;
  const int64_t Vt = noise ? noise->size(2) : V;
  const Operand<float> z(logits, {B, rows, V}, "logits");
  const auto of_column = optional<int64_t>(ids, {V}, "ids");
  const auto gumbel = optional<float>(noise, {B, draws, Vt}, "noise");
  const auto of_row = optional<float>(temperature, {B}, "temperature");
  TORCH_CHECK(bool(gumbel) == bool(of_row), "noise and temperature go together");
  const auto flat = optional<int64_t>(index, {B, R}, "index");
  const auto so_far = optional<float>(values, {B, R}, "values");
  const auto sees_above = optional<bool>(seen, {B, R, slots}, "seen");
  const auto fixed = optional<int64_t>(fixed_children, {1, count}, "fixed_children");
  if (gumbel) within(level, draws, "level");
  TORCH_CHECK(of_column || Vt == V, "noise of ", Vt, " tokens does not fit scores of ", V);
  for (int64_t i = 0; of_column && gumbel && i < V; i++) within((*of_column)[i], Vt, "an id");
  const int64_t* id = of_column ? of_column->data : nullptr;

  Children best{std::vector<float>(B * rows * k), std::vector<int64_t>(B * rows * k)};
  parallel(B * rows, GRAIN / V, [&](int64_t first, int64_t last) {
    std::vector<float> scores(V);
    std::vector<int64_t> column(k);
    for (int64_t r = first; r < last; r++) {
      const int64_t b = r / rows;
      Shared shared{nullptr, 0.0f};
      if (gumbel) shared = {gumbel->data + (b * draws + level) * Vt, (*of_row)[b]};
      score_row(z.data + r * V, V, shared, id, float(sharpness), scores.data());
      float* score = best.scores.data() + r * k;
      topk::best_of(scores.data(), V, k, score, column.data());
      const float total = float(score[0] + std::log(exponential_sum(scores.data(), V, score[0])));
      for (int64_t i = 0; i < k; i++) {
        // no value may exceed its parent's, not even by rounding
        score[i] = std::min(score[i] - total, 0.0f);
        best.tokens[r * k + i] = id ? id[column[i]] : column[i];
      }
    }
  });

  float* sums = path.mutable_data_ptr<float>();
  for (int64_t node = 0; node < B * R; node++) {
    const int64_t row = rows == R ? node : node / R;
    for (int64_t i = 0; i < k; i++) {
      const int64_t from = row * k + i;
      const int64_t to = node * k + i;
      out(tokens)[to] = best.tokens[from];
      out(parents)[to] = flat ? (*flat)[node] : -1;
      sums[to] = (so_far ? (*so_far)[node] : 0.0f) + best.scores[from];
    }
  }

  std::vector<int64_t> order;
  for (int64_t b = 0; b < B; b++) {
    if (fixed) order.assign(fixed->data, fixed->data + count);
    else if (count) best_first(sums + b * X, X, order);
    for (int64_t i = 0; i < count; i++) {
      const int64_t to = b * count + i;
      const int64_t from = within(order[i], X, "a place");
      const int64_t row = from / k;
      out(next)[to] = first_candidate + from;
      out(chosen)[to] = out(tokens)[b * X + from];
      out(above)[to] = row;
      value.mutable_data_ptr<float>()[to] = sums[b * X + from];
      bool* mask = sees.mutable_data_ptr<bool>() + to * slots;
      const bool* of_parent = sees_above ? sees_above->data + (b * R + row) * slots : nullptr;
      for (int64_t w = 0; w < slots; w++)  // a node sees its ancestors and itself
        mask[w] = w == first_slot + i || (of_parent && of_parent[w]);
    }
  }
  return {tokens, path, parents, next, chosen, above, value, sees};
}

// -------------------------------------------------------------------------------------- choosing

namespace {

// The candidates of all levels of B sequences, P each.
struct Pool {
  Pool(int64_t B, at::TensorList tokens, at::TensorList values, at::TensorList parents) : size(0) {
    TORCH_CHECK(tokens.size() == values.size() && parents.size() == values.size(), "levels differ");
    for (const at::Tensor& level : values) size += level.size(-1);
    value.resize(B * size);
    token.resize(B * size);
    parent.resize(B * size);
    int64_t begin = 0;
    for (size_t level = 0; level < values.size(); level++) {
      const int64_t X = values[level].size(-1);
      const Operand<float> v(values[level], {B, X}, "values");
      const Whole t(tokens[level], {B, X}, "tokens");
      const Whole p(parents[level], {B, X}, "parents");
      for (int64_t b = 0; b < B; b++) {
        for (int64_t i = 0; i < X; i++) {
          const int64_t to = b * size + begin + i;
          value[to] = v[b * X + i];
          token[to] = t[b * X + i];
          parent[to] = p[b * X + i];
          TORCH_CHECK(parent[to] >= -1 && parent[to] < begin + i, "candidate ", begin + i,
                      " has no parent before it");
        }
      }
      begin += X;
    }
  }

  int64_t size;
  std::vector<float> value;
  std::vector<int64_t> token, parent;
};

// Returns of the root and of each candidate the place among the root and the nodes that the drafter
// ran, [B, P + 1]; 0: it did not run. expanded: of every level their flat indices, [B, R]
std::vector<int64_t> places_of(int64_t B, int64_t P, at::TensorList expanded) {
  std::vector<int64_t> place(B * (P + 1));
  int64_t ordinal = 1;  // 0 is the root's
  for (const at::Tensor& level : expanded) {
    const int64_t R = level.size(-1);
    const Whole index(level, {B, R}, "expanded");
    for (int64_t b = 0; b < B; b++)
      for (int64_t i = 0; i < R; i++)
        place[b * (P + 1) + within(index[b * R + i], P, "an index") + 1] = ordinal + i;
    ordinal += R;
  }
  return place;
}

}  // namespace

// Computes `select_nodes` of reference.py. tokens, values, parents: of the candidates,
// level by level, each [B, X]; expanded: of every level the flat indices that the drafter ran, [B,
// R];
// nodes: [1 or B, N-1] flat indices, ascending; none: the `count` best. text: [B, S]; pos: [B].
// Returns: the first seven fields of `DraftTree`.
Tensors<7> select_nodes(at::TensorList tokens, at::TensorList values, at::TensorList parents,
                        at::TensorList expanded, const Optional& nodes, int64_t count,
                        const at::Tensor& text, const at::Tensor& pos) {
  TORCH_CHECK(text.dim() == 2 && count >= 0, "text must be [B, S], and a tree has a root");
  const int64_t B = text.size(0);
  const int64_t S = text.size(1);
  const int64_t N = count + 1;
  const at::Tensor token = at::empty({B, N}, text.options());
  const at::Tensor above = at::empty_like(token);
  const at::Tensor depth = at::empty_like(token);
  const at::Tensor mask = text.new_empty({B, N, N}, at::kBool);
  const at::Tensor valid = text.new_empty({B, N}, at::kBool);
  const at::Tensor value = text.new_empty({B, N}, at::kFloat);
  const at::Tensor places = at::empty_like(token);
  const Whole said(text, {B, S}, "text");
  const Whole root(pos, {B}, "pos");
  const Pool pool(B, tokens, values, parents);
  const int64_t P = pool.size;
  TORCH_CHECK(count <= P, "a tree of ", N, " nodes needs as many candidates and a root; there are ",
              P);
  const int64_t sets = nodes && nodes->size(0) > 1 ? B : 1;
  const auto fixed = optional<int64_t>(nodes, {sets, count}, "nodes");
  const std::vector<int64_t> place = places_of(B, P, expanded);
  std::vector<int64_t> order;
  std::vector<int64_t> node_of(P + 1);  // the node of the root and of each candidate; 0: none
  for (int64_t b = 0; b < B; b++) {
    if (fixed) {
      const int64_t* first = fixed->data + (sets > 1 ? b * count : 0);
      order.assign(first, first + count);
    } else {
      best_first(pool.value.data() + b * P, P, order);
      order.resize(count);
      std::sort(order.begin(), order.end());
    }
    int64_t* t = out(token) + b * N;
    int64_t* p = out(above) + b * N;
    int64_t* d = out(depth) + b * N;
    int64_t* ran_at = out(places) + b * N;
    bool* sees = mask.mutable_data_ptr<bool>() + b * N * N;
    bool* real = valid.mutable_data_ptr<bool>() + b * N;
    float* worth = value.mutable_data_ptr<float>() + b * N;
    std::fill(node_of.begin(), node_of.end(), int64_t(0));
    std::fill_n(sees, N * N, false);
    t[0] = said[b * S + within(root[b], S, "the root")];
    p[0] = 0;
    d[0] = 0;
    ran_at[0] = 0;
    sees[0] = true;
    real[0] = true;
    worth[0] = 0;
    for (int64_t i = 1; i < N; i++) {  // parents precede children
      const int64_t from = within(order[i - 1], P, "a node");
      const int64_t at = b * P + from;
      node_of[from + 1] = i;
      t[i] = pool.token[at];
      p[i] = node_of[pool.parent[at] + 1];
      TORCH_CHECK(p[i] < i, "nodes must ascend");
      d[i] = d[p[i]] + 1;
      worth[i] = pool.value[at];
      real[i] = pool.value[at] > -INFINITY;
      std::copy_n(sees + p[i] * N, N, sees + i * N);
      sees[i * N + i] = true;
      ran_at[i] = place[b * (P + 1) + from + 1];
    }
  }
  return {token, above, depth, mask, valid, value, places};
}

// ------------------------------------------------------------------------------------- accepting

// Computes `accept` of reference.py. tokens, parents, depths, valid, choice: [B, N].
// Returns: path [B, D+1], length [B], emitted [B, D+1], moves [B, D+1].
Tensors<4> accept(const at::Tensor& tokens, const at::Tensor& parents, const at::Tensor& depths,
                  const at::Tensor& valid, const at::Tensor& choice, int64_t depth) {
  TORCH_CHECK(tokens.dim() == 2 && depth >= 0, "tokens must be [B, N]");
  const int64_t B = tokens.size(0);
  const int64_t N = tokens.size(1);
  const int64_t D = depth + 1;
  const at::Tensor path = at::empty({B, D}, tokens.options());
  const at::Tensor length = at::empty({B}, tokens.options());
  const at::Tensor emitted = at::empty_like(path);
  const at::Tensor moves = at::empty_like(path);
  const Whole token(tokens, {B, N}, "tokens");
  const Whole parent(parents, {B, N}, "parents");
  const Whole level(depths, {B, N}, "depths");
  const Whole target(choice, {B, N}, "choice");
  const Truth real(valid, {B, N}, "valid");
  std::vector<char> accepted(N);
  for (int64_t b = 0; b < B; b++) {
    const int64_t first = b * N;
    int64_t deepest = 0;
    accepted[0] = true;
    for (int64_t i = 1; i < N; i++) {  // of equally deep nodes the first stays
      const int64_t above = within(parent[first + i], i, "a parent");
      const bool chosen = token[first + i] == target[first + above];
      accepted[i] = accepted[above] && real[first + i] && chosen;
      if (accepted[i] && level[first + i] > level[first + deepest]) deepest = i;
    }
    int64_t* to = out(path) + b * D;
    int64_t* from = out(moves) + b * D;
    std::fill_n(to, D, int64_t(0));
    std::iota(from, from + D, int64_t(0));  // slots past the path stay in place
    for (int64_t i = deepest; i > 0; i = parent[first + i]) {
      const int64_t at = within(level[first + i], D, "a depth");
      to[at] = i;
      from[at] = i;
    }
    out(length)[b] = level[first + deepest];
    for (int64_t i = 0; i < D; i++) out(emitted)[b * D + i] = target[first + to[i]];
  }
  return {path, length, emitted, moves};
}

namespace {

// Returns whether no number has all bits of its exponent set.
template <class Bits> bool all_finite(const void* data, int64_t count, Bits exponent) {
  const Bits* x = static_cast<const Bits*>(data);
  Bits found = 0;
  for (int64_t i = 0; i < count; i++) found |= (x[i] & exponent) == exponent;
  return !found;
}

bool all_finite(const void* data, int64_t count, at::ScalarType type) {
  if (type == at::kBFloat16) return all_finite<uint16_t>(data, count, 0x7f80);
  if (type == at::kHalf) return all_finite<uint16_t>(data, count, 0x7c00);
  TORCH_CHECK(type == at::kFloat, "features must be bfloat16, float16 or float32; they are ", type);
  return all_finite<uint32_t>(data, count, 0x7f800000);
}

// The facts of a report, and the order of its columns, which run/observer.py names (`REPORT`).
class Report {
 public:
  static constexpr std::array NAMES{"count", "length", "done", "pos"};
  using Facts = std::array<int64_t, NAMES.size()>;

  explicit Report(const c10::List<std::string>& columns) {
    for (const std::string& name : columns.vec()) {
      const auto found = std::find(NAMES.begin(), NAMES.end(), name);
      TORCH_CHECK(found != NAMES.end(), "a report has no column ", name);
      order.push_back(found - NAMES.begin());
    }
  }
  void write(const Facts& facts, int64_t* to) const {
    for (size_t i = 0; i < order.size(); i++) to[i] = facts[order[i]];
  }

 private:
  std::vector<int64_t> order;
};

}  // namespace

// Computes `advance` of reference.py. tokens: [B, S+1], written; pos, draws, done, limit:
// [B]; roots: [B, N], the tree's tokens; path, emitted: [B, D+1]; length: [B]; ends: [E]; features:
// [B, N, F]; columns: C names, of the report.
// Returns: pos, draws, done, count, [B]; the new tokens [B, D+2] and features [B, D+1, F]; the
// report [B, D+1+C], whose `done` is 2 more where these features are not finite.
Tensors<7> advance(at::Tensor tokens, const at::Tensor& pos, const at::Tensor& draws,
                   const at::Tensor& done, const at::Tensor& limit, const at::Tensor& roots,
                   const at::Tensor& path, const at::Tensor& length, const at::Tensor& emitted,
                   const at::Tensor& ends, const at::Tensor& features,
                   const c10::List<std::string>& columns) {
  TORCH_CHECK(path.dim() == 2 && roots.dim() == 2 && tokens.dim() == 2 && features.dim() == 3,
              "operands do not fit");
  const int64_t B = path.size(0);
  const int64_t D = path.size(1);
  const int64_t N = roots.size(1);
  const int64_t S = tokens.size(1);
  const int64_t F = features.size(2);
  const int64_t C = D + int64_t(columns.size());
  const at::Tensor new_pos = at::empty_like(pos);
  const at::Tensor new_draws = at::empty_like(pos);
  const at::Tensor new_done = at::empty_like(done);
  const at::Tensor count = at::empty_like(pos);
  const at::Tensor row_tokens = at::empty({B, D + 1}, pos.options());
  const at::Tensor row_features = at::empty({B, D, F}, features.options());
  const at::Tensor facts = at::empty({B, C}, pos.options());
  TORCH_CHECK(tokens.is_contiguous() && tokens.size(0) == B && features.size(0) == B &&
                  features.size(1) == N,
              "tokens and features must be of ", B, " sequences, tokens in one piece");
  const Whole at(pos, {B}, "pos");
  const Whole drawn(draws, {B}, "draws");
  const Whole last(limit, {B}, "limit");
  const Whole root(roots, {B, N}, "roots");
  const Whole node(path, {B, D}, "path");
  const Whole accepted(length, {B}, "length");
  const Whole said(emitted, {B, D}, "emitted");
  const Whole end(ends, {ends.numel()}, "ends");
  const Truth over(done, {B}, "done");
  const at::Tensor of = features.contiguous();
  const Report report(columns);
  const int64_t bytes = F * features.element_size();
  for (int64_t b = 0; b < B; b++) {
    const int64_t* next = said.data + b * D;
    const int64_t begin = at[b];
    const int64_t whole = within(accepted[b], D, "a length") + 1;
    int64_t kept = over[b] ? 0 : std::max<int64_t>(0, std::min(whole, last[b] - begin));
    bool ended = false;
    for (int64_t i = 0; i < kept && !ended; i++) {
      ended = std::find(end.data, end.data + ends.numel(), next[i]) != end.data + ends.numel();
      if (ended) kept = i + 1;
    }
    TORCH_CHECK(begin >= 0 && begin + kept < S, "a text of ", S,
                " tokens has no room behind token ", begin);
    std::copy_n(next, kept, out(tokens) + b * S + begin + 1);
    const bool finished = over[b] || ended || begin + kept >= last[b];
    out(count)[b] = kept;
    out(new_pos)[b] = begin + kept;
    out(new_draws)[b] = drawn[b] + kept;
    new_done.mutable_data_ptr<bool>()[b] = finished;
    int64_t* row = out(row_tokens) + b * (D + 1);
    row[0] = root[b * N];
    std::copy_n(next, D, row + 1);
    const char* from = static_cast<const char*>(of.const_data_ptr()) + b * N * bytes;
    char* to = static_cast<char*>(row_features.mutable_data_ptr()) + b * D * bytes;
    for (int64_t i = 0; i < D; i++)
      std::memcpy(to + i * bytes, from + within(node[b * D + i], N, "a node") * bytes, bytes);
    const bool broken = !all_finite(to, D * F, features.scalar_type());
    std::copy_n(next, D, out(facts) + b * C);
    report.write({kept, accepted[b], finished + 2 * broken, begin}, out(facts) + b * C + D);
  }
  return {new_pos, new_draws, new_done, count, row_tokens, row_features, facts};
}

// Computes `with_times` of reference.py. facts: [B, n]. Returns: [B, n + times].
at::Tensor with_times(const at::Tensor& facts, at::IntArrayRef times) {
  TORCH_CHECK(facts.dim() == 2, "facts must be [B, n]");
  const int64_t B = facts.size(0);
  const int64_t n = facts.size(1);
  const int64_t width = n + int64_t(times.size());
  const Whole known(facts, {B, n}, "facts");
  const at::Tensor all = at::empty({B, width}, facts.options());
  for (int64_t b = 0; b < B; b++) {
    int64_t* to = out(all) + b * width;
    std::copy_n(known.data + b * n, n, to);
    std::copy(times.begin(), times.end(), to + n);
  }
  return all;
}

// ------------------------------------------------------------------------------------------ places

// Computes `place_tokens` of reference.py. depths: [B, T]; none: `depth` of all tokens.
// Returns: slots [B, T], start [B] and positions [B, T].
Tensors<3> place_rows(const at::Tensor& pos, const Optional& done, const Optional& depths,
                      int64_t rows, int64_t slot, int64_t depth) {
  const int64_t B = pos.size(0);
  const at::Tensor slots = at::empty({B, rows}, pos.options());
  const at::Tensor start = at::empty({B}, pos.options());
  const at::Tensor positions = at::empty_like(slots);
  const Whole begin(pos, {B}, "pos");
  const auto over = optional<bool>(done, {B}, "done");
  const auto below = optional<int64_t>(depths, {B, rows}, "depths");
  for (int64_t b = 0; b < B; b++) {
    out(start)[b] = over && (*over)[b] ? 0 : begin[b];
    for (int64_t t = 0; t < rows; t++) {
      out(slots)[b * rows + t] = begin[b] + slot + t;
      out(positions)[b * rows + t] = begin[b] + (below ? (*below)[b * rows + t] : depth);
    }
  }
  return {slots, start, positions};
}

// Computes `causal` of reference.py. first: [B]; back: slots before it, from slot 0 on.
// Returns: slots [B, T], start [B] and mask [B, T, T].
Tensors<3> causal(const at::Tensor& first, int64_t rows, int64_t back) {
  const int64_t B = first.size(0);
  const at::Tensor slots = at::empty({B, rows}, first.options());
  const at::Tensor start = at::empty({B}, first.options());
  const at::Tensor mask = at::empty({B, rows, rows}, first.options().dtype(at::kBool));
  const Whole begin(first, {B}, "first");
  bool* sees = mask.mutable_data_ptr<bool>();
  for (int64_t b = 0; b < B; b++) {
    const int64_t from = back ? std::max<int64_t>(begin[b] - back, 0) : begin[b];
    out(start)[b] = from;
    for (int64_t t = 0; t < rows; t++) {
      out(slots)[b * rows + t] = from + t;
      for (int64_t w = 0; w < rows; w++) sees[(b * rows + t) * rows + w] = w <= t;
    }
  }
  return {slots, start, mask};
}

OPERATORS(m) {
  m.def(
      "expand_frontier(Tensor logits, float sharpness, Tensor? ids, Tensor? noise, int level, "
      "Tensor? temperature, Tensor? index, Tensor? values, Tensor? seen, int k, int count, "
      "int first_candidate, int first_slot, int slots, Tensor? fixed_children) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", cpu(expand_frontier));
  m.def(
      "select_nodes(Tensor[] tokens, Tensor[] values, Tensor[] parents, Tensor[] expanded, "
      "Tensor? nodes, int count, Tensor text, Tensor pos) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", cpu(select_nodes));
  m.def(
      "accept(Tensor tokens, Tensor parents, Tensor depths, Tensor valid, Tensor choice, int depth)"
      " -> (Tensor, Tensor, Tensor, Tensor)", cpu(accept));
  m.def(
      "advance(Tensor(a!) tokens, Tensor pos, Tensor draws, Tensor done, Tensor limit, "
      "Tensor roots, Tensor path, Tensor length, Tensor emitted, Tensor ends, Tensor features, "
      "str[] columns) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", cpu(advance));
  m.def("with_times(Tensor facts, int[] times) -> Tensor", cpu(with_times));
  m.def(
      "place_rows(Tensor pos, Tensor? done, Tensor? depths, int rows, int slot, int depth) "
      "-> (Tensor, Tensor, Tensor)", cpu(place_rows));
  m.def("causal(Tensor first, int rows, int back) -> (Tensor, Tensor, Tensor)", cpu(causal));
}

}  // namespace tree
