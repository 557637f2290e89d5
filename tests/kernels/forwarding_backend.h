// A Backend that passes everything on to another, for those that want to do one thing differently.
#pragma once

#include <memory>

#include "kernels/backend.h"

namespace shardmlp {

class ForwardingBackend : public Backend {
 public:
  // `backend` must outlive this.
  explicit ForwardingBackend(Backend& backend) : backend_(backend) {}

  const DeviceInfo& device() const override { return backend_.device(); }
  bool Computes(DType dtype) const override { return backend_.Computes(dtype); }
  absl::Status Reserve(int64_t bytes) override { return backend_.Reserve(bytes); }
  absl::StatusOr<Buffer> Allocate(Memory memory, int64_t bytes) override { return backend_.Allocate(memory, bytes); }
  absl::Status Copy(Stream stream, ConstMatrixView from, MatrixView to) override {
    return backend_.Copy(stream, from, to);
  }
  absl::Status Zero(Stream stream, MatrixView m) override { return backend_.Zero(stream, m); }
  absl::Status MatMul(const Gemm& gemm) override { return backend_.MatMul(gemm); }
  absl::Status ActivationForward(const Activation& activation, ConstMatrixView gate_up, MatrixView a) override {
    return backend_.ActivationForward(activation, gate_up, a);
  }
  absl::Status ActivationBackward(const Activation& activation, MatrixView gate_up, MatrixView da) override {
    return backend_.ActivationBackward(activation, gate_up, da);
  }
  absl::Status AddColumnSums(ConstMatrixView m, MatrixView sum) override { return backend_.AddColumnSums(m, sum); }
  absl::Status SumOfSquares(ConstMatrixView m, double* sum) override { return backend_.SumOfSquares(m, sum); }
  absl::Status Update(const OptimizerUpdate& update) override { return backend_.Update(update); }
  absl::StatusOr<std::unique_ptr<Event>> Record(Stream stream) override { return backend_.Record(stream); }
  absl::Status Wait(Stream stream, const Event& event) override { return backend_.Wait(stream, event); }
  absl::Status Synchronize(const Event& event) override { return backend_.Synchronize(event); }

 private:
  Backend& backend_;
};

}  // namespace shardmlp
