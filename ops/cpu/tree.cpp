// Draft trees on a CPU: growing a level, choosing the nodes, accepting a path, and advancing the sequences.
//
// 1. `expand_frontier` scores the children of every node of a frontier, keeps the best, and chooses the next frontier.
// 2. `select_nodes` chooses the nodes of a tree among all candidates, and derives parents, depths and the attention mask.
// 3. `accept` finds the deepest path that is the target's own choice; `advance` writes its tokens and moves the roots.
// 4. `place_rows` (place_tokens in Python) and `causal` compute the cache slots of a step's tokens, and the slots that
//    they see.
//
// Each computes the same as its plain reference (ops/tree.py, draft_tree.py, decode.py), in one call instead of dozens.
// Trees are small: only the scores of `expand_frontier` pay for threads.

#include "tree.h"

#include "exponential.h"
#include "operands.h"
#include "operators.h"
#include "threads.h"
#include "topk.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tree {
namespace {

using Optional = std::optional<at::Tensor>;

constexpr int64_t GRAIN = 1 << 15;  // scores that pay for a thread's wake-up

int64_t* out(const at::Tensor& t) { return t.mutable_data_ptr<int64_t>(); }

// The indices 0 .. n - 1 by descending score; equal scores keep their order.
void best_first(const float* score, int64_t n, std::vector<int64_t>& order) {
  order.resize(n);
  std::iota(order.begin(), order.end(), int64_t(0));
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return score[a] > score[b]; });
}

struct Shared {
  const float* noise;  // the noise of the target's own choice, [V of the target], or null
  float temperature;
};

// z [n] -> scores [n]: with the shared noise, times the sharpness. ids: the token of each column, or null.
void score_row(const float* z, int64_t n, const Shared& shared, const int64_t* ids, float sharpness, float* scores) {
  if (!shared.noise)
    for (int64_t i = 0; i < n; i++) scores[i] = sharpness * z[i];
  else if (ids)
    for (int64_t i = 0; i < n; i++) scores[i] = sharpness * (shared.temperature * (z[i] + shared.noise[ids[i]]));
  else
    for (int64_t i = 0; i < n; i++) scores[i] = sharpness * (shared.temperature * (z[i] + shared.noise[i]));
}

}  // namespace

// ------------------------------------------------------------------------------------------------ growing

// `expand_frontier` of ops/tree.py. logits: [B, R, V] fp32, or [B, 1, V], which all R nodes share; noise: [B, D+1, Vt] and temperature [B], both or none; ids: [V];
// of the frontier index [B, R], values [B, R] and seen [B, R, W], none of the root's; places: [1, R']; at: the level's
// first flat index and first scratch slot, and W. Returns: tokens, values and parents of the candidates, [B, X]; of the
// next frontier index, tokens, parent and values, [B, R'], and seen, [B, R', W].
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> expand_frontier(
    const at::Tensor& logits, double sharpness, const Optional& ids, const Optional& noise, int64_t level,
    const Optional& temperature, const Optional& index, const Optional& values, const Optional& seen,
    const Optional& places, int64_t k, int64_t count, at::IntArrayRef at, bool by_value) {
  TORCH_CHECK(logits.dim() == 3 && at.size() == 3 && (!noise || noise->dim() == 3), "logits and noise have 3 dimensions");
  const int64_t B = logits.size(0), rows = logits.size(1), V = logits.size(2);
  const int64_t R = rows == 1 && index ? index->size(-1) : rows, X = R * k;
  const int64_t begin = at[0], slot = at[1], W = at[2], draws = noise ? noise->size(1) : 0;
  const int64_t Vt = noise ? noise->size(2) : V;
  TORCH_CHECK(0 < k && k <= V && 0 <= count && count <= X, "there are no ", k, " best of ", V, " scores, or no ", count,
              " of ", X, " candidates");
  const Operand<float> z(logits, {B, rows, V}, "logits");
  const auto of_column = optional<int64_t>(ids, {V}, "ids");
  const auto gumbel = optional<float>(noise, {B, draws, Vt}, "noise");
  const auto of_row = optional<float>(temperature, {B}, "temperature");
  TORCH_CHECK(bool(gumbel) == bool(of_row), "noise and temperature go together");
  const auto flat = optional<int64_t>(index, {B, R}, "index");
  const auto so_far = optional<float>(values, {B, R}, "values");
  const auto sees_above = optional<bool>(seen, {B, R, W}, "seen");
  const auto fixed = optional<int64_t>(places, {1, count}, "places");
  if (gumbel) within(level, draws, "level");
  TORCH_CHECK(of_column || Vt == V, "noise of ", Vt, " tokens does not fit scores of ", V);
  for (int64_t i = 0; of_column && gumbel && i < V; i++) within((*of_column)[i], Vt, "an id");
  const at::Tensor tokens = logits.new_empty({B, X}, at::kLong), parents = at::empty_like(tokens);
  const at::Tensor path = logits.new_empty({B, X}), step = at::empty_like(path);
  float *sums = path.mutable_data_ptr<float>(), *steps = step.mutable_data_ptr<float>();
  int64_t *token = out(tokens), *parent = out(parents);
  const int64_t* id = of_column ? of_column->data : nullptr;
  std::vector<float> values_of(B * rows * k);  // of the children of each row
  std::vector<int64_t> tokens_of(B * rows * k);
  parallel(B * rows, std::max<int64_t>(1, GRAIN / V), [&](int64_t first, int64_t last) {
    std::vector<float> scores(V), best(k);
    std::vector<int64_t> column(k);
    for (int64_t r = first; r < last; r++) {
      const float* drawn = gumbel ? gumbel->data + (r / rows * draws + level) * Vt : nullptr;
      const float row_temperature = of_row ? (*of_row)[r / rows] : 0.0f;
      score_row(z.data + r * V, V, {drawn, row_temperature}, id, float(sharpness), scores.data());
      topk::best_of(scores.data(), V, k, best.data(), column.data());
      const float total = float(best[0] + std::log(exponential_sum(scores.data(), V, best[0])));
      for (int64_t i = 0; i < k; i++) {
        const float value = best[i] - total;  // no value may exceed its parent's, not even by rounding
        values_of[r * k + i] = value > 0 ? 0.0f : value;
        tokens_of[r * k + i] = id ? id[column[i]] : column[i];
      }
    }
  });
  for (int64_t node = 0; node < B * R; node++)
    for (int64_t i = 0, from = (rows == R ? node : node / R) * k; i < k; i++, from++) {
      const int64_t to = node * k + i;
      steps[to] = values_of[from], token[to] = tokens_of[from], parent[to] = flat ? (*flat)[node] : -1;
      sums[to] = (so_far ? (*so_far)[node] : 0.0f) + steps[to];
    }
  const at::Tensor next = logits.new_empty({B, count}, at::kLong), chosen = at::empty_like(next);
  const at::Tensor above = at::empty_like(next), value = logits.new_empty({B, count});
  const at::Tensor sees = logits.new_empty({B, count, W}, at::kBool);
  std::vector<int64_t> order;
  for (int64_t b = 0; b < B; b++) {
    if (fixed) order.assign(fixed->data, fixed->data + count);
    else if (count) best_first((by_value ? sums : steps) + b * X, X, order);
    for (int64_t i = 0; i < count; i++) {
      const int64_t to = b * count + i, from = within(order[i], X, "a place"), row = from / k;
      out(next)[to] = begin + from, out(chosen)[to] = token[b * X + from], out(above)[to] = row;
      value.mutable_data_ptr<float>()[to] = sums[b * X + from];
      bool* mask = sees.mutable_data_ptr<bool>() + to * W;  // a node sees its ancestors and itself
      for (int64_t w = 0; w < W; w++) mask[w] = w == slot + i || (sees_above && (*sees_above)[(b * R + row) * W + w]);
    }
  }
  return {tokens, path, parents, next, chosen, above, value, sees};
}

// `select_nodes` of ops/tree.py. tokens, values, parents: of the candidates, level by level, each [B, X]; ran: of every level
// the flat indices that the drafter ran, [B, R]; nodes: [1 or B, N-1] flat indices, ascending; none: the `count` best.
// text: [B, S]; pos: [B]. Returns: the first seven fields of `DraftTree`.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> select_nodes(
    at::TensorList tokens, at::TensorList values, at::TensorList parents, at::TensorList ran, const Optional& nodes,
    int64_t count, const at::Tensor& text, const at::Tensor& pos) {
  TORCH_CHECK(text.dim() == 2 && tokens.size() == values.size() && parents.size() == values.size(), "levels differ");
  const int64_t B = text.size(0), N = count + 1, S = text.size(1);
  const Whole said(text, {B, S}, "text"), root(pos, {B}, "pos");
  int64_t P = 0;
  for (const at::Tensor& level : values) P += level.size(-1);
  TORCH_CHECK(count >= 0 && count <= P, "a tree of ", N, " nodes needs as many candidates and a root; there are ", P);
  const int64_t sets = nodes && nodes->size(0) > 1 ? B : 1;
  const auto fixed = optional<int64_t>(nodes, {sets, count}, "nodes");
  std::vector<float> score(B * P);
  std::vector<int64_t> order, drafted(B * P), parent(B * P), place(B * (P + 1));
  int64_t begin = 0, ordinal = 1;  // 0 is the root's
  for (size_t level = 0; level < values.size(); level++) {
    const int64_t X = values[level].size(-1);
    const Operand<float> v(values[level], {B, X}, "values");
    const Whole t(tokens[level], {B, X}, "tokens"), p(parents[level], {B, X}, "parents");
    for (int64_t b = 0; b < B; b++)
      for (int64_t i = 0; i < X; i++) {
        const int64_t to = b * P + begin + i;
        score[to] = v[b * X + i], drafted[to] = t[b * X + i], parent[to] = p[b * X + i];
        TORCH_CHECK(parent[to] >= -1 && parent[to] < begin + i, "candidate ", begin + i, " has no parent before it");
      }
    begin += X;
  }
  for (const at::Tensor& level : ran) {
    const int64_t R = level.size(-1);
    const Whole index(level, {B, R}, "ran");
    for (int64_t b = 0; b < B; b++)
      for (int64_t i = 0; i < R; i++) place[b * (P + 1) + within(index[b * R + i], P, "an index") + 1] = ordinal + i;
    ordinal += R;
  }
  const at::Tensor token = at::empty({B, N}, text.options()), above = at::empty_like(token);
  const at::Tensor depth = at::empty_like(token), places = at::empty_like(token);
  const at::Tensor value = text.new_empty({B, N}, at::kFloat);
  std::vector<int64_t> of(P + 1);  // the node of the root and of each candidate; 0: none
  const at::Tensor mask = text.new_empty({B, N, N}, at::kBool), valid = text.new_empty({B, N}, at::kBool);
  for (int64_t b = 0; b < B; b++) {
    if (fixed) {
      const int64_t* first = fixed->data + (sets > 1 ? b * count : 0);
      order.assign(first, first + count);
    } else {
      best_first(score.data() + b * P, P, order);
      order.resize(count);
      std::sort(order.begin(), order.end());
    }
    int64_t *t = out(token) + b * N, *p = out(above) + b * N, *d = out(depth) + b * N;
    bool *sees = mask.mutable_data_ptr<bool>() + b * N * N, *real = valid.mutable_data_ptr<bool>() + b * N;
    float* worth = value.mutable_data_ptr<float>() + b * N;
    std::fill(of.begin(), of.end(), int64_t(0));
    std::fill_n(sees, N * N, false);
    t[0] = said[b * S + within(root[b], S, "the root")];
    p[0] = d[0] = out(places)[b * N] = 0, sees[0] = real[0] = true, worth[0] = 0;
    for (int64_t i = 1; i < N; i++) {  // parents precede children
      const int64_t from = within(order[i - 1], P, "a node"), at = b * P + from;
      of[from + 1] = i, t[i] = drafted[at], p[i] = of[parent[at] + 1];
      TORCH_CHECK(p[i] < i, "nodes must ascend");
      d[i] = d[p[i]] + 1, worth[i] = score[at], real[i] = score[at] > -INFINITY;
      std::copy_n(sees + p[i] * N, N, sees + i * N);
      sees[i * N + i] = true;
      out(places)[b * N + i] = place[b * (P + 1) + from + 1];
    }
  }
  return {token, above, depth, mask, valid, value, places};
}

// -------------------------------------------------------------------------------------------------- accepting

// `accept` of ops/torch_backend.py. tokens, parents, depths, valid, choice: [B, N]; mask: [B, N, N], which parents imply.
// Returns: path [B, D+1], length [B], emitted [B, D+1], moves [B, D+1].
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> accept(
    const at::Tensor& tokens, const at::Tensor& parents, const at::Tensor& depths, const at::Tensor&,
    const at::Tensor& valid, const at::Tensor& choice, int64_t depth) {
  TORCH_CHECK(tokens.dim() == 2 && depth >= 0, "tokens must be [B, N]");
  const int64_t B = tokens.size(0), N = tokens.size(1), D = depth + 1;
  const Whole token(tokens, {B, N}, "tokens"), parent(parents, {B, N}, "parents"), level(depths, {B, N}, "depths");
  const Whole target(choice, {B, N}, "choice");
  const Truth real(valid, {B, N}, "valid");
  const at::Tensor path = at::empty({B, D}, tokens.options()), length = at::empty({B}, tokens.options());
  const at::Tensor emitted = at::empty_like(path), moves = at::empty_like(path);
  std::vector<char> accepted(N);
  for (int64_t b = 0; b < B; b++) {
    const int64_t first = b * N;
    int64_t deepest = 0;
    accepted[0] = true;
    for (int64_t i = 1; i < N; i++) {  // of equally deep nodes the first stays
      const int64_t above = within(parent[first + i], i, "a parent");
      accepted[i] = accepted[above] && real[first + i] && token[first + i] == target[first + above];
      if (accepted[i] && level[first + i] > level[first + deepest]) deepest = i;
    }
    int64_t *to = out(path) + b * D, *from = out(moves) + b * D;
    std::fill_n(to, D, int64_t(0));
    std::iota(from, from + D, int64_t(0));  // slots past the path stay in place
    for (int64_t i = deepest; i > 0; i = parent[first + i]) {
      const int64_t at = within(level[first + i], D, "a depth");
      to[at] = from[at] = i;
    }
    out(length)[b] = level[first + deepest];
    for (int64_t i = 0; i < D; i++) out(emitted)[b * D + i] = target[first + to[i]];
  }
  return {path, length, emitted, moves};
}

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

// `advance` of ops/torch_backend.py. tokens: [B, S+1], written; pos, draws, done, limit: [B]; roots: [B, N], the tree's tokens;
// path, emitted: [B, D+1]; length: [B]; ends: [E]; features: [B, N, F].
// Returns: pos, draws, done, count, [B]; the new tokens [B, D+2] and features [B, D+1, F]; the report [B, D+5], whose
// `done` is 2 more where these features are not finite.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> advance(
    at::Tensor tokens, const at::Tensor& pos, const at::Tensor& draws, const at::Tensor& done, const at::Tensor& limit,
    const at::Tensor& roots, const at::Tensor& path, const at::Tensor& length, const at::Tensor& emitted,
    const at::Tensor& ends, const at::Tensor& features) {
  TORCH_CHECK(path.dim() == 2 && roots.dim() == 2 && tokens.dim() == 2 && features.dim() == 3, "operands do not fit");
  const int64_t B = path.size(0), D = path.size(1), N = roots.size(1), S = tokens.size(1), F = features.size(2);
  TORCH_CHECK(tokens.is_contiguous() && tokens.size(0) == B && features.size(0) == B && features.size(1) == N,
              "tokens and features must be of ", B, " sequences, tokens in one piece");
  const Whole at(pos, {B}, "pos"), drawn(draws, {B}, "draws"), last(limit, {B}, "limit"), root(roots, {B, N}, "roots");
  const Whole node(path, {B, D}, "path"), accepted(length, {B}, "length"), said(emitted, {B, D}, "emitted");
  const Whole end(ends, {ends.numel()}, "ends");
  const Truth over(done, {B}, "done");
  const at::Tensor of = features.contiguous();
  const at::Tensor new_pos = at::empty_like(pos), new_draws = at::empty_like(pos), count = at::empty_like(pos);
  const at::Tensor new_done = at::empty_like(done), facts = at::empty({B, D + 4}, pos.options());
  const at::Tensor row_tokens = at::empty({B, D + 1}, pos.options());
  const at::Tensor row_features = at::empty({B, D, F}, features.options());
  const int64_t bytes = F * features.element_size();
  for (int64_t b = 0; b < B; b++) {
    const int64_t *next = said.data + b * D, begin = at[b], whole = within(accepted[b], D, "a length") + 1;
    int64_t kept = std::max<int64_t>(0, over[b] ? 0 : std::min(whole, last[b] - begin));
    bool ended = false;
    for (int64_t i = 0; i < kept && !ended; i++) {
      ended = std::find(end.data, end.data + ends.numel(), next[i]) != end.data + ends.numel();
      if (ended) kept = i + 1;
    }
    TORCH_CHECK(begin >= 0 && begin + kept < S, "a text of ", S, " tokens has no room behind token ", begin);
    std::copy_n(next, kept, out(tokens) + b * S + begin + 1);
    const bool finished = over[b] || ended || begin + kept >= last[b];
    out(count)[b] = kept, out(new_pos)[b] = begin + kept, out(new_draws)[b] = drawn[b] + kept;
    new_done.mutable_data_ptr<bool>()[b] = finished;
    int64_t *row = out(row_tokens) + b * (D + 1), *fact = out(facts) + b * (D + 4);
    row[0] = root[b * N];
    std::copy_n(next, D, row + 1);
    const int64_t told[4] = {kept, accepted[b], finished, begin};
    std::copy_n(told, 4, std::copy_n(next, D, fact));
    const char* from = static_cast<const char*>(of.const_data_ptr()) + b * N * bytes;
    char* to = static_cast<char*>(row_features.mutable_data_ptr()) + b * D * bytes;
    for (int64_t i = 0; i < D; i++) std::memcpy(to + i * bytes, from + within(node[b * D + i], N, "a node") * bytes, bytes);
    if (!all_finite(to, D * F, features.scalar_type())) fact[D + 2] += 2;
  }
  return {new_pos, new_draws, new_done, count, row_tokens, row_features, facts};
}

// `Idle.extend` of extras/deferred.py: waiting token i goes to place i % MAX_KEPT. kept: [B, MAX_KEPT + 1, F]; waiting,
// passed: [B]; features: [B, R, F]; count: [B]. Writes: kept, waiting and passed.
void keep_rows(at::Tensor kept, at::Tensor waiting, at::Tensor passed, const at::Tensor& features,
               const at::Tensor& count) {
  TORCH_CHECK(kept.dim() == 3 && features.dim() == 3 && kept.is_contiguous() && kept.size(2) == features.size(2) &&
                  kept.size(0) == features.size(0) && kept.scalar_type() == features.scalar_type(),
              "the rows that wait must be like the new ones");
  const int64_t B = features.size(0), R = features.size(1), places = kept.size(1), room = places - 1;
  const int64_t bytes = features.size(2) * features.element_size();
  const Whole rows(count, {B}, "count"), before(waiting, {B}, "waiting");
  TORCH_CHECK(waiting.is_contiguous() && passed.is_contiguous() && passed.sizes() == waiting.sizes() &&
                  passed.scalar_type() == at::kLong, "waiting and passed must be like each other, in one piece");
  const at::Tensor of = features.contiguous();
  for (int64_t b = 0; b < B; b++) {
    const int64_t real = within(rows[b], R + 1, "a count");
    TORCH_CHECK(before[b] >= 0 && room > 0, "no row can wait");
    for (int64_t i = std::max<int64_t>(0, real - room); i < real; i++)
      std::memcpy(static_cast<char*>(kept.mutable_data_ptr()) + (b * places + (before[b] + i) % room) * bytes,
                  static_cast<const char*>(of.const_data_ptr()) + (b * R + i) * bytes, bytes);
    out(waiting)[b] += real, out(passed)[b] += R;
  }
}

// ---------------------------------------------------------------------------------------------------- places

// `place_tokens` of ops/torch_backend.py. depths: [B, T]; none: `depth` of all tokens. Returns: slots [B, T], start [B] and
// positions [B, T].
std::tuple<at::Tensor, at::Tensor, at::Tensor> place_rows(const at::Tensor& pos, const Optional& done,
                                                          const Optional& depths, int64_t rows, int64_t slot,
                                                          int64_t depth) {
  const int64_t B = pos.size(0);
  const Whole begin(pos, {B}, "pos");
  const auto over = optional<bool>(done, {B}, "done");
  const auto below = optional<int64_t>(depths, {B, rows}, "depths");
  const at::Tensor slots = at::empty({B, rows}, pos.options()), positions = at::empty_like(slots);
  const at::Tensor start = at::empty({B}, pos.options());
  for (int64_t b = 0; b < B; b++) {
    out(start)[b] = over && (*over)[b] ? 0 : begin[b];
    for (int64_t t = 0; t < rows; t++) {
      out(slots)[b * rows + t] = begin[b] + slot + t;
      out(positions)[b * rows + t] = begin[b] + (below ? (*below)[b * rows + t] : depth);
    }
  }
  return {slots, start, positions};
}

// `causal_window` of kv_cache.py. first: [B]; back: slots before it, from slot 0 on. Returns: slots [B, T], start [B] and
// mask [B, T, T].
std::tuple<at::Tensor, at::Tensor, at::Tensor> causal(const at::Tensor& first, int64_t rows, int64_t back) {
  const int64_t B = first.size(0);
  const Whole begin(first, {B}, "first");
  const at::Tensor slots = at::empty({B, rows}, first.options()), start = at::empty({B}, first.options());
  const at::Tensor mask = at::empty({B, rows, rows}, first.options().dtype(at::kBool));
  bool* sees = mask.mutable_data_ptr<bool>();
  for (int64_t b = 0; b < B; b++) {
    const int64_t from = out(start)[b] = back ? std::max<int64_t>(begin[b] - back, 0) : begin[b];
    for (int64_t t = 0; t < rows; t++) {
      out(slots)[b * rows + t] = from + t;
      for (int64_t w = 0; w < rows; w++) sees[(b * rows + t) * rows + w] = w <= t;
    }
  }
  return {slots, start, mask};
}

// `CycleResult.timed` of decode.py. facts: [B, n] -> [B, n + times]
at::Tensor with_times(const at::Tensor& facts, at::IntArrayRef times) {
  TORCH_CHECK(facts.dim() == 2, "facts must be [B, n]");
  const int64_t B = facts.size(0), n = facts.size(1), count = int64_t(times.size());
  const Whole known(facts, {B, n}, "facts");
  const at::Tensor all = at::empty({B, n + count}, facts.options());
  for (int64_t b = 0; b < B; b++)
    std::copy(times.begin(), times.end(), std::copy_n(known.data + b * n, n, out(all) + b * (n + count)));
  return all;
}

// The results, empty, where steps are traced.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
           at::Tensor>
empty_level(const at::Tensor& logits, double, const Optional&, const Optional&, int64_t,
            const Optional&, const Optional& index, const Optional&, const Optional&,
            const Optional&, int64_t k, int64_t count, at::IntArrayRef at, bool) {
  const int64_t B = logits.size(0), R = index ? index->size(1) : logits.size(1);
  const auto whole = logits.options().dtype(at::kLong);
  const at::Tensor tokens = at::empty({B, R * k}, whole), next = at::empty({B, count}, whole);
  return {tokens,
          at::empty({B, R * k}, logits.options()),
          at::empty_like(tokens),
          next,
          at::empty_like(next),
          at::empty_like(next),
          at::empty({B, count}, logits.options()),
          at::empty({B, count, at[2]}, logits.options().dtype(at::kBool))};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
empty_tree(at::TensorList, at::TensorList, at::TensorList, at::TensorList, const Optional&,
           int64_t count, const at::Tensor&, const at::Tensor& pos) {
  const int64_t B = pos.size(0), N = count + 1;
  const at::Tensor tokens = at::empty({B, N}, pos.options());
  return {tokens,
          at::empty_like(tokens),
          at::empty_like(tokens),
          at::empty({B, N, N}, pos.options().dtype(at::kBool)),
          at::empty({B, N}, pos.options().dtype(at::kBool)),
          at::empty({B, N}, pos.options().dtype(at::kFloat)),
          at::empty_like(tokens)};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>
empty_path(const at::Tensor& tokens, const at::Tensor&, const at::Tensor&, const at::Tensor&,
           const at::Tensor&, const at::Tensor&, int64_t depth) {
  const int64_t B = tokens.size(0);
  const at::Tensor path = at::empty({B, depth + 1}, tokens.options());
  return {path, at::empty({B}, tokens.options()), at::empty_like(path), at::empty_like(path)};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
empty_advance(at::Tensor, const at::Tensor& pos, const at::Tensor& draws, const at::Tensor& done,
              const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
              const at::Tensor& emitted, const at::Tensor&, const at::Tensor& features) {
  const int64_t B = emitted.size(0), D = emitted.size(1), F = features.size(2);
  return {at::empty_like(pos),
          at::empty_like(draws),
          at::empty_like(done),
          at::empty_like(pos),
          at::empty({B, D + 1}, pos.options()),
          at::empty({B, D, F}, features.options()),
          at::empty({B, D + 4}, pos.options())};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> empty_places(const at::Tensor& pos, const Optional&,
                                                            const Optional&, int64_t rows, int64_t,
                                                            int64_t) {
  const at::Tensor slots = at::empty({pos.size(0), rows}, pos.options());
  return {slots, at::empty_like(pos), at::empty_like(slots)};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> empty_window(const at::Tensor& first, int64_t rows,
                                                            int64_t) {
  const int64_t B = first.size(0);
  return {at::empty({B, rows}, first.options()), at::empty_like(first),
          at::empty({B, rows, rows}, first.options().dtype(at::kBool))};
}
void skip_rows(at::Tensor, at::Tensor, at::Tensor, const at::Tensor&, const at::Tensor&) {}

OPERATORS(m) {
  m.def(
      "expand_frontier(Tensor logits, float sharpness, Tensor? ids, Tensor? noise, int level, "
      "Tensor? temperature, Tensor? index, Tensor? values, Tensor? seen, Tensor? places, int k, "
      "int count, int[] at, bool by_value) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.impl("expand_frontier", at::kCPU, expand_frontier);
  m.impl("expand_frontier", at::kMeta, empty_level);
  m.def(
      "select_nodes(Tensor[] tokens, Tensor[] values, Tensor[] parents, Tensor[] ran, Tensor? nodes, "
      "int count, Tensor text, Tensor pos) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.impl("select_nodes", at::kCPU, select_nodes);
  m.impl("select_nodes", at::kMeta, empty_tree);
  m.def(
      "accept(Tensor tokens, Tensor parents, Tensor depths, Tensor mask, Tensor valid, "
      "Tensor choice, int depth) -> (Tensor, Tensor, Tensor, Tensor)");
  m.impl("accept", at::kCPU, accept);
  m.impl("accept", at::kMeta, empty_path);
  m.def(
      "advance(Tensor(a!) tokens, Tensor pos, Tensor draws, Tensor done, Tensor limit, "
      "Tensor roots, Tensor path, Tensor length, Tensor emitted, Tensor ends, Tensor features) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.impl("advance", at::kCPU, advance);
  m.impl("advance", at::kMeta, empty_advance);
  m.def(
      "place_rows(Tensor pos, Tensor? done, Tensor? depths, int rows, int slot, int depth) "
      "-> (Tensor, Tensor, Tensor)");
  m.impl("place_rows", at::kCPU, place_rows);
  m.impl("place_rows", at::kMeta, empty_places);
  m.def("causal(Tensor first, int rows, int back) -> (Tensor, Tensor, Tensor)");
  m.impl("causal", at::kCPU, causal);
  m.impl("causal", at::kMeta, empty_window);
  m.def(
      "keep_rows(Tensor(a!) kept, Tensor(b!) waiting, Tensor(c!) passed, Tensor features, "
      "Tensor count) -> ()");
  m.impl("keep_rows", at::kCPU, keep_rows);
  m.impl("keep_rows", at::kMeta, skip_rows);
  m.def("with_times(Tensor facts, int[] times) -> Tensor");
  m.impl("with_times", at::kCPU, with_times);
}

}  // namespace tree
