// The rows of a mixture's experts, sorted by expert.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace {

struct Group {
  int64_t expert, first, rows;  // rows of one expert lie side by side
};
struct Order {
  std::vector<int64_t> row;   // the index of each row in x and in the result
  std::vector<Group> groups;  // of the experts that are hit
};

// Sorts rows by expert, stably. expert: of each row; null: all rows have the only expert.
inline void group_rows(Order& order, const int64_t* expert, int64_t experts, int64_t rows) {
  std::vector<int64_t> next(experts + 1);  // place of the next row of each expert
  for (int64_t i = 0; i < rows; i++) next[(expert ? expert[i] : 0) + 1]++;
  order.groups.clear();
  for (int64_t e = 0; e < experts; e++) {
    if (next[e + 1]) order.groups.push_back({e, next[e], next[e + 1]});
    next[e + 1] += next[e];
  }
  order.row.resize(rows);
  for (int64_t i = 0; i < rows; i++) order.row[next[expert ? expert[i] : 0]++] = i;
}

// Returns the number of experts that are stacked in `packed`. dims: dimensions of one expert's
// layout; expert: of each row, checked.
inline int64_t count_experts(const at::Tensor& packed, int64_t dims, int64_t rows,
                             const std::optional<at::Tensor>& expert) {
  TORCH_CHECK(packed.dim() == dims + expert.has_value(), "weights of ", packed.dim(),
              " dimensions do not fit");
  if (!expert) return 1;
  TORCH_CHECK(
      expert->scalar_type() == at::kLong && expert->is_contiguous() && expert->numel() == rows,
      "expert must hold one int64 per row, in one piece");
  const int64_t* of_row = expert->const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows; i++)
    TORCH_CHECK(of_row[i] >= 0 && of_row[i] < packed.size(0), "there is no expert ", of_row[i]);
  return packed.size(0);
}

}  // namespace
