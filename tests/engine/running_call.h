// One forward or backward through an engine, from the side of the stream that carries it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/engine.h"
#include "tests/kernels/dense.h"

namespace shardmlp::testing {

// Sends its shards as there is room, collects the results, and checks that they come in order. For one thread; the
// engine's threads come in through CallSink.
class RunningCall final : private CallSink {
 public:
  // `x` [T, H], and `dy` [T, O] of a backward.
  static absl::StatusOr<std::unique_ptr<RunningCall>> Forward(Engine& engine, const ForwardSpec& spec, const Dense& x);
  static absl::StatusOr<std::unique_ptr<RunningCall>> Backward(Engine& engine, const BackwardSpec& spec, const Dense& x,
                                                               const Dense& dy);
  // Cancels, unless it has finished.
  ~RunningCall() override;

  // Sends the next `count` rows as one shard, waiting for room; fewer where the call ends meanwhile.
  absl::Status Send(int64_t count);
  // Sends what is left as `shards` shards of about equal size, none of them empty, and the end.
  absl::Status SendAll(int64_t shards = 1);
  absl::Status End() { return call_->End(sent_); }

  // Keeps the memory of results from now on, as a client does that does not read.
  void StopReading();
  // Gives back one, or all from now on.
  void Read();
  void ReadOn();

  // Waits until so many rows were answered, or the call has finished.
  void WaitForRows(int64_t count);
  absl::StatusOr<CallSummary> Wait();
  bool finished() const;
  void Cancel() { call_->Cancel(); }

  int64_t sent() const { return sent_; }
  // y [., O] or dx [., H], as far as they came.
  Dense rows() const;

 private:
  RunningCall(const Dense& x, const Dense* dy, DType dtype, int64_t result_cols);
  void OnRoom() override;
  void OnResult(CallResult result) override;
  void OnFinished(absl::StatusOr<CallSummary> summary) override;
  bool RoomOrFinished() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return room_ || finished_; }

  const Dense x_;
  const Dense dy_;
  const bool backward_;
  const DType dtype_;
  std::shared_ptr<Call> call_;
  int64_t sent_ = 0;

  mutable absl::Mutex mutex_;
  bool room_ ABSL_GUARDED_BY(mutex_) = false;
  bool keep_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  Dense rows_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<void>> kept_ ABSL_GUARDED_BY(mutex_);
  absl::StatusOr<CallSummary> summary_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardmlp::testing
