#include "tests/engine/lazy_device.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/status.h"

namespace shardmlp::testing {

LazyDevice::LazyDevice(int64_t memory_bytes)
    : cpu_(MakeCpuBackend({.threads = 1}).value()),
      info_{"lazy", memory_bytes, /*unified_memory=*/false, int64_t{1} << 40} {}

absl::Status LazyDevice::Reserve(int64_t bytes) {
  reserved_ = bytes;
  return absl::OkStatus();
}

absl::StatusOr<Buffer> LazyDevice::Allocate(Memory memory, int64_t bytes) {
  if (bytes == 0) return Buffer();
  SHARDMLP_ASSIGN_OR_RETURN(Buffer buffer, cpu_->Allocate(memory, bytes));
  void* const data = buffer.data();
  std::memset(data, 0xff, static_cast<size_t>(bytes));
  ++allocations_;
  const int64_t counted = memory == Memory::kDevice ? BufferBytes(bytes) : bytes;
  absl::MutexLock lock(&mutex_);
  if (memory == Memory::kDevice && counted > reserved_ - device_bytes_) {
    return absl::ResourceExhaustedError("more device memory than was reserved");
  }
  buffers_[data] = std::move(buffer);
  int64_t& now = memory == Memory::kDevice ? device_bytes_ : staging_bytes_;
  std::atomic<int64_t>& peak = memory == Memory::kDevice ? peak_device_ : peak_staging_;
  now += counted;
  peak = std::max<int64_t>(peak, now);
  return Buffer(this, data, bytes, memory);
}

void LazyDevice::Free(void* data, int64_t bytes, Memory memory) {
  absl::MutexLock lock(&mutex_);
  buffers_.erase(data);
  (memory == Memory::kDevice ? device_bytes_ -= BufferBytes(bytes) : staging_bytes_ -= bytes);
}

absl::Status LazyDevice::Enqueue(Stream stream, Work work) {
  QueueOf(stream).work.push_back(std::move(work));
  ++QueueOf(stream).enqueued;
  return absl::OkStatus();
}

absl::Status LazyDevice::RunUpTo(const Point& point) {
  Queue& queue = QueueOf(point.stream);
  while (queue.run < point.count) {
    const Work work = std::move(queue.work.front());
    queue.work.pop_front();
    ++queue.run;
    const absl::Status status = broken_ ? absl::InternalError("the lazy device broke") : work();
    if (failure_.ok()) failure_ = status;
  }
  return failure_;
}

void LazyDevice::CallBefore(Before& before) {
  Before call;
  {
    absl::MutexLock lock(&mutex_);
    call = std::exchange(before, nullptr);
  }
  if (call != nullptr) (*call)();
}

absl::Status LazyDevice::Copy(Stream stream, ConstMatrixView from, MatrixView to) {
  CallBefore(before_copy_);
  return Enqueue(stream, [=, this] { return cpu_->Copy(stream, from, to); });
}

absl::Status LazyDevice::Zero(Stream stream, MatrixView m) {
  return Enqueue(stream, [=, this] { return cpu_->Zero(stream, m); });
}

absl::Status LazyDevice::MatMul(const Gemm& gemm) {
  return Enqueue(Stream::kCompute, [=, this] { return cpu_->MatMul(gemm); });
}

absl::Status LazyDevice::ActivationForward(const Activation& activation, ConstMatrixView gate_up, MatrixView a) {
  return Enqueue(Stream::kCompute, [=, this] { return cpu_->ActivationForward(activation, gate_up, a); });
}

absl::Status LazyDevice::ActivationBackward(const Activation& activation, MatrixView gate_up, MatrixView da) {
  return Enqueue(Stream::kCompute, [=, this] { return cpu_->ActivationBackward(activation, gate_up, da); });
}

absl::Status LazyDevice::AddColumnSums(ConstMatrixView m, MatrixView sum) {
  return Enqueue(Stream::kCompute, [=, this] { return cpu_->AddColumnSums(m, sum); });
}

absl::Status LazyDevice::SumOfSquares(ConstMatrixView m, double* sum) {
  CallBefore(before_squares_);
  return Enqueue(Stream::kCompute, [=, this] { return cpu_->SumOfSquares(m, sum); });
}

absl::Status LazyDevice::Update(const OptimizerUpdate& update) {
  if (updates_until_broken_ > 0 && --updates_until_broken_ == 0) return absl::InternalError("an update broke");
  if (const absl::Notification* gate = gate_) gate->WaitForNotification();
  if (updates_until_skewed_ > 0 && --updates_until_skewed_ == 0) {
    return Enqueue(Stream::kCompute, [=, this] {
      const absl::Status status = cpu_->Update(update);
      update.master.as<double>()[0] += 1e-3;
      return status;
    });
  }
  return Enqueue(Stream::kCompute, [=, this] { return cpu_->Update(update); });
}

absl::StatusOr<std::unique_ptr<Event>> LazyDevice::Record(Stream stream) {
  return std::make_unique<Point>(stream, QueueOf(stream).enqueued);
}

absl::Status LazyDevice::Wait(Stream stream, const Event& event) {
  return Enqueue(stream, [this, point = static_cast<const Point&>(event)] { return RunUpTo(point); });
}

absl::Status LazyDevice::Synchronize(const Event& event) { return RunUpTo(static_cast<const Point&>(event)); }

}  // namespace shardmlp::testing
