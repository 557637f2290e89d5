#include <cmath>
#include <variant>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/operand.h"
#include "kernels/update_rule.h"

namespace shardmlp {
namespace {

template <typename T>
struct SquareRoot {
  __device__ T operator()(T x) const { return sqrt(x); }
};

// The weights [R, N], or none, are the masters rounded.
template <typename T>
__device__ void StoreWeights(const Pack<T>& masters, const WideOperand<void>& weights, int64_t row, int64_t pack) {
  if (weights.empty()) return;
  Pack<double> wide;
  for (int64_t i = 0; i < kPackSize; ++i) wide.at[i] = masters.at[i];
  weights.Store(wide, row, pack);
}

template <typename T>
struct StepAdamW {
  __device__ void operator()(int64_t row, int64_t pack) const {
    const Pack<T> gradients = gradient.Load(row, pack);
    Pack<T> masters = master.Load(row, pack);
    Pack<T> ms = moment1.Load(row, pack);
    Pack<T> vs = moment2.Load(row, pack);
    for (int64_t i = 0; i < kPackSize; ++i) {
      rule.Apply(gradients.at[i], masters.at[i], ms.at[i], vs.at[i], SquareRoot<T>());
    }
    master.Store(masters, row, pack);
    moment1.Store(ms, row, pack);
    moment2.Store(vs, row, pack);
    StoreWeights(masters, weights, row, pack);
  }

  AdamWRule<T> rule;
  Operand<const T> gradient;  // [R, N], as all
  Operand<T> master, moment1, moment2;
  WideOperand<void> weights;
};

template <typename T>
struct StepSgd {
  __device__ void operator()(int64_t row, int64_t pack) const {
    const Pack<T> gradients = gradient.Load(row, pack);
    Pack<T> masters = master.Load(row, pack);
    if (rule.momentum == 0) {
      for (int64_t i = 0; i < kPackSize; ++i) rule.Apply(gradients.at[i], masters.at[i]);
    } else {
      Pack<T> bs = moment1.Load(row, pack);
      for (int64_t i = 0; i < kPackSize; ++i) rule.Apply(gradients.at[i], masters.at[i], bs.at[i]);
      moment1.Store(bs, row, pack);
    }
    master.Store(masters, row, pack);
    StoreWeights(masters, weights, row, pack);
  }

  SgdRule<T> rule;
  Operand<const T> gradient;  // [R, N], as all
  Operand<T> master, moment1;
  WideOperand<void> weights;
};

template <typename T>
cudaError_t Step(cudaStream_t stream, const OptimizerUpdate& update) {
  const int64_t rows = update.master.rows;
  const int64_t packs = PackCount(update.master.cols);
  if (const auto* adamw = std::get_if<AdamW>(&update.hyperparameters)) {
    return Launch(stream, rows, packs,
                  StepAdamW<T>{AdamWRule<T>(*adamw, update.update_count, update.gradient_scale),
                               Operand<const T>(update.gradient), Operand<T>(update.master), Operand<T>(update.moment1),
                               Operand<T>(update.moment2), WideOperand(update.weights)});
  }
  if (const auto* sgd = std::get_if<Sgd>(&update.hyperparameters)) {
    return Launch(
        stream, rows, packs,
        StepSgd<T>{SgdRule<T>(*sgd, update.update_count, update.gradient_scale), Operand<const T>(update.gradient),
                   Operand<T>(update.master), Operand<T>(update.moment1), WideOperand(update.weights)});
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t LaunchUpdate(cudaStream_t stream, const OptimizerUpdate& update) {
  return update.master.dtype == DType::kF64 ? Step<double>(stream, update) : Step<float>(stream, update);
}

}  // namespace shardmlp
