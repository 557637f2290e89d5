#include "kernels/cuda/kernels.h"
#include "kernels/cuda/operand.h"

namespace shardmlp {
namespace {

struct Convert {
  __device__ void operator()(int64_t row, int64_t pack) const { to.Store(from.Load(row, pack), row, pack); }

  WideOperand<const void> from;
  WideOperand<void> to;
};

}  // namespace

cudaError_t LaunchConvert(cudaStream_t stream, ConstMatrixView from, MatrixView to, bool over_link) {
  constexpr int64_t kLinkBlocks = 16;  // 128 KiB under way: 55 GB/s at a latency of 2 us
  return Launch(stream, to.rows, PackCount(to.cols), Convert{WideOperand(from), WideOperand(to)},
                over_link ? kLinkBlocks : kAnyBlocks);
}

}  // namespace shardmlp
