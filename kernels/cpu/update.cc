#include <cmath>
#include <variant>

#include "kernels/cpu/loops.h"
#include "kernels/number.h"
#include "kernels/update_rule.h"

namespace shardmlp {
namespace {

template <typename T>
void UpdateRow(const AdamWRule<T>& rule, const T* gradient, T* master, T* moment1, T* moment2, int64_t count) {
  const auto sqrt = [](T x) { return std::sqrt(x); };
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) rule.Apply(gradient[i], master[i], moment1[i], moment2[i], sqrt);
}

template <typename T>
void UpdateRow(const SgdRule<T>& rule, const T* gradient, T* master, T* moment1, int64_t count) {
  if (rule.momentum == 0) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) rule.Apply(gradient[i], master[i]);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) rule.Apply(gradient[i], master[i], moment1[i]);
  }
}

// weights = master, rounded
template <typename T>
void StoreWeights(const T* master, MatrixView weights) {
  WithDType(weights.dtype, [&](auto type) {
    auto* to = weights.as<typename decltype(type)::Type>();
#pragma omp simd
    for (int64_t i = 0; i < weights.cols; ++i) Store(master[i], to[i]);
  });
}

template <typename T>
void UpdateRows(const Team& team, const OptimizerUpdate& update) {
  const int64_t cols = update.master.cols;
  const auto for_each_row = [&](const auto& update_row) {
    team.Split(update.master.rows, cols, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        T* master = update.master.Rows(row, 1).as<T>();
        update_row(row, update.gradient.Rows(row, 1).as<T>(), master);
        if (!update.weights.empty()) StoreWeights(master, update.weights.Rows(row, 1));
      }
    });
  };
  if (const auto* adamw = std::get_if<AdamW>(&update.hyperparameters)) {
    const AdamWRule<T> rule(*adamw, update.update_count, update.gradient_scale);
    for_each_row([&](int64_t row, const T* gradient, T* master) {
      UpdateRow(rule, gradient, master, update.moment1.Rows(row, 1).as<T>(), update.moment2.Rows(row, 1).as<T>(), cols);
    });
  } else if (const auto* sgd = std::get_if<Sgd>(&update.hyperparameters)) {
    const SgdRule<T> rule(*sgd, update.update_count, update.gradient_scale);
    for_each_row([&](int64_t row, const T* gradient, T* master) {
      UpdateRow(rule, gradient, master, update.moment1.Rows(row, 1).as<T>(), cols);
    });
  }
}

}  // namespace

void UpdateTensor(const Team& team, const OptimizerUpdate& update) {
  if (update.master.empty()) return;
  update.master.dtype == DType::kF64 ? UpdateRows<double>(team, update) : UpdateRows<float>(team, update);
}

}  // namespace shardmlp
