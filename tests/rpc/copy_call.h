// A call of CopyEngine.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/call.h"
#include "tests/rpc/copy_engine.h"

namespace shardmlp {

class CopyCall final : public Call, public std::enable_shared_from_this<CopyCall> {
 public:
  CopyCall(CopyEngine& engine, const CopySpec& spec, CallSink& sink);
  ~CopyCall() override;

  absl::StatusOr<int64_t> Place(int64_t row_offset, int64_t row_count, int64_t skip, const ByteSource& x,
                                const ByteSource* dy) override;
  absl::Status End(int64_t row_count) override;
  void Cancel() override;

  // On the device thread: does the next thing there is to do, and says whether there was one.
  bool Step();
  // On the device thread, at shutdown.
  void Fail(const absl::Status& status);

 private:
  enum class Next { kNothing, kRoom, kTile, kFinish };

  absl::Status Check(int64_t row_offset, int64_t row_count, int64_t skip, const ByteSource& x,
                     const ByteSource* dy) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Next Choose() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  CallResult Compute(std::unique_ptr<CopySlot> slot);
  void Finish(absl::StatusOr<CallSummary> summary);
  void Free(std::unique_ptr<CopySlot> slot);

  CopyEngine& engine_;
  const CopySpec spec_;
  const int64_t row_bytes_;
  CallSink& sink_;

  absl::Mutex mutex_;
  std::deque<std::unique_ptr<CopySlot>> free_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<CopySlot> filling_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::unique_ptr<CopySlot>> ready_ ABSL_GUARDED_BY(mutex_);
  int64_t placed_rows_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t answered_rows_ ABSL_GUARDED_BY(mutex_) = 0;
  bool wants_room_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;     // finished or cancelled
  bool in_sink_ ABSL_GUARDED_BY(mutex_) = false;  // the device thread is in a method of sink_
};

}  // namespace shardmlp
