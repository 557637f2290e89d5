// The life of a step: open, sealed by every trainer, summed, and decided once.
//
//            all sealed           sums known         first CommitStep        applied
//   kOpen ----------------> kSumming ------> kSealed ----------------> kApplying ------> kOpen, step + 1
//     ^----- DiscardStep, a trainer lost, a restore: attempt + 1 -----'
//
// Holds the ledger, and decides what may be added to the gradients. It never touches the device: StepDevice does, in
// the order asked, ahead of any tile that has not started.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/ledger.h"
#include "server/engine/outbox.h"
#include "server/engine/step_types.h"
#include "server/metrics.h"

namespace shardmlp {

// What a step asks of the device. Called under the engine's lock; must only enqueue.
class StepDevice {
 public:
  virtual ~StepDevice() = default;
  // Sums the gradients over the replicas, then StepProtocol::Summed.
  virtual void SumGradients(StepPosition of) = 0;
  // Where the decision still Stands: applies the optimizer and clears the gradients, then StepProtocol::Applied.
  virtual void Apply(std::shared_ptr<const CommitSpec> decision) = 0;
  virtual void ClearGradients() = 0;
  // The weights are others: lets go of what forwards on those before left.
  virtual void ReleaseStash() = 0;
};

// Thread-compatible; the engine's lock guards it. Answers go out through the outbox.
class StepProtocol {
 public:
  using SealDone = absl::AnyInvocable<void(absl::StatusOr<SealResult>)>;
  using PositionDone = absl::AnyInvocable<void(absl::StatusOr<StepPosition>)>;

  // `device` and `metrics` must outlive this. `tensors`: names in ModelSpec::tensors' order. Weights versions count up
  // from `first_weights_version`.
  StepProtocol(StepDevice& device, Metrics& metrics, std::vector<std::string> tensors, absl::Duration seal_timeout,
               int64_t first_weights_version);

  const StepPosition& position() const { return position_; }
  std::vector<TrainerStatus> trainers() const;
  // Whether anyone has added to the attempt, or sealed it.
  bool InProgress() const;
  // Whether another than `session_id` has committed a step since it was added.
  bool RunUnderWay(int64_t session_id) const;

  void AddTrainer(int64_t session_id, const SessionSpec& spec);
  // `lost`: its lease ended, rather than it said goodbye. Ends the attempt where that leaves it incomplete.
  void RemoveTrainer(int64_t session_id, bool lost, Outbox& outbox);

  // Whether (step, attempt) is the open one. ABORTED (STEP_ABORTED) where the attempt is over; FAILED_PRECONDITION
  // (STALE_ATTEMPT) where it never was.
  absl::Status CheckOpen(int64_t step, int64_t attempt) const;
  // Whether a tile may be added, and marks it where it may: the device thread asks right before it enqueues the tile,
  // so that no seal can come between and count without it. `non_finite`: where in it a NaN or infinity is, so that it
  // is counted and not added; empty for none.
  absl::StatusOr<LedgerVerdict> Admit(const Contribution& contribution, int64_t step, int64_t attempt,
                                      const std::string& non_finite);

  // Answers when all have sealed. A later seal of the same session takes the place of one that waits, which is then
  // answered with CANCELLED (CANCELLED).
  void Seal(const SealSpec& spec, absl::Time now, SealDone done, Outbox& outbox);
  void Commit(const CommitSpec& spec, PositionDone done, Outbox& outbox);
  void Discard(const DiscardSpec& spec, PositionDone done, Outbox& outbox);

  // The sums that SumGradients was asked for. Ignored where that attempt has ended.
  void Summed(StepPosition of, absl::StatusOr<std::vector<double>> sums, Outbox& outbox);
  // Whether the attempt that `decision` decided is open yet; a restore that came first ended it. For the device thread,
  // where nothing else can end it before Applied.
  bool Stands(const std::shared_ptr<const CommitSpec>& decision) const { return decision_ == decision; }
  // A failure ends the attempt.
  void Applied(const absl::Status& status, Outbox& outbox);
  // New weights from a checkpoint; ends the attempt.
  void Restored(int64_t step, Outbox& outbox);
  // Answers the seals that have waited for too long, naming who is missing.
  void ExpireSeals(absl::Time now, Outbox& outbox);
  // Answers everything that waits.
  void Stop(const absl::Status& status, Outbox& outbox);

 private:
  enum class Phase { kOpen, kSumming, kSealed, kApplying };
  struct Trainer {
    SessionSpec spec;
    bool sealed = false;
    bool committed = false;  // any step
  };
  // One a session.
  struct WaitingSeal {
    int64_t session_id;
    absl::Time deadline;
    SealDone done;
  };

  absl::StatusOr<Trainer*> FindTrainer(int64_t session_id);
  absl::Status CheckRows(const SealSpec& spec) const;
  bool AllSealed() const;
  // "rank 1 (not connected), rank 2"
  std::string Missing() const;
  // Ends the attempt: raises it, answers who waits, drops its ledger, and has the device clear the gradients. No
  // `outcome`: nothing was lost, and no step is counted.
  void EndAttempt(std::optional<StepOutcome> outcome, const std::string& why, Outbox& outbox);
  void AnswerSeals(const absl::StatusOr<SealResult>& result, Outbox& outbox);
  void AnswerCommits(const absl::StatusOr<StepPosition>& result, Outbox& outbox);
  void StartAttempt();

  StepDevice& device_;
  Metrics& metrics_;
  const std::vector<std::string> tensors_;
  const absl::Duration seal_timeout_;

  StepPosition position_;
  Phase phase_ = Phase::kOpen;
  std::map<int64_t, Trainer> trainers_;  // by session
  Ledger ledger_;
  std::string non_finite_origin_;
  std::string end_reason_;  // of the attempt before, for those that still quote it

  absl::Time first_seal_;
  std::vector<WaitingSeal> waiting_seals_;
  std::optional<SealResult> sealed_;
  std::shared_ptr<const CommitSpec> decision_;  // of this attempt, once there is one
  std::vector<PositionDone> waiting_commits_;

  // The step committed last, for repeats of its seal and commit.
  std::shared_ptr<const CommitSpec> last_commit_;
  SealResult last_sealed_;
  StepPosition last_committed_position_;
};

}  // namespace shardmlp
