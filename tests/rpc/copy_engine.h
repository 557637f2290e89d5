// An engine without mathematics, for tests and benches of rpc: y = x, and dx = dy. It stages rows, hands tiles from a
// device thread and gives room back as the real one does, within bounds that can be told.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/engine.h"

namespace shardmlp {

struct CopyEngineOptions {
  int layer_count = 2;
  int64_t hidden_size = 8;  // H, of x, y, dx and dy
  int64_t tile_row_count = 4;
  int64_t slot_count = 2;  // tiles that a call may hold, from their first row placed to their result let go of
  int64_t max_call_count = 8;
};

class CopyCall;

// Memory of one tile, for any dtype.
struct CopySlot {
  std::vector<char> x;   // [rows, H]
  std::vector<char> dy;  // [rows, H]
  int64_t row_begin = 0;
  int64_t rows = 0;
};

struct CopySpec {
  int64_t session_id = 0;
  int layer = 0;
  int64_t row_count = 0;
  DType dtype = DType::kF32;
  bool backward = false;
  bool results = true;
};

// Thread-safe.
class CopyEngine : public Engine {
 public:
  static constexpr int64_t kSessionId = 42;
  static constexpr int64_t kWeightsVersion = 7;

  explicit CopyEngine(const CopyEngineOptions& options = {});
  ~CopyEngine() override;

  // Keeps the device from beginning another tile until released.
  void HoldDevice();
  void ReleaseDevice();
  // Fails each call once `rows` rows of it are answered.
  void FailAfter(int64_t rows, const absl::Status& status);
  // Block until so many calls are open, and until a call has refused rows for want of room.
  void AwaitOpenCalls(int64_t count) const;
  void AwaitBlockedCall() const;
  // Most slots that calls held at once.
  int64_t peak_slots() const;

  const ModelSpec& model() const override { return model_; }
  bool frozen() const override { return false; }
  EngineLimits limits() const override { return {options_.tile_row_count, options_.max_call_count}; }
  MemoryPlan memory_plan() const override { return {}; }
  ReplicaPlace replica() const override { return {}; }
  StepPosition position() const override { return {.step = 3, .attempt = 1, .weights_version = kWeightsVersion}; }
  std::vector<TrainerStatus> trainers() const override { return {}; }
  absl::StatusOr<SessionGrant> OpenSession(const SessionSpec& spec) override;
  absl::StatusOr<StepPosition> RenewSession(int64_t session_id) override;
  absl::Status CloseSession(int64_t session_id) override;
  absl::StatusOr<std::shared_ptr<Call>> StartForward(const ForwardSpec& spec, CallSink& sink) override;
  absl::StatusOr<std::shared_ptr<Call>> StartBackward(const BackwardSpec& spec, CallSink& sink) override;
  void SealStep(const SealSpec& spec, Done<SealResult> done) override;
  void CommitStep(const CommitSpec& spec, Done<StepPosition> done) override;
  void DiscardStep(const DiscardSpec& spec, Done<StepPosition> done) override;
  void ReadTensor(int64_t tensor, int64_t row_begin, int64_t row_count, Done<TensorRows> done) override;
  void Checksums(Done<std::vector<uint64_t>> done) override;
  void SaveCheckpoint(const std::string& name, Done<CheckpointInfo> done) override;
  void RestoreCheckpoint(const std::string& name, Done<StepPosition> done) override;
  void ListCheckpoints(Done<std::vector<CheckpointInfo>> done) override;
  void DeleteCheckpoint(const std::string& name, Done<CheckpointInfo> done) override;
  void StartDraining() override;
  bool SettleStep(absl::Time /*deadline*/) override { return true; }
  int64_t open_call_count() const override;
  void Shutdown() override;
  absl::Status health() const override { return absl::OkStatus(); }

 private:
  friend class CopyCall;

  absl::StatusOr<std::shared_ptr<Call>> Start(const CopySpec& spec, CallSink& sink);
  // Has the device look at `call`.
  void Schedule(std::shared_ptr<CopyCall> call);
  void NoteBlocked();
  void NoteEnded(CopyCall* call);
  // Why a call with `answered_rows` should fail now; OK where it should not.
  absl::Status FailureAt(int64_t answered_rows) const;
  std::unique_ptr<CopySlot> TakeSlot();
  void ReturnSlot(std::unique_ptr<CopySlot> slot);
  void RunDevice();

  const CopyEngineOptions options_;
  ModelSpec model_;
  mutable absl::Mutex mutex_;
  std::deque<std::shared_ptr<CopyCall>> scheduled_ ABSL_GUARDED_BY(mutex_);
  std::set<CopyCall*> open_calls_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<CopySlot>> free_slots_ ABSL_GUARDED_BY(mutex_);
  int64_t taken_slots_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t peak_slots_ ABSL_GUARDED_BY(mutex_) = 0;
  bool held_ ABSL_GUARDED_BY(mutex_) = false;
  bool blocked_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t fail_after_rows_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::thread device_;  // last: it uses all of the above
};

}  // namespace shardmlp
