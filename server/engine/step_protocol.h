// The life of a step: open, sealed by every trainer, summed, and decided once; the same on every replica.
//
//            all sealed         all have the sums      first Commit            applied
//   kOpen ----------------> kSumming ------> kSealed ----------------> kApplying ------> kOpen, step + 1
//     ^----- End: DiscardStep, a trainer lost; a restore; a replica lost: attempt + 1 -----'
//
// What a client asks for is checked and proposed (step_protocol.cc). It happens once it is agreed on, to every replica
// in the same order (step_agreement.cc): messages that come while a decision is applied or a checkpoint restored wait
// for that, so that nothing depends on which replica is faster. A commit is answered once all replicas have it.
//
// Holds the ledger, and decides what may be added to the gradients. It never touches the device: StepDevice does, in
// the order asked, ahead of any tile that has not started.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/ledger.h"
#include "server/engine/outbox.h"
#include "server/engine/roll_call.h"
#include "server/engine/step_message.h"
#include "server/engine/step_types.h"
#include "server/metrics.h"

namespace shardmlp {

// What a step asks of the device. Called under the engine's lock; must only enqueue.
class StepDevice {
 public:
  virtual ~StepDevice() = default;
  // Sums the gradients over the replicas, then StepProtocol::Summed.
  virtual void SumGradients(StepPosition of) = 0;
  // Applies the optimizer and clears the gradients, then StepProtocol::Applied.
  virtual void Apply(std::shared_ptr<const CommitSpec> decision) = 0;
  virtual void ClearGradients() = 0;
  // The weights are others: lets go of what forwards on those before left.
  virtual void ReleaseStash() = 0;
  // All go on from the checkpoint that replica `from` has, then StepProtocol::Restored.
  virtual void Restore(int from, const CheckpointEdition& checkpoint) = 0;
};

// The other replicas. Called under the engine's lock; acts through the outbox.
class StepPeers {
 public:
  virtual ~StepPeers() = default;
  // To be delivered through StepProtocol::Agreed, unless the generation is lost first. In the order proposed.
  virtual void Propose(const StepMessage& message, Outbox& outbox) = 0;
  // After a loss: the state stays as it is until StepProtocol::Formed.
  virtual void Rejoin() = 0;
  // Who of them is missing, for people; empty where that is not known.
  virtual std::string Missing() const = 0;
};

// Thread-compatible; the engine's lock guards it. Answers and proposals go out through the outbox.
class StepProtocol {
 public:
  using SealDone = absl::AnyInvocable<void(absl::StatusOr<SealResult>)>;
  using PositionDone = absl::AnyInvocable<void(absl::StatusOr<StepPosition>)>;

  // `device`, `peers` and `metrics` must outlive this. `tensors`: names in ModelSpec::tensors' order. Weights versions
  // count up from `first_weights_version`. `rank`: this replica's.
  StepProtocol(StepDevice& device, StepPeers& peers, Metrics& metrics, std::vector<std::string> tensors,
               absl::Duration seal_timeout, int64_t first_weights_version, int rank);

  const StepPosition& position() const { return position_; }
  // Of this replica, by rank.
  std::vector<TrainerStatus> trainers() const;
  // Whether anyone here has added to the attempt, or sealed it.
  bool InProgress() const;
  // Whether another than `session_id` has committed a step since it was added.
  bool RunUnderWay(int64_t session_id) const;
  // Whether nothing would be lost if the attempt ended now, on any replica as far as is known.
  bool Idle() const;
  // Whether trainers here have been told that they may decide on the step, or have decided, and have not heard the end.
  bool Deciding() const;

  // FAILED_PRECONDITION (RUN_CONFLICT) for a run, or a rank of it, that is at another replica.
  absl::Status CheckTrainer(const SessionSpec& spec) const { return roll_.Check(rank_, spec); }
  void AddTrainer(int64_t session_id, const SessionSpec& spec, Outbox& outbox);
  // `lost`: its lease ended, rather than it said goodbye. Ends the attempt where that leaves it incomplete.
  void RemoveTrainer(int64_t session_id, bool lost, Outbox& outbox);
  // Whether anyone here has added to the attempt, and a generation is formed that can end it; HandBack does so.
  bool CanHandBack() const { return formed_ && InProgress(); }
  void HandBack(const std::string& why, Outbox& outbox);

  // Whether (step, attempt) is the open one. ABORTED (STEP_ABORTED) where the attempt is over; FAILED_PRECONDITION
  // (STALE_ATTEMPT) where it never was.
  absl::Status CheckOpen(int64_t step, int64_t attempt) const;
  // Whether a tile may be added, and marks it where it may: the device thread asks right before it enqueues the tile,
  // so that no seal can come between and count without it. `non_finite`: where in it a NaN or infinity is, so that it
  // is counted and not added; empty for none.
  absl::StatusOr<LedgerVerdict> Admit(const Contribution& contribution, int64_t step, int64_t attempt,
                                      const std::string& non_finite, Outbox& outbox);

  // Answers when all have sealed. A later seal of the same session takes the place of one that waits, which is then
  // answered with CANCELLED (CANCELLED).
  void Seal(const SealSpec& spec, absl::Time now, SealDone done, Outbox& outbox);
  void Commit(const CommitSpec& spec, PositionDone done, Outbox& outbox);
  void Discard(const DiscardSpec& spec, PositionDone done, Outbox& outbox);
  // Ends the attempt and goes on from a checkpoint; does nothing where that is where the last restore led to.
  void Restore(const CheckpointEdition& checkpoint, PositionDone done, Outbox& outbox);
  // Where the last restore led to, if it was of `checkpoint` and nothing has happened since.
  std::optional<StepPosition> AlreadyRestored(const CheckpointEdition& checkpoint) const;

  // What the device was asked for, done. The sums are ignored where that attempt has ended; a failure ends the attempt.
  void Summed(StepPosition of, absl::StatusOr<std::vector<double>> sums, Outbox& outbox);
  void Applied(const absl::Status& status, Outbox& outbox);
  // The step of the checkpoint.
  void Restored(const CheckpointEdition& checkpoint, absl::StatusOr<int64_t> step, Outbox& outbox);

  // A generation of the replicas, by rank, has formed, and this one has its state. Then what they agree on, in order,
  // until it is lost.
  void Formed(int64_t generation, const std::vector<int>& replicas, Outbox& outbox);
  void Agreed(int64_t index, int from, StepMessage message, absl::Time now, Outbox& outbox);
  void Stable(int64_t index, Outbox& outbox);
  void Lost(const absl::Status& why, bool heard_all, Outbox& outbox);
  // What to join the replicas with after a loss.
  StepPosition JoinPosition() const { return undecided_ ? NextAttempt() : position_; }
  // Between a loss and Formed: this replica got the state of another one; or it had the same, and goes on from
  // `position`, whose attempt may be a later one.
  void Received(const StepPosition& position, const std::optional<CommittedStep>& committed, Outbox& outbox);
  void GoOnFrom(const StepPosition& position, Outbox& outbox);
  const std::optional<CommittedStep>& committed() const { return committed_; }

  // Answers what has waited for too long, naming who is missing: seals, and after a loss the decisions too.
  void ExpireSeals(absl::Time now, Outbox& outbox);
  // Answers everything that waits.
  void Stop(const absl::Status& status, Outbox& outbox);

 private:
  enum class Phase { kOpen, kSumming, kSealed, kApplying, kRestoring };
  // As an index: in a generation before.
  static constexpr int64_t kEarlier = std::numeric_limits<int64_t>::max();
  struct Trainer {
    SessionSpec spec;
    int64_t opened = 0;  // the generation
    bool sealed = false;
    bool committed = false;  // any step
    bool deciding = false;   // its seal was answered, and it has neither committed nor discarded since
  };
  // One a session.
  struct WaitingSeal {
    int64_t session_id;
    absl::Time deadline;
    SealDone done;
  };
  struct WaitingCommit {
    CommitSpec spec;
    PositionDone done;
  };

  absl::StatusOr<Trainer*> FindTrainer(int64_t session_id);
  absl::Status CheckRows(const SealSpec& spec) const;
  std::string Missing() const;

  void ProposeReport(Outbox& outbox);
  // Where no generation is formed, in the next one.
  void ProposeEnd(StepOutcome outcome, const std::string& reason, Outbox& outbox);

  // Whether what was agreed on has to wait.
  bool Busy() const { return !formed_ || phase_ == Phase::kApplying || phase_ == Phase::kRestoring; }
  void Act(int from, const TrainerReport& report, absl::Time now, Outbox& outbox);
  void Act(int from, const SumReport& report, Outbox& outbox);
  void Act(const AttemptEnd& end, Outbox& outbox);
  void Act(int64_t index, const CommitSpec& decision, Outbox& outbox);
  void Act(int from, const RestoreOrder& order, Outbox& outbox);
  void ActOnLoss(const absl::Status& why, bool heard_all, Outbox& outbox);
  // What waited for the device.
  void CatchUp(Outbox& outbox);
  // A trainer of this replica that another has, or whose run is not the one that trains there.
  void RefuseTrainer(int trainer_rank, const absl::Status& why, Outbox& outbox);

  // Ends the attempt: goes to `next`, answers who waits, drops its ledger, and has the device clear the gradients. No
  // `outcome`: nothing was lost, and no step is counted.
  void EndAttempt(const StepPosition& next, std::optional<StepOutcome> outcome, const std::string& why, Outbox& outbox);
  StepPosition NextAttempt() const;
  // What metrics and log hear of: the step that has just been committed, the attempt that is about to end, and a NaN or
  // infinity in the open one.
  void NoteCommitted(Outbox& outbox);
  void NoteEnded(StepOutcome outcome, const std::string& why, Outbox& outbox);
  void NoteNonFinite(const std::string& origin, Outbox& outbox);
  // What a trainer is told whose attempt of `step` is over.
  absl::StatusOr<StepPosition> Discarded(int64_t step) const;
  void StartAttempt();
  void AnswerSeals(const absl::StatusOr<SealResult>& result, Outbox& outbox);
  // The order that was proposed first.
  void AnswerRestore(absl::StatusOr<StepPosition> result, Outbox& outbox);
  // Whether the last restore was of what `from` means by `checkpoint`. Replicas may each have their own of a name.
  bool IsRestored(int from, const CheckpointEdition& checkpoint) const;
  static void Answer(std::vector<PositionDone>& waiting, const absl::StatusOr<StepPosition>& result, Outbox& outbox);
  void AnswerCommits(const absl::StatusOr<StepPosition>& result, Outbox& outbox);
  void CommittedByAll(Outbox& outbox);
  // The attempt's decision is a commit: answers the discards, and the commits with other hyperparameters.
  void RefuseOthers(const CommitSpec& decision, Outbox& outbox);
  // The commits that wait are done, and answered by CommittedByAll.
  void TellOnceStable();

  StepDevice& device_;
  StepPeers& peers_;
  Metrics& metrics_;
  const std::vector<std::string> tensors_;
  const absl::Duration seal_timeout_;
  const int rank_;

  // Of this replica alone.
  std::map<int64_t, Trainer> trainers_;      // by session
  std::map<int64_t, absl::Status> refused_;  // sessions that are no trainer's any more, and why
  Ledger ledger_;
  std::string non_finite_origin_;
  absl::Time first_seal_;
  std::vector<WaitingSeal> waiting_seals_;
  std::vector<WaitingCommit> waiting_commits_;
  std::vector<PositionDone> waiting_discards_;
  std::vector<PositionDone> waiting_restores_;  // one for each order that was proposed, in order
  std::optional<AttemptEnd> owed_end_;          // to be proposed once a generation is formed

  // As on every replica, but for where its device is.
  bool formed_ = false;
  int64_t generation_ = 0;  // that is formed, or was last
  std::string loss_;        // why no generation is formed
  StepPosition position_;
  Phase phase_ = Phase::kOpen;
  std::string end_reason_;  // of the attempt before, for those that still quote it
  size_t replica_count_ = 0;
  RollCall roll_;
  std::set<int> summed_;                 // replicas that have the sums
  std::vector<double> sums_of_squares_;  // as the first of them found them
  bool summed_here_ = false;             // this replica has proposed to say that it has them
  // After a loss: others may have committed the attempt, which nobody does before all have its sums, and this replica
  // not have heard of it. Then it stays as it is, and nobody is answered, until a generation has formed, which knows.
  bool undecided_ = false;
  std::optional<absl::Time> decisions_deadline_;  // then
  std::optional<SealResult> sealed_;
  std::shared_ptr<const CommitSpec> decision_;  // of this attempt, once there is one
  int64_t decision_index_ = 0;
  std::deque<absl::AnyInvocable<void(Outbox&)>> agreed_;  // that waits for the device
  int64_t stable_ = -1;

  std::optional<CommittedStep> committed_;
  int64_t committed_index_ = kEarlier;        // in its generation
  bool committed_by_all_ = true;              // that is, all replicas have it
  std::vector<PositionDone> untold_commits_;  // of committed_, until then
  int restoring_from_ = 0;
  int restored_from_ = 0;
  CheckpointEdition restored_checkpoint_;  // the last, and where that led
  StepPosition restored_position_;
};

}  // namespace shardmlp
