// A Backend that passes everything on and adds up how long matrix products take. For backends that run work before they
// return.
#pragma once

#include <chrono>
#include <utility>

#include "tests/kernels/forwarding_backend.h"

namespace shardmlp {

class MatMulClock final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;

  // Seconds since the last call of this.
  double TakeSeconds() { return std::exchange(seconds_, 0); }

  absl::Status MatMul(const Gemm& gemm) override {
    const auto start = std::chrono::steady_clock::now();
    const absl::Status status = ForwardingBackend::MatMul(gemm);
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return status;
  }

 private:
  double seconds_ = 0;
};

}  // namespace shardmlp
