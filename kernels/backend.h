// The seam between the mathematics and the machine that does it.
//
// A backend owns one device. Work is enqueued on one of three streams, in order within a stream and in none between
// them except where an event says so; a call may return before its work has run, and a failure of the work itself may
// surface at a later call on the same backend. The CPU backend runs everything before it returns, and its events are
// always done.
//
// Thread-safety: a backend is used by one thread at a time (the server's device thread), except Allocate.
// Ownership: operands are views; the caller keeps their memory until an event recorded after the work is done.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/activation.h"
#include "kernels/matrix.h"
#include "kernels/optimizer.h"

namespace shardmlp {

// Where a buffer lies.
enum class Memory {
  kDevice,   // the device reads it fastest; the host can't touch it unless DeviceInfo::unified_memory
  kStaging,  // the host reads and writes it; pinned where there is a device, so that copies are asynchronous
};

enum class Stream { kCopyIn, kCompute, kCopyOut };

// What a kDevice buffer of `bytes` bytes takes of the memory that Backend::Reserve took.
inline constexpr int64_t kBufferAlignment = 256;
constexpr int64_t BufferBytes(int64_t bytes) {
  return (bytes + kBufferAlignment - 1) / kBufferAlignment * kBufferAlignment;
}

// Move-only owner of memory from Backend::Allocate. Must not outlive its backend. 64-byte aligned, not zeroed.
class Buffer {
 public:
  // Frees `data` of `bytes` bytes; knows where it came from.
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual void Free(void* data, int64_t bytes, Memory memory) = 0;
  };

  Buffer() = default;
  Buffer(Owner* owner, void* data, int64_t bytes, Memory memory)
      : owner_(owner), data_(data), bytes_(bytes), memory_(memory) {}
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    if (this != &other) {
      Release();
      owner_ = std::exchange(other.owner_, nullptr);
      data_ = std::exchange(other.data_, nullptr);
      bytes_ = std::exchange(other.bytes_, 0);
      memory_ = other.memory_;
    }
    return *this;
  }
  ~Buffer() { Release(); }

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  Memory memory() const { return memory_; }
  // The first rows * cols elements as a matrix. They must fit.
  MatrixView View(int64_t rows, int64_t cols, DType dtype) const { return {data_, rows, cols, dtype}; }

 private:
  void Release() {
    if (data_ != nullptr) owner_->Free(data_, bytes_, memory_);
    data_ = nullptr;
  }

  Owner* owner_ = nullptr;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  Memory memory_ = Memory::kDevice;
};

// A point in a stream. Move-only; may be destroyed at any time.
class Event {
 public:
  virtual ~Event() = default;
};

struct DeviceInfo {
  std::string name;             // "cpu (oneDNN 2.6.3, 2 threads)"
  int64_t memory_bytes = 0;     // that this process may use for kDevice buffers
  bool unified_memory = false;  // kDevice and kStaging are the same host memory
  int64_t host_bytes = 0;       // of host memory, for kStaging buffers and all else; memory_bytes where unified
};

// C = op(A) op(B), or C += op(A) op(B).
struct Gemm {
  ConstMatrixView a;          // [M, K], or [K, M] where transpose_a
  ConstMatrixView b;          // [K, N], or [N, K] where transpose_b; a's dtype
  MatrixView c;               // [M, N]; a's dtype, or f32 where a is bf16. Products are summed in AccumulatorOf(a).
  ConstMatrixView bias = {};  // [1, N], c's dtype or a's, added to each row; empty for none; not with accumulate
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;  // += instead of =
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const DeviceInfo& device() const = 0;
  // Whether tiles can be computed in `dtype`.
  virtual bool Computes(DType dtype) const = 0;

  // Takes `bytes` of device memory in one block, out of which Allocate gives every kDevice buffer from then on: what
  // was planned fails here or never, and what was not is refused. Once, and before any kDevice buffer.
  // RESOURCE_EXHAUSTED where there is not enough. Where memory is unified it only says whether there is.
  virtual absl::Status Reserve(int64_t bytes) = 0;
  // RESOURCE_EXHAUSTED where there is not enough; `bytes` of 0 gives a null buffer. Thread-safe.
  virtual absl::StatusOr<Buffer> Allocate(Memory memory, int64_t bytes) = 0;

  // to = from, of equal shape, between any two memories, converting the dtype (to nearest even).
  virtual absl::Status Copy(Stream stream, ConstMatrixView from, MatrixView to) = 0;
  // m = 0.
  virtual absl::Status Zero(Stream stream, MatrixView m) = 0;

  // The rest runs on Stream::kCompute. Shapes that don't fit each other are INVALID_ARGUMENT; M, N or K may be 0.
  virtual absl::Status MatMul(const Gemm& gemm) = 0;
  // a = act(g) * u, or act(u) where ungated. gate_up [R, 2I] (g first), or [R, I]; a [R, I] of the same dtype.
  virtual absl::Status ActivationForward(const Activation& activation, ConstMatrixView gate_up, MatrixView a) = 0;
  // In place, one pass: gate_up = [dG | dU], and da = a recomputed. Shapes as in ActivationForward.
  virtual absl::Status ActivationBackward(const Activation& activation, MatrixView gate_up, MatrixView da) = 0;
  // sum += the column sums of m. m [R, N]; sum [1, N] in AccumulatorOf(m).
  virtual absl::Status AddColumnSums(ConstMatrixView m, MatrixView sum) = 0;
  // *sum = the sum of squares of m, in f64; NaN or infinite exactly where an element of m is. `sum` is kStaging memory.
  virtual absl::Status SumOfSquares(ConstMatrixView m, double* sum) = 0;
  // One optimizer step on one tensor. See optimizer.h.
  virtual absl::Status Update(const OptimizerUpdate& update) = 0;

  // An event that is done when all that was enqueued on `stream` so far is.
  virtual absl::StatusOr<std::unique_ptr<Event>> Record(Stream stream) = 0;
  // Later work on `stream` starts after `event` is done. Does not block the host.
  virtual absl::Status Wait(Stream stream, const Event& event) = 0;
  // Blocks the host until `event` is done, and reports what failed up to it.
  virtual absl::Status Synchronize(const Event& event) = 0;
};

}  // namespace shardmlp
