// The Engine: puts sessions, the step protocol, calls, the device thread and the parameters together.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/engine.h"
#include "server/engine/job_thread.h"
#include "server/engine/lane.h"
#include "server/engine/parameters.h"
#include "server/engine/pulse.h"
#include "server/engine/scheduler.h"
#include "server/engine/session_table.h"
#include "server/engine/stash.h"
#include "server/engine/step_protocol.h"
#include "server/engine/tile_call.h"
#include "server/engine/tile_compute.h"

namespace shardmlp {

// One lock, `mutex_`, guards sessions, step and calls; it is never held over device work or a callback. Parameters and
// TileCompute belong to the scheduler's device thread. What waits for other replicas does so on the sync thread.
class ServingEngine final : public Engine,
                            private StepDevice,
                            private StepPeers,
                            private ReplicaObserver,
                            private CallHost {
 public:
  ServingEngine(const EngineOptions& options, const ModelSpec& model, const MemoryPlan& plan,
                std::shared_ptr<Backend> backend, std::unique_ptr<Replicas> replicas,
                std::unique_ptr<CheckpointStore> checkpoints, Metrics& metrics);
  ~ServingEngine() override;

  // Allocates, loads, and starts the threads. Once, before anything else.
  absl::Status Start(const ModelFolder& folder);

  const ModelSpec& model() const override { return model_; }
  bool frozen() const override { return options_.frozen; }
  EngineLimits limits() const override { return {plan_.tile_row_count, options_.max_call_count}; }
  MemoryPlan memory_plan() const override { return plan_; }
  ReplicaPlace replica() const override;
  StepPosition position() const override;
  std::vector<TrainerStatus> trainers() const override;

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
  bool SettleStep(absl::Time deadline) override;
  int64_t open_call_count() const override;
  void Shutdown() override;
  absl::Status health() const override;

 private:
  class DeviceHold;
  // As ReplicaState::step: no whole state is here; it is to come from whoever has one.
  static constexpr int64_t kNoStep = -1;
  struct Proposal {
    int64_t generation = 0;
    std::string message;
  };

  // StepDevice and StepPeers.
  void SumGradients(StepPosition of) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Apply(std::shared_ptr<const CommitSpec> decision) override;
  void ClearGradients() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReleaseStash() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Restore(int from, const CheckpointEdition& checkpoint) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Propose(const StepMessage& message, Outbox& outbox) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Rejoin() override;
  std::string Missing() const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ReplicaObserver.
  void Formed(const Generation& generation) override;
  void Agreed(int64_t index, int from_rank, const std::string& message) override;
  void Stable(int64_t index) override;
  void Lost(const absl::Status& why, bool heard_all) override;
  void Refused(const absl::Status& why) override;

  // CallHost.
  absl::StatusOr<Admitted> StartTile(const CallSpec& spec, const Tile& tile, TileRows rows) override;
  absl::Status FinishTile(const Event& done) override;
  void SubmitTile(int64_t session_id, std::unique_ptr<TileJob> job) override;
  int64_t weights_version() const override { return position().weights_version; }
  void CallFinished(const CallSpec& spec, bool answered) override;

  // Whether a call may start, and its layer.
  absl::Status CheckHeader(CallSpec& spec) const;
  absl::StatusOr<std::shared_ptr<Call>> StartCall(CallSpec spec, CallSink& sink);
  // Room in the stash for a forward that asks for it, or what a backward's ticket names; null for neither.
  absl::StatusOr<std::shared_ptr<KeptRows>> UseStash(const SessionSpec& session, CallSpec& spec)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A backward tile that adds to the gradients: counted or not.
  absl::StatusOr<Admitted> StartAddingTile(const CallSpec& spec, const Tile& tile, TileRows rows);
  absl::Status CheckVersion(const BackwardSpec& header, int64_t weights_version) const;
  // Whether a session may act on the step.
  absl::Status CheckStepCaller(int64_t session_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Does `save` on the device thread; not while a sum needs that.
  void SubmitSave(Scheduler::ControlJob save);
  void ResumeSaves();
  // Whether there is a checkpoint folder.
  absl::Status CheckCheckpoints() const;
  // Runs `job` on the device thread and answers with its result, or with why it could not run.
  template <typename T>
  void RunOnDevice(Done<T> done, absl::AnyInvocable<absl::StatusOr<T>()> job);
  // Passes on a status of the device; a failure of the device itself ends health.
  absl::Status NoteDevice(absl::Status status);
  // Ends health, and this server's part among its replicas.
  void Fail(const absl::Status& why);
  // health(), and whether there are weights to answer from.
  absl::Status usable() const;
  absl::Status Usable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return health_.ok() ? whole_ : health_; }

  // Does `work` on the device thread, ahead of tiles, and waits for it; on the sync thread.
  absl::Status OnDevice(const std::function<absl::Status()>& work);
  // What was proposed, in order; without the lock.
  void SendProposals();
  // Whether a replica that came back may be let in now.
  void UpdateAdmission(Outbox& outbox) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StopReplicas();

  // Leaves the replicas where a thread that they wait for hangs, until it goes on.
  void WatchThreads(absl::Time now, Outbox& outbox) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // "the device thread"; empty where none hangs.
  std::string Hanging(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // On the sync thread.
  void JoinReplicas();
  // Returns once all replicas of the generation are here. By messages, with no bound: who is busy with a checkpoint
  // takes as long as that takes, and who hangs leaves. A wait for a peer in a collective is bounded, and comes after.
  absl::Status Gather(const Generation& generation);
  void LeaveReplicas(const absl::Status& why);
  void GoOnTogether(const Generation& generation);
  // All replicas get the state of number `root`, whose `header` counts; the device thread must be held. `replaces`:
  // this one has another.
  absl::StatusOr<StateHeader> ShareState(const Generation& generation, int root, const StateHeader& header,
                                         bool replaces);
  // Sums the gradients, and returns each one's squares.
  absl::StatusOr<std::vector<double>> SumOverReplicas(const Generation* generation, StepPosition of);
  // False where the attempt is over at one of them.
  absl::StatusOr<bool> SumTogether(const Generation& generation, StepPosition of);
  void TakeGradientsBack();
  void RestoreTogether(const Generation* generation, int from, const CheckpointEdition& checkpoint);

  // On the device thread, or while it is held.
  absl::Status ApplyOptimizer(absl::Span<const Hyperparameters> hyperparameters, const CommitSpec& decision);
  absl::StatusOr<CheckpointInfo> Save(const std::string& name);
  absl::StatusOr<std::shared_ptr<Checkpoint>> OpenCheckpoint(const std::string& name);
  // The one that has the name now; without an edition where there is none.
  CheckpointEdition EditionOf(const std::string& name) const;
  // The step of the checkpoint.
  absl::StatusOr<int64_t> RestoreHere(const CheckpointEdition& checkpoint);
  absl::Status StartFromCheckpoint();
  // Ends what has waited for too long, now and then.
  void WatchTime();
  void UpdateSessionMetrics() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool stopping() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_; }
  bool may_join() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return hung_.ok() || stopping_ || !health_.ok(); }
  // Members of the generation that have not come to where this one is.
  std::vector<int> Late() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  bool formed_or_failed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return formed_ || !health_.ok(); }
  bool decided() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !step_.Deciding(); }
  bool settled() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !step_.Deciding() && !step_.CanHandBack(); }
  bool no_open_calls() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return open_calls_ == 0; }

  const EngineOptions options_;
  const ModelSpec model_;
  const MemoryPlan plan_;
  const std::shared_ptr<Backend> backend_;
  const std::unique_ptr<Replicas> replicas_;
  const std::unique_ptr<CheckpointStore> checkpoints_;
  Metrics& metrics_;
  std::shared_ptr<LanePool> lanes_;
  std::unique_ptr<Parameters> parameters_;
  std::unique_ptr<TileCompute> compute_;
  // For the device thread. Kept, since every weight is read for them and anyone may ask.
  std::vector<uint64_t> checksums_;
  int64_t checksums_version_ = 0;  // of the weights; 0: none yet
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<JobThread> sync_;

  mutable absl::Mutex mutex_;
  SessionTable sessions_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Stash> stash_ ABSL_GUARDED_BY(mutex_);
  StepProtocol step_ ABSL_GUARDED_BY(mutex_);
  CheckpointEdition opened_edition_ ABSL_GUARDED_BY(mutex_);  // a checkpoint that is to be restored
  std::shared_ptr<Checkpoint> opened_ ABSL_GUARDED_BY(mutex_);

  std::shared_ptr<const Generation> generation_ ABSL_GUARDED_BY(mutex_);  // null: none
  int64_t state_generation_ ABSL_GUARDED_BY(mutex_) = 0;                  // whose state is here; 0: none yet
  int64_t checkpoint_generation_ ABSL_GUARDED_BY(mutex_) = 0;             // of the checkpoint that it started from
  std::map<int, int64_t> arrivals_ ABSL_GUARDED_BY(mutex_);               // of each in the generation, by rank
  int64_t gathers_ ABSL_GUARDED_BY(mutex_) = 0;                           // that this one came to in it
  Stillness device_stillness_ ABSL_GUARDED_BY(mutex_);
  Stillness sync_stillness_ ABSL_GUARDED_BY(mutex_);
  absl::Status hung_ ABSL_GUARDED_BY(mutex_);       // else: the thread that hangs
  bool formed_ ABSL_GUARDED_BY(mutex_) = false;     // once there was one
  bool admitting_ ABSL_GUARDED_BY(mutex_) = false;  // as Replicas::Admit was told
  std::deque<Proposal> unsent_ ABSL_GUARDED_BY(mutex_);
  std::thread::id sender_ ABSL_GUARDED_BY(mutex_);       // who sends them now
  bool gradients_lent_ ABSL_GUARDED_BY(mutex_) = false;  // to the sync thread, which sums them in place
  bool clear_owed_ ABSL_GUARDED_BY(mutex_) = false;      // their attempt ended meanwhile
  bool saves_wait_ ABSL_GUARDED_BY(mutex_) = false;      // for a sum, whose peers would wait for them
  std::vector<Scheduler::ControlJob> waiting_saves_ ABSL_GUARDED_BY(mutex_);
  absl::Status whole_ ABSL_GUARDED_BY(mutex_);  // else: whose state is half here

  std::vector<std::weak_ptr<TileCall>> calls_ ABSL_GUARDED_BY(mutex_);
  int64_t open_calls_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status health_ ABSL_GUARDED_BY(mutex_);
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool settling_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread watch_;
};

}  // namespace shardmlp
