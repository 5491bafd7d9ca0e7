// The best scores of a row (topk.cpp).
#pragma once

#include <cstdint>

namespace topk {

// Finds the k best of x [n], best first, of equal ones the lower index first.
void best_of(const float* x, int64_t n, int64_t k, float* best, int64_t* index);

}  // namespace topk
