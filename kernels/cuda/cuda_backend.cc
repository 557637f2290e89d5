#include "kernels/cuda/cuda_backend.h"

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/cuda/cublas_matmul.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/handles.h"
#include "kernels/cuda/kernels.h"
#include "kernels/operand_checks.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr int kLeastCapability = 8;  // the first with bf16
constexpr size_t kSpareShare = 64;   // one in so many bytes is left to the driver, which loads kernels when first used
constexpr int64_t kCublasWorkspaceBytes = int64_t{32} << 20;  // what cuBLAS recommends for the GPUs that want the most

struct CudaEvent final : Event {
  explicit CudaEvent(EventHandle handle) : handle(std::move(handle)) {}
  EventHandle handle;
};

// Constant after Start, but for the work on the streams.
class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(const CudaBackendOptions& options) : options_(options) {}

  ~CudaBackend() override {
    cudaSetDevice(options_.device);
    for (const StreamHandle& stream : streams_) {
      if (stream != nullptr) cudaStreamSynchronize(stream.get());
    }
  }

  absl::Status Start(int64_t host_bytes) {
    SHARDMLP_RETURN_IF_ERROR(MakeCurrent());
    cudaDeviceProp properties;
    SHARDMLP_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&properties, options_.device));
    if (properties.major < kLeastCapability) {
      return Error(absl::StatusCode::kFailedPrecondition, Reason::kDeviceFailed,
                   absl::StrCat(properties.name, " is of compute capability ", properties.major, ".", properties.minor,
                                ", expected at least ", kLeastCapability, ".0"));
    }
    for (StreamHandle& stream : streams_) {
      SHARDMLP_ASSIGN_OR_RETURN(stream, MakeStream());
    }
    SHARDMLP_ASSIGN_OR_RETURN(cublas_, MakeCublas());
    SHARDMLP_RETURN_IF_CUDA_ERROR(cublasSetStream(cublas_.get(), StreamOf(Stream::kCompute)));
    // Partial sums of bf16 products would otherwise be allowed to be in bf16.
    SHARDMLP_RETURN_IF_CUDA_ERROR(cublasSetMathMode(
        cublas_.get(),
        static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
    SHARDMLP_RETURN_IF_ERROR(AllocateOwn());
    return Describe(properties, host_bytes);
  }

  const DeviceInfo& device() const override { return info_; }

  bool Computes(DType dtype) const override { return dtype != DType::kF16; }

  absl::Status Reserve(int64_t bytes) override { return memory_->Reserve(bytes); }

  absl::StatusOr<Buffer> Allocate(Memory memory, int64_t bytes) override { return memory_->Allocate(memory, bytes); }

  absl::Status Copy(Stream stream, ConstMatrixView from, MatrixView to) override {
    SHARDMLP_RETURN_IF_ERROR(CheckCopy(from, to));
    if (from.empty()) return absl::OkStatus();
    SHARDMLP_RETURN_IF_ERROR(MakeCurrent());
    if (from.dtype != to.dtype) {
      // A kernel reads and writes pinned memory where it lies; the copying streams are for that.
      SHARDMLP_RETURN_IF_CUDA_ERROR(LaunchConvert(StreamOf(stream), from, to, stream != Stream::kCompute));
    } else if (from.contiguous() && to.contiguous()) {
      SHARDMLP_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to.data, from.data, static_cast<size_t>(from.byte_count()),
                                                    cudaMemcpyDefault, StreamOf(stream)));
    } else {
      SHARDMLP_RETURN_IF_CUDA_ERROR(cudaMemcpy2DAsync(to.data, Pitch(to), from.data, Pitch(from), RowBytes(from),
                                                      static_cast<size_t>(from.rows), cudaMemcpyDefault,
                                                      StreamOf(stream)));
    }
    return absl::OkStatus();
  }

  absl::Status Zero(Stream stream, MatrixView m) override {
    SHARDMLP_RETURN_IF_ERROR(CheckMatrix("m", m, m.rows, m.cols, m.dtype));
    if (m.empty()) return absl::OkStatus();
    SHARDMLP_RETURN_IF_ERROR(MakeCurrent());
    if (m.contiguous()) {
      SHARDMLP_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(m.data, 0, static_cast<size_t>(m.byte_count()), StreamOf(stream)));
    } else {
      SHARDMLP_RETURN_IF_CUDA_ERROR(
          cudaMemset2DAsync(m.data, Pitch(m), 0, RowBytes(m), static_cast<size_t>(m.rows), StreamOf(stream)));
    }
    return absl::OkStatus();
  }

  absl::Status MatMul(const Gemm& gemm) override {
    SHARDMLP_RETURN_IF_ERROR(CheckGemm(gemm));
    if (gemm.c.empty()) return absl::OkStatus();
    SHARDMLP_RETURN_IF_ERROR(MakeCurrent());
    // The bias goes into c first, and into the sum from there: it is rounded no more often than by an epilogue.
    if (!gemm.bias.empty())
      SHARDMLP_RETURN_IF_CUDA_ERROR(LaunchConvert(compute(), gemm.bias, gemm.c, /*over_link=*/false));
    const bool accumulate = gemm.accumulate || !gemm.bias.empty();
    if (!gemm.a.empty()) return CublasMatMul(cublas_.get(), gemm, accumulate, options_.tf32);
    return accumulate ? absl::OkStatus() : Zero(Stream::kCompute, gemm.c);
  }

  absl::Status ActivationForward(const Activation& activation, ConstMatrixView gate_up, MatrixView a) override {
    SHARDMLP_RETURN_IF_ERROR(CheckActivation(activation, gate_up, a));
    SHARDMLP_RETURN_IF_ERROR(MakeCurrent());
    SHARDMLP_RETURN_IF_CUDA_ERROR(LaunchActivationForward(compute(), activation, gate_up, a));
    return absl::OkStatus();
  }

  absl::Status ActivationBackward(const Activation& activation, MatrixView gate_up, MatrixView da) override {
    SHARDMLP_RETURN_IF_ERROR(CheckActivation(activation, gate_up, da));
    SHARDMLP_RETURN_IF_ERROR(MakeCurrent());
    SHARDMLP_RETURN_IF_CUDA_ERROR(LaunchActivationBackward(compute(), activation, gate_up, da));
    return absl::OkStatus();
  }

  absl::Status AddColumnSums(ConstMatrixView m, MatrixView sum) override {
    SHARDMLP_RETURN_IF_ERROR(CheckColumnSums(m, sum));
    SHARDMLP_RETURN_IF_ERROR(MakeCurrent());
    SHARDMLP_RETURN_IF_CUDA_ERROR(LaunchAddColumnSums(compute(), m, sum, scratch()));
    return absl::OkStatus();
  }

  absl::Status SumOfSquares(ConstMatrixView m, double* sum) override {
    SHARDMLP_RETURN_IF_ERROR(CheckMatrix("m", m, m.rows, m.cols, m.dtype));
    SHARDMLP_RETURN_IF_ERROR(MakeCurrent());
    SHARDMLP_RETURN_IF_CUDA_ERROR(LaunchSumOfSquares(compute(), m, sum, scratch()));
    return absl::OkStatus();
  }

  absl::Status Update(const OptimizerUpdate& update) override {
    SHARDMLP_RETURN_IF_ERROR(CheckUpdate(update));
    SHARDMLP_RETURN_IF_ERROR(MakeCurrent());
    SHARDMLP_RETURN_IF_CUDA_ERROR(LaunchUpdate(compute(), update));
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<Event>> Record(Stream stream) override {
    SHARDMLP_RETURN_IF_ERROR(MakeCurrent());
    // Who waits sleeps: a thread that spins would take a core from the service.
    SHARDMLP_ASSIGN_OR_RETURN(EventHandle handle, MakeEvent(cudaEventDisableTiming | cudaEventBlockingSync));
    SHARDMLP_RETURN_IF_CUDA_ERROR(cudaEventRecord(handle.get(), StreamOf(stream)));
    return std::make_unique<CudaEvent>(std::move(handle));
  }

  absl::Status Wait(Stream stream, const Event& event) override {
    SHARDMLP_RETURN_IF_ERROR(MakeCurrent());
    SHARDMLP_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(StreamOf(stream), HandleOf(event), 0));
    return absl::OkStatus();
  }

  absl::Status Synchronize(const Event& event) override {
    SHARDMLP_RETURN_IF_ERROR(MakeCurrent());
    SHARDMLP_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(HandleOf(event)));
    return absl::OkStatus();
  }

 private:
  static size_t Pitch(const ConstMatrixView& m) {
    return static_cast<size_t>((m.rows > 1 ? m.row_stride : m.cols) * SizeOf(m.dtype));
  }
  static size_t RowBytes(const ConstMatrixView& m) { return static_cast<size_t>(m.cols * SizeOf(m.dtype)); }
  static cudaEvent_t HandleOf(const Event& event) { return static_cast<const CudaEvent&>(event).handle.get(); }

  // A thread has a current device of its own, and any thread may call.
  absl::Status MakeCurrent() const { return ToStatus(cudaSetDevice(options_.device), "cudaSetDevice"); }

  // What no caller sees: memory for cuBLAS and for reductions.
  absl::Status AllocateOwn() {
    own_memory_.emplace(options_.device, kCublasWorkspaceBytes + kReductionScratchBytes, 0);
    SHARDMLP_ASSIGN_OR_RETURN(cublas_workspace_, own_memory_->Allocate(Memory::kDevice, kCublasWorkspaceBytes));
    SHARDMLP_ASSIGN_OR_RETURN(scratch_, own_memory_->Allocate(Memory::kDevice, kReductionScratchBytes));
    SHARDMLP_RETURN_IF_CUDA_ERROR(
        cublasSetWorkspace(cublas_.get(), cublas_workspace_.data(), static_cast<size_t>(kCublasWorkspaceBytes)));
    return absl::OkStatus();
  }

  absl::Status Describe(const cudaDeviceProp& properties, int64_t host_bytes) {
    size_t free_bytes = 0, total_bytes = 0;
    SHARDMLP_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free_bytes, &total_bytes));
    int runtime_version = 0, cublas_version = 0;
    SHARDMLP_RETURN_IF_CUDA_ERROR(cudaRuntimeGetVersion(&runtime_version));
    SHARDMLP_RETURN_IF_CUDA_ERROR(cublasGetVersion(cublas_.get(), &cublas_version));
    info_.name = absl::StrCat("cuda:", options_.device, " (", properties.name, ", sm_", properties.major,
                              properties.minor, ", CUDA ", runtime_version / 1000, ".", runtime_version % 1000 / 10,
                              ", cuBLAS ", cublas_version, ")");
    info_.memory_bytes = static_cast<int64_t>(free_bytes - free_bytes / kSpareShare);
    if (options_.memory_bytes > 0) info_.memory_bytes = std::min(info_.memory_bytes, options_.memory_bytes);
    info_.host_bytes = host_bytes;
    memory_.emplace(options_.device, info_.memory_bytes, host_bytes);
    return absl::OkStatus();
  }

  cudaStream_t StreamOf(Stream stream) const { return streams_[static_cast<size_t>(stream)].get(); }
  cudaStream_t compute() const { return StreamOf(Stream::kCompute); }
  double* scratch() const { return static_cast<double*>(scratch_.data()); }

  const CudaBackendOptions options_;
  DeviceInfo info_;
  std::optional<CudaMemory> own_memory_, memory_;
  Buffer cublas_workspace_, scratch_;
  std::array<StreamHandle, 3> streams_;
  CublasHandle cublas_;
};

absl::Status NoDevice(absl::string_view message) {
  return Error(absl::StatusCode::kFailedPrecondition, Reason::kDeviceFailed, message);
}

}  // namespace

int CudaDeviceCount() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions& options) {
  if (options.device < 0 || options.memory_bytes < 0 || options.host_bytes < 0) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 absl::StrCat("a CUDA backend of device ", options.device, ", ", options.memory_bytes, " bytes and ",
                              options.host_bytes, " bytes of host memory, expected at least 0 of each"));
  }
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    return NoDevice(absl::StrCat("no GPU was found: ", cudaGetErrorString(error)));
  }
  if (options.device >= count) {
    return NoDevice(absl::StrCat("no GPU ", options.device, ": the process sees ", count));
  }
  auto backend = std::make_unique<CudaBackend>(options);
  SHARDMLP_RETURN_IF_ERROR(backend->Start(options.host_bytes > 0 ? options.host_bytes : AvailableMemoryBytes()));
  return backend;
}

}  // namespace shardmlp
