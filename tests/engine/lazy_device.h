// A device with memory of its own that puts everything off.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "kernels/backend.h"

namespace shardmlp::testing {

// Work on a stream runs when the host synchronizes with an event behind it, or when work of another stream that waits
// for such an event does, and never before; and its memory begins as NaN. So whoever reads a result without waiting for
// it, gives memory back too soon, or forgets an event between two streams, gets garbage. Computes as the CPU backend.
//
// Thread-safe where Backend is. Also counts its memory, and breaks when asked to.
class LazyDevice final : public Backend, private Buffer::Owner {
 public:
  explicit LazyDevice(int64_t memory_bytes = int64_t{1} << 40);

  // The most that was allocated at once.
  int64_t peak_bytes(Memory memory) const { return memory == Memory::kDevice ? peak_device_ : peak_staging_; }
  // What was reserved of it: no more is given out.
  int64_t reserved_bytes() const { return reserved_; }
  // Buffers that were given out so far.
  int64_t allocation_count() const { return allocations_; }
  // All work that has not run yet fails.
  void Break() { broken_ = true; }
  // The n-th Update from now on fails, and only that.
  void BreakUpdate(int n) { updates_until_broken_ = n; }
  // The n-th Update from now on gets one weight wrong.
  void SkewUpdate(int n) { updates_until_skewed_ = n; }
  // Called ahead of the next Copy, or SumOfSquares, by whoever asks for it.
  void BeforeNextCopy(std::function<void()> call) { SetBefore(before_copy_, std::move(call)); }
  void BeforeNextSquares(std::function<void()> call) { SetBefore(before_squares_, std::move(call)); }
  // Updates wait until `gate` is notified.
  void HoldUpdates(const absl::Notification& gate) { gate_ = &gate; }

  const DeviceInfo& device() const override { return info_; }
  bool Computes(DType dtype) const override { return cpu_->Computes(dtype); }
  absl::Status Reserve(int64_t bytes) override;
  absl::StatusOr<Buffer> Allocate(Memory memory, int64_t bytes) override;
  absl::Status Copy(Stream stream, ConstMatrixView from, MatrixView to) override;
  absl::Status Zero(Stream stream, MatrixView m) override;
  absl::Status MatMul(const Gemm& gemm) override;
  absl::Status ActivationForward(const Activation& activation, ConstMatrixView gate_up, MatrixView a) override;
  absl::Status ActivationBackward(const Activation& activation, MatrixView gate_up, MatrixView da) override;
  absl::Status AddColumnSums(ConstMatrixView m, MatrixView sum) override;
  absl::Status SumOfSquares(ConstMatrixView m, double* sum) override;
  absl::Status Update(const OptimizerUpdate& update) override;
  absl::StatusOr<std::unique_ptr<Event>> Record(Stream stream) override;
  absl::Status Wait(Stream stream, const Event& event) override;
  absl::Status Synchronize(const Event& event) override;

 private:
  using Work = std::function<absl::Status()>;
  struct Queue {
    std::deque<Work> work;
    int64_t enqueued = 0;
    int64_t run = 0;
  };
  struct Point final : Event {
    Point(Stream stream, int64_t count) : stream(stream), count(count) {}
    Stream stream;
    int64_t count;  // of that stream's work
  };

  using Before = std::shared_ptr<std::function<void()>>;

  void SetBefore(Before& before, std::function<void()> call) {
    absl::MutexLock lock(&mutex_);
    before = std::make_shared<std::function<void()>>(std::move(call));
  }
  void CallBefore(Before& before);
  absl::Status Enqueue(Stream stream, Work work);
  absl::Status RunUpTo(const Point& point);
  void Free(void* data, int64_t bytes, Memory memory) override;
  Queue& QueueOf(Stream stream) { return queues_[static_cast<size_t>(stream)]; }

  const std::unique_ptr<Backend> cpu_;
  DeviceInfo info_;
  std::array<Queue, 3> queues_;
  absl::Status failure_;  // of work, reported by every later Synchronize
  std::atomic<bool> broken_ = false;
  std::atomic<int> updates_until_broken_ = 0;
  std::atomic<int> updates_until_skewed_ = 0;
  std::atomic<const absl::Notification*> gate_ = nullptr;

  absl::Mutex mutex_;
  absl::flat_hash_map<void*, Buffer> buffers_ ABSL_GUARDED_BY(mutex_);
  Before before_copy_;     // read and written under mutex_
  Before before_squares_;  // so too
  int64_t device_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t staging_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<int64_t> reserved_ = int64_t{1} << 40;
  std::atomic<int64_t> peak_device_ = 0;
  std::atomic<int64_t> peak_staging_ = 0;
  std::atomic<int64_t> allocations_ = 0;
};

}  // namespace shardmlp::testing
