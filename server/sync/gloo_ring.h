// The sum of many blocks of memory over all ranks, around a ring.
#pragma once

#include <gloo/context.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "kernels/matrix.h"

namespace shardmlp {

struct MemoryBlock {
  void* data;
  int64_t byte_count;
};

// Each block = its sum over all ranks. As Gloo's own ring all-reduce, but over many blocks at once, so that one is on
// its way while another begins. The blocks, f32 or f64 all, have the same sizes in the same order on all ranks.
// Bit-identical on all ranks: each element is summed by one of them, in one order. `tag` differs from that of the
// collective before. Throws what Gloo throws.
void RingSum(gloo::Context& context, DType dtype, absl::Span<const MemoryBlock> blocks, uint32_t tag,
             std::chrono::milliseconds timeout);

}  // namespace shardmlp
