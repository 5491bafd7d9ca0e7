// Moves of slots within the buffers of a cache on a CPU. Only slots that move are read, often the
// tail of a path.

#include "operators.h"
#include "threads.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace compact {

constexpr int64_t GRAIN = 1 << 15;  // bytes that pay for a thread's wake-up

// Computes `compact` of reference.py, for any dtype. buffers: each [B, H, S, E]; start:
// [B]; path: [B, D+1]. Writes: the buffers.
void move_rows(at::TensorList buffers, const at::Tensor& start, const at::Tensor& path) {
  const int64_t B = buffers[0].size(0);
  const int64_t H = buffers[0].size(1);
  const int64_t S = buffers[0].size(2);
  const int64_t count = path.size(1);
  const int64_t row = buffers[0].size(3) * buffers[0].element_size();  // bytes
  const at::Tensor begin = start.contiguous();
  const at::Tensor from = path.contiguous();
  for (const at::Tensor& buffer : buffers)
    TORCH_CHECK(buffer.is_contiguous() && buffer.sizes() == buffers[0].sizes(),
                "buffers must be alike, each in one piece");
  const int64_t* firsts = begin.const_data_ptr<int64_t>();
  const int64_t* sources = from.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < B * count; i++) {
    const int64_t first = firsts[i / count];
    const int64_t slot = first + sources[i];
    TORCH_CHECK(first >= 0 && first + count <= S && slot >= 0 && slot < S, "a cache of ", S,
                " slots has no slot ", slot);
  }
  const int64_t grain = std::max<int64_t>(1, GRAIN / (B * H * count * row));
  parallel(int64_t(buffers.size()), grain, [&](int64_t first, int64_t last) {
    std::vector<char> held(count * row);
    for (int64_t i = first * B * H; i < last * B * H; i++) {
      const int64_t b = i / H % B;
      const int64_t* source = sources + b * count;
      char* buffer = static_cast<char*>(buffers[i / (B * H)].data_ptr());
      char* slots = buffer + (i % (B * H) * S + firsts[b]) * row;
      for (int64_t d = 0; d < count; d++)
        if (source[d] != d) std::memcpy(&held[d * row], slots + source[d] * row, row);
      for (int64_t d = 0; d < count; d++)
        if (source[d] != d) std::memcpy(slots + d * row, &held[d * row], row);
    }
  });
}

OPERATORS(m) {
  m.def("move_rows(Tensor(a!)[] buffers, Tensor start, Tensor path) -> ()", cpu(move_rows));
}

}  // namespace compact
