// Draft trees on a CPU: growing a level, choosing the nodes, accepting a path, and advancing the sequences.
//
// 1. `next_level` scores the children of every node of a frontier, keeps the best, and chooses the next frontier.
// 2. `rerank` chooses the nodes of a tree among all candidates, and derives parents, depths and the attention mask.
// 3. `accept` finds the deepest path that is the target's own choice; `advance` writes its tokens and moves the roots.
// 4. `place_rows` and `causal` say where the rows of a step lie in the cache, and what they see.
//
// Each computes what its plain reference does (ops/tree.py, draft_tree.py, decode.py), in one call where that takes
// dozens. Trees are small: nothing here pays for a thread but the scores of `next_level`.

#include "common.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tree {
namespace {

using Optional = std::optional<at::Tensor>;

constexpr int64_t GRAIN = 1 << 15;  // scores that pay for a thread's wake-up

const int64_t* whole(const at::Tensor& t) { return t.const_data_ptr<int64_t>(); }
int64_t* out(const at::Tensor& t) { return t.mutable_data_ptr<int64_t>(); }

// The indices 0 .. n - 1 by descending score; equal scores keep their order
void best_first(const float* score, int64_t n, std::vector<int64_t>& order) {
  order.resize(n);
  std::iota(order.begin(), order.end(), int64_t(0));
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return score[a] > score[b]; });
}

struct Shared {  // the noise by which the target will choose
  const float* noise;  // [V of the target], or null
  float temperature;
};

// z [n] -> scores [n]: with the shared noise, times the sharpness. ids: the token of each column, or null
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

// `next_level` of ops/tree.py. logits: [B, R, V] fp32; noise: [B, D+1, Vt]; ids: [V]; values: [B, R], index: [B, R] and
// seen: [B, R, W] of the frontier, none of the root; places: [1, R']. Returns: tokens, values and parents of the
// candidates, [B, X]; of the next frontier index, tokens, parent and values, [B, R'], and seen, [B, R', W].
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> next_level(
    const at::Tensor& logits, double sharpness, const Optional& ids, const Optional& noise, int64_t level,
    double temperature, const Optional& index, const Optional& values, const Optional& seen, const Optional& places,
    int64_t k, int64_t count, at::IntArrayRef at, bool by_value) {
  const int64_t B = logits.size(0), R = logits.size(1), V = logits.size(2), X = R * k;
  const int64_t begin = at[0], slot = at[1], W = at[2];  // the level's first flat index and scratch slot; all slots
  TORCH_CHECK(0 < k && k <= V && count <= X, "no ", k, " best of ", V, " scores, or ", count, " of ", X, " candidates");
  const at::Tensor z = logits.contiguous(), numbers = logits.new_empty({B, X}, at::kLong);
  const at::Tensor tokens = at::empty_like(numbers), parents = at::empty_like(numbers);
  const at::Tensor path = at::empty({B, X}, z.options()), step = at::empty({B, X}, z.options());
  const int64_t* of_column = ids ? whole(*ids) : nullptr;
  const int64_t draws = noise ? noise->size(1) : 0, Vt = noise ? noise->size(2) : 0;
  const float* gumbel = noise ? noise->const_data_ptr<float>() : nullptr;
  TORCH_CHECK(!noise || (noise->is_contiguous() && level < draws && (ids || Vt == V)), "noise must be [B, D+1, V]");
  float *sums = path.mutable_data_ptr<float>(), *steps = step.mutable_data_ptr<float>();
  int64_t *token = out(tokens), *parent = out(parents);
  const float* so_far = values ? values->const_data_ptr<float>() : nullptr;
  parallel(B * R, std::max<int64_t>(1, GRAIN / V), [&](int64_t first, int64_t last) {
    std::vector<float> scores(V), best(k);
    std::vector<int64_t> column(k);
    for (int64_t r = first; r < last; r++) {
      const Shared shared{gumbel ? gumbel + (r / R * draws + level) * Vt : nullptr, float(temperature)};
      score_row(z.const_data_ptr<float>() + r * V, V, shared, of_column, float(sharpness), scores.data());
      rows::best_of(scores.data(), V, k, best.data(), column.data());
      const float total = float(best[0] + std::log(exponential_sum(scores.data(), V, best[0])));
      for (int64_t i = 0; i < k; i++) {
        const float value = best[i] - total;  // no value may exceed its parent's, not even by rounding
        steps[r * k + i] = value > 0 ? 0.0f : value;
        sums[r * k + i] = (so_far ? so_far[r] : 0.0f) + steps[r * k + i];
        token[r * k + i] = of_column ? of_column[column[i]] : column[i];
        parent[r * k + i] = index ? whole(*index)[r] : -1;
      }
    }
  });
  const at::Tensor next = logits.new_empty({B, count}, at::kLong), chosen = at::empty_like(next);
  const at::Tensor above = at::empty_like(next), value = at::empty({B, count}, z.options());
  const at::Tensor sees = logits.new_empty({B, count, W}, at::kBool);
  const bool* seen_above = seen ? seen->const_data_ptr<bool>() : nullptr;
  std::vector<int64_t> order;
  for (int64_t b = 0; b < B; b++) {
    if (places) order.assign(whole(*places), whole(*places) + count);
    else if (count) best_first((by_value ? sums : steps) + b * X, X, order);
    for (int64_t i = 0; i < count; i++) {
      const int64_t to = b * count + i, from = order[i], row = from / k;
      TORCH_CHECK(from >= 0 && from < X, "a level of ", X, " candidates has no candidate ", from);
      out(next)[to] = begin + from, out(chosen)[to] = token[b * X + from], out(above)[to] = row;
      value.mutable_data_ptr<float>()[to] = sums[b * X + from];
      bool* mask = sees.mutable_data_ptr<bool>() + to * W;  // a node sees its ancestors and itself
      for (int64_t w = 0; w < W; w++) mask[w] = w == slot + i || (seen_above && seen_above[(b * R + row) * W + w]);
    }
  }
  return {tokens, path, parents, next, chosen, above, value, sees};
}

// `rerank` of ops/tree.py. tokens, values, parents: of the candidates, level by level, each [B, X]; ran: of every level
// the flat indices that ran, [B, R]; nodes: [1 or B, N-1] flat indices, ascending; none: the `count` best. text: [B, S+1];
// pos: [B]. Returns: tokens, parents, depths, mask, valid, values and places of the nodes; the node of each candidate.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> rerank(
    at::TensorList tokens, at::TensorList values, at::TensorList parents, at::TensorList ran, const Optional& nodes,
    int64_t count, const at::Tensor& text, const at::Tensor& pos) {
  const int64_t B = pos.size(0), N = count + 1, S = text.size(1);
  int64_t P = 0;
  for (const at::Tensor& level : values) P += level.size(1);
  TORCH_CHECK(count <= P, "a tree of ", N, " nodes needs as many candidates and a root; there are ", P);
  const at::Tensor token = at::empty({B, N}, pos.options()), above = at::empty_like(token);
  const at::Tensor depth = at::empty_like(token), place = at::empty_like(token);
  const at::Tensor number = at::empty({B, P + 1}, pos.options());
  const at::Tensor mask = at::empty({B, N, N}, pos.options().dtype(at::kBool));
  const at::Tensor valid = at::empty({B, N}, mask.options());
  const at::Tensor value = at::empty({B, N}, pos.options().dtype(at::kFloat));
  std::vector<float> score(P);
  std::vector<int64_t> order, drafted(P), parent(P), where(P + 1);
  for (int64_t b = 0; b < B; b++) {
    int64_t at = 0;
    for (size_t level = 0; level < values.size(); level++) {
      const int64_t X = values[level].size(1);
      std::copy_n(values[level].const_data_ptr<float>() + b * X, X, &score[at]);
      std::copy_n(whole(tokens[level]) + b * X, X, &drafted[at]);
      std::copy_n(whole(parents[level]) + b * X, X, &parent[at]);
      at += X;
    }
    if (nodes) {
      const int64_t* fixed = whole(*nodes) + (nodes->size(0) > 1 ? b * count : 0);
      order.assign(fixed, fixed + count);
    } else {
      best_first(score.data(), P, order);
      order.resize(count);
      std::sort(order.begin(), order.end());
    }
    std::fill(where.begin(), where.end(), int64_t(0));
    int64_t ordinal = 1;  // 0 is the root's
    for (const at::Tensor& level : ran)
      for (int64_t i = 0; i < level.size(1); i++) where[whole(level)[b * level.size(1) + i] + 1] = ordinal++;
    int64_t *of = out(number) + b * (P + 1), *t = out(token) + b * N, *p = out(above) + b * N, *d = out(depth) + b * N;
    bool* sees = mask.mutable_data_ptr<bool>() + b * N * N;
    std::fill_n(of, P + 1, int64_t(0));
    std::fill_n(sees, N * N, false);
    const int64_t root = whole(pos)[b];
    TORCH_CHECK(root >= 0 && root < S, "a text of ", S, " tokens has no token ", root);
    t[0] = whole(text)[b * S + root], p[0] = d[0] = 0, sees[0] = true;
    valid.mutable_data_ptr<bool>()[b * N] = true, value.mutable_data_ptr<float>()[b * N] = 0;
    out(place)[b * N] = 0;
    for (int64_t i = 1; i < N; i++) {  // parents precede children
      const int64_t from = order[i - 1];
      TORCH_CHECK(from >= 0 && from < P && parent[from] < from, "candidate ", from, " of ", P, " has no parent before it");
      of[from + 1] = i, t[i] = drafted[from], p[i] = of[parent[from] + 1], d[i] = d[p[i]] + 1;
      std::copy_n(sees + p[i] * N, N, sees + i * N);
      sees[i * N + i] = true;
      valid.mutable_data_ptr<bool>()[b * N + i] = score[from] > -INFINITY;
      value.mutable_data_ptr<float>()[b * N + i] = score[from];
      out(place)[b * N + i] = where[from + 1];
    }
  }
  return {token, above, depth, mask, valid, value, place, number};
}

// -------------------------------------------------------------------------------------------------- accepting

// `accept` of draft_tree.py. tokens, parents, depths: [B, N]; mask: [B, N, N]; valid: [B, N]; choice: [B, N].
// Returns: path [B, D+1], length [B], emitted [B, D+1], moves [B, D+1].
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> accept(
    const at::Tensor& tokens, const at::Tensor& parents, const at::Tensor& depths, const at::Tensor& mask,
    const at::Tensor& valid, const at::Tensor& choice, int64_t depth) {
  const int64_t B = tokens.size(0), N = tokens.size(1), D = depth + 1;
  const at::Tensor t = tokens.contiguous(), p = parents.contiguous(), d = depths.contiguous(), v = valid.contiguous();
  const at::Tensor wanted = choice.contiguous(), path = at::empty({B, D}, t.options()), length = at::empty({B}, t.options());
  const at::Tensor emitted = at::empty_like(path), moves = at::empty_like(path);
  std::vector<char> accepted(N);
  for (int64_t b = 0; b < B; b++) {
    const int64_t *token = whole(t) + b * N, *parent = whole(p) + b * N, *level = whole(d) + b * N;
    const int64_t* target = whole(wanted) + b * N;
    const bool* real = v.const_data_ptr<bool>() + b * N;
    int64_t deepest = 0;
    accepted[0] = true;
    for (int64_t i = 1; i < N; i++) {  // parents precede children; of equally deep nodes the first stays
      accepted[i] = accepted[parent[i]] && real[i] && token[i] == target[parent[i]];
      if (accepted[i] && level[i] > level[deepest]) deepest = i;
    }
    TORCH_CHECK(level[deepest] <= depth, "a path of ", level[deepest], " nodes is deeper than ", depth);
    int64_t *to = out(path) + b * D, *from = out(moves) + b * D;
    std::fill_n(to, D, int64_t(0));
    std::iota(from, from + D, int64_t(0));  // rows past the path stay where they are
    for (int64_t i = deepest; level[i] > 0; i = parent[i]) to[level[i]] = from[level[i]] = i;
    out(length)[b] = level[deepest];
    for (int64_t i = 0; i < D; i++) out(emitted)[b * D + i] = target[to[i]];
  }
  return {path, length, emitted, moves};
}

// `advance` of decode.py. tokens: [B, S+1], written; pos, draws, done, limit: [B]; roots: [B, N], the tree's tokens;
// path, emitted: [B, D+1]; length: [B]; ends: [E]; features: [B, N, F]; preset: which the host may choose next.
// Returns: pos, draws, done, count, [B]; the rows' tokens [B, D+2] and features [B, D+1, F]; the report [B, D+6].
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> advance(
    at::Tensor tokens, const at::Tensor& pos, const at::Tensor& draws, const at::Tensor& done, const at::Tensor& limit,
    const at::Tensor& roots, const at::Tensor& path, const at::Tensor& length, const at::Tensor& emitted,
    const at::Tensor& ends, const at::Tensor& features, int64_t preset) {
  const int64_t B = path.size(0), D = path.size(1), N = roots.size(1), S = tokens.size(1), E = ends.numel();
  const at::Tensor of = features.contiguous(), root = roots.contiguous();
  const at::Tensor new_pos = at::empty_like(pos), new_draws = at::empty_like(pos), count = at::empty_like(pos);
  const at::Tensor new_done = at::empty_like(done), row_tokens = at::empty({B, D + 1}, pos.options());
  const at::Tensor facts = at::empty({B, D + 5}, pos.options());
  const at::Tensor row_features = at::empty({B, D, features.size(2)}, features.options());
  const int64_t bytes = features.size(2) * features.element_size();
  TORCH_CHECK(tokens.is_contiguous() && path.is_contiguous() && emitted.is_contiguous(), "tokens must lie in one piece");
  for (int64_t b = 0; b < B; b++) {
    const int64_t *next = whole(emitted) + b * D, *at_depth = whole(path) + b * D, begin = whole(pos)[b];
    const bool over = done.const_data_ptr<bool>()[b];
    const auto is_end = [&](int64_t token) { return std::find(whole(ends), whole(ends) + E, token) != whole(ends) + E; };
    int64_t kept = over ? 0 : std::min(whole(length)[b] + 1, whole(limit)[b] - begin);
    bool ended = false;
    for (int64_t i = 0; i < kept && !ended; i++)
      if ((ended = is_end(next[i]))) kept = i + 1;
    kept = std::max<int64_t>(kept, 0);
    TORCH_CHECK(begin >= 0 && begin + kept < S, "a text of ", S, " tokens has no room behind token ", begin);
    std::copy_n(next, kept, out(tokens) + b * S + begin + 1);
    out(count)[b] = kept, out(new_pos)[b] = begin + kept, out(new_draws)[b] = whole(draws)[b] + kept;
    const bool last = over || ended || begin + kept >= whole(limit)[b];
    new_done.mutable_data_ptr<bool>()[b] = last;
    int64_t *row = out(row_tokens) + b * (D + 1), *fact = out(facts) + b * (D + 5);
    row[0] = whole(root)[b * N];
    std::copy_n(next, D, row + 1);
    const int64_t told[5] = {kept, whole(length)[b], last, preset, begin};
    std::copy_n(told, 5, std::copy_n(next, D, fact));
    const char* from = static_cast<const char*>(of.const_data_ptr()) + b * N * bytes;
    char* to = static_cast<char*>(row_features.mutable_data_ptr()) + b * D * bytes;
    for (int64_t i = 0; i < D; i++) std::memcpy(to + i * bytes, from + at_depth[i] * bytes, bytes);
  }
  return {new_pos, new_draws, new_done, count, row_tokens, row_features, facts};
}

// `Idle.extend` of extras/deferred.py: number i of the rows that wait goes to place i % ROOM. kept: [B, ROOM + 1, F],
// written; features: [B, R, F]; count, waiting, passed: [B]. Returns: waiting and passed.
std::tuple<at::Tensor, at::Tensor> keep_rows(at::Tensor kept, const at::Tensor& features, const at::Tensor& count,
                                             const at::Tensor& waiting, const at::Tensor& passed) {
  const int64_t B = features.size(0), R = features.size(1), places = kept.size(1), room = places - 1;
  const int64_t bytes = features.size(2) * features.element_size();
  const at::Tensor of = features.contiguous(), more = at::empty_like(waiting), by = at::empty_like(passed);
  TORCH_CHECK(kept.is_contiguous() && kept.size(2) == features.size(2), "rows of other widths wait");
  for (int64_t b = 0; b < B; b++) {
    const int64_t rows = whole(count)[b], before = whole(waiting)[b];
    TORCH_CHECK(rows >= 0 && rows <= R, "of ", R, " rows ", rows, " cannot count");
    for (int64_t i = std::max<int64_t>(0, rows - room); i < rows; i++)
      std::memcpy(static_cast<char*>(kept.mutable_data_ptr()) + (b * places + (before + i) % room) * bytes,
                  static_cast<const char*>(of.const_data_ptr()) + (b * R + i) * bytes, bytes);
    out(more)[b] = before + rows, out(by)[b] = whole(passed)[b] + R;
  }
  return {more, by};
}

// ---------------------------------------------------------------------------------------------------- places

// `place_rows` of ops/tree.py: slots [B, T], start [B] and positions [B, T]. depths: [B, T]; none: `depth` of all rows
std::tuple<at::Tensor, at::Tensor, at::Tensor> place_rows(const at::Tensor& pos, const Optional& done, const Optional& depths,
                                                     int64_t rows, int64_t slot, int64_t depth) {
  const int64_t B = pos.size(0);
  const at::Tensor slots = at::empty({B, rows}, pos.options()), positions = at::empty_like(slots);
  const at::Tensor start = at::empty({B}, pos.options());
  for (int64_t b = 0; b < B; b++) {
    const int64_t begin = whole(pos)[b];
    out(start)[b] = done && done->const_data_ptr<bool>()[b] ? 0 : begin;
    for (int64_t t = 0; t < rows; t++) {
      out(slots)[b * rows + t] = begin + slot + t;
      out(positions)[b * rows + t] = begin + (depths ? whole(*depths)[b * rows + t] : depth);
    }
  }
  return {slots, start, positions};
}

// `causal_window` of model.py: slots [B, T] and mask [B, T, T]. start: [B]
std::tuple<at::Tensor, at::Tensor> causal(const at::Tensor& start, int64_t rows) {
  const int64_t B = start.size(0);
  const at::Tensor slots = at::empty({B, rows}, start.options());
  const at::Tensor mask = at::empty({B, rows, rows}, start.options().dtype(at::kBool));
  bool* sees = mask.mutable_data_ptr<bool>();
  for (int64_t b = 0; b < B; b++)
    for (int64_t t = 0; t < rows; t++) {
      out(slots)[b * rows + t] = start.const_data_ptr<int64_t>()[b] + t;
      for (int64_t w = 0; w < rows; w++) sees[(b * rows + t) * rows + w] = w <= t;
    }
  return {slots, mask};
}

}  // namespace tree
