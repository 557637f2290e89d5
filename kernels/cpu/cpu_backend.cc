#include "kernels/cpu/cpu_backend.h"

#include <dnnl.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/team.h"
#include "kernels/operand_checks.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

class DoneEvent final : public Event {};

// Every operation has run when it returns.
class CpuBackend final : public Backend {
 public:
  CpuBackend(const Team& team, int64_t memory_bytes) : team_(team), memory_(memory_bytes) {
    const dnnl_version_t* version = dnnl_version();
    info_.name = absl::StrCat("cpu (oneDNN ", version->major, ".", version->minor, ".", version->patch, ", ",
                              team.threads(), " threads)");
    info_.memory_bytes = memory_bytes;
    info_.unified_memory = true;
    info_.host_bytes = memory_bytes;
    SetCblasThreads(team.threads());
  }

  const DeviceInfo& device() const override { return info_; }

  bool Computes(DType dtype) const override { return dtype == DType::kF64 || matmul_.Supports(dtype); }

  // Keeps nothing: the system gives a page when it is first written, wherever there is one, so a block would hold no
  // memory and nothing fragments.
  absl::Status Reserve(int64_t bytes) override { return memory_.Allocate(Memory::kDevice, bytes).status(); }

  absl::StatusOr<Buffer> Allocate(Memory memory, int64_t bytes) override { return memory_.Allocate(memory, bytes); }

  absl::Status Copy(Stream /*stream*/, ConstMatrixView from, MatrixView to) override {
    SHARDMLP_RETURN_IF_ERROR(CheckCopy(from, to));
    CopyMatrix(team_, from, to);
    return absl::OkStatus();
  }

  absl::Status Zero(Stream /*stream*/, MatrixView m) override {
    SHARDMLP_RETURN_IF_ERROR(CheckMatrix("m", m, m.rows, m.cols, m.dtype));
    ZeroMatrix(team_, m);
    return absl::OkStatus();
  }

  absl::Status MatMul(const Gemm& gemm) override {
    SHARDMLP_RETURN_IF_ERROR(CheckGemm(gemm));
    if (gemm.c.empty()) return absl::OkStatus();
    if (gemm.a.empty()) return EmptyProduct(gemm);
    if (gemm.a.dtype == DType::kF64) return CblasMatMul(gemm);
    team_.Enter(gemm.a.element_count() * gemm.c.cols);
    return matmul_.Run(gemm);
  }

  absl::Status ActivationForward(const Activation& activation, ConstMatrixView gate_up, MatrixView a) override {
    SHARDMLP_RETURN_IF_ERROR(CheckActivation(activation, gate_up, a));
    shardmlp::ActivationForward(team_, activation, gate_up, a);
    return absl::OkStatus();
  }

  absl::Status ActivationBackward(const Activation& activation, MatrixView gate_up, MatrixView da) override {
    SHARDMLP_RETURN_IF_ERROR(CheckActivation(activation, gate_up, da));
    shardmlp::ActivationBackward(team_, activation, gate_up, da);
    return absl::OkStatus();
  }

  absl::Status AddColumnSums(ConstMatrixView m, MatrixView sum) override {
    SHARDMLP_RETURN_IF_ERROR(CheckColumnSums(m, sum));
    shardmlp::AddColumnSums(team_, m, sum);
    return absl::OkStatus();
  }

  absl::Status SumOfSquares(ConstMatrixView m, double* sum) override {
    SHARDMLP_RETURN_IF_ERROR(CheckMatrix("m", m, m.rows, m.cols, m.dtype));
    *sum = shardmlp::SumOfSquares(team_, m);
    return absl::OkStatus();
  }

  absl::Status Update(const OptimizerUpdate& update) override {
    SHARDMLP_RETURN_IF_ERROR(CheckUpdate(update));
    UpdateTensor(team_, update);
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<Event>> Record(Stream /*stream*/) override { return std::make_unique<DoneEvent>(); }
  absl::Status Wait(Stream /*stream*/, const Event& /*event*/) override { return absl::OkStatus(); }
  absl::Status Synchronize(const Event& /*event*/) override { return absl::OkStatus(); }

 private:
  // A sum of no products: c = the bias or 0, or c as it is.
  absl::Status EmptyProduct(const Gemm& gemm) {
    if (gemm.accumulate) return absl::OkStatus();
    if (gemm.bias.empty()) return Zero(Stream::kCompute, gemm.c);
    for (int64_t row = 0; row < gemm.c.rows; ++row) {
      SHARDMLP_RETURN_IF_ERROR(Copy(Stream::kCompute, gemm.bias, gemm.c.Rows(row, 1)));
    }
    return absl::OkStatus();
  }

  const Team team_;
  HostMemory memory_;
  OneDnnMatMul matmul_;
  DeviceInfo info_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeCpuBackend(const CpuBackendOptions& options) {
  if (options.threads < 0 || options.memory_bytes < 0) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 absl::StrCat("a CPU backend of ", options.threads, " threads and ", options.memory_bytes,
                              " bytes, expected at least 0 of each"));
  }
  const int64_t memory_bytes = options.memory_bytes > 0 ? options.memory_bytes : AvailableMemoryBytes();
  try {
    return std::make_unique<CpuBackend>(Team(options.threads), memory_bytes);
  } catch (const dnnl::error& error) {
    return Error(absl::StatusCode::kInternal, Reason::kDeviceFailed,
                 absl::StrCat("oneDNN did not start: ", error.what()));
  }
}

}  // namespace shardmlp
