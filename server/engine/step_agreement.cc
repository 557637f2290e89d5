// StepProtocol's second half: what the replicas agreed on, and the generations of replicas.
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "server/engine/step_errors.h"
#include "server/engine/step_protocol.h"
#include "server/log.h"

namespace shardmlp {

void StepProtocol::Agreed(int64_t index, int from, StepMessage message, absl::Time now, Outbox& outbox) {
  auto act = [this, index, from, message = std::move(message), now](Outbox& outbox) {
    if (const auto* report = std::get_if<TrainerReport>(&message)) Act(from, *report, now, outbox);
    if (const auto* report = std::get_if<SumReport>(&message)) Act(from, *report, outbox);
    if (const auto* end = std::get_if<AttemptEnd>(&message)) Act(*end, outbox);
    if (const auto* decision = std::get_if<CommitSpec>(&message)) Act(index, *decision, outbox);
    if (const auto* order = std::get_if<RestoreOrder>(&message)) Act(from, *order, outbox);
  };
  if (Busy()) {
    agreed_.push_back(std::move(act));
  } else {
    act(outbox);
  }
}

void StepProtocol::CatchUp(Outbox& outbox) {
  while (!agreed_.empty() && !Busy()) {
    absl::AnyInvocable<void(Outbox&)> act = std::move(agreed_.front());
    agreed_.pop_front();
    act(outbox);
  }
}

void StepProtocol::Act(int from, const TrainerReport& report, absl::Time now, Outbox& outbox) {
  for (const RollCall::Refusal& refused : roll_.Take(from, report)) {
    if (refused.replica == rank_) RefuseTrainer(refused.trainer_rank, refused.why, outbox);
  }
  // Who reports has the state that this generation began with.
  if (committed_index_ == kEarlier && roll_.AllReported()) CommittedByAll(outbox);
  if (phase_ != Phase::kOpen || !roll_.AllSealed(position_)) return;
  phase_ = Phase::kSumming;
  if (!waiting_seals_.empty()) metrics_.ObserveStepPhase(StepPhase::kSeal, now - first_seal_);
  device_.SumGradients(position_);
}

void StepProtocol::RefuseTrainer(int trainer_rank, const absl::Status& why, Outbox& outbox) {
  for (auto& [session_id, trainer] : trainers_) {
    if (trainer.spec.trainer_rank != trainer_rank) continue;
    for (WaitingSeal& seal : waiting_seals_) {
      if (seal.session_id == session_id) outbox.Add(std::move(seal.done), absl::StatusOr<SealResult>(why));
    }
    std::erase_if(waiting_seals_, [id = session_id](const WaitingSeal& seal) { return seal.session_id == id; });
    const int64_t refused = session_id;
    RemoveTrainer(refused, /*lost=*/false, outbox);
    refused_[refused] = why;
    return;
  }
}

void StepProtocol::Summed(StepPosition of, absl::StatusOr<std::vector<double>> sums, Outbox& outbox) {
  if (phase_ != Phase::kSumming || !(of == position_)) return;
  if (sums.ok()) {
    summed_here_ = true;
    return peers_.Propose(SumReport{of.step, of.attempt, *std::move(sums)}, outbox);
  }
  ProposeEnd(StepOutcome::kAborted, absl::StrCat("the gradients could not be summed: ", sums.status().message()),
             outbox);
}

void StepProtocol::Act(int from, const SumReport& report, Outbox& outbox) {
  if (phase_ != Phase::kSumming || !IsOf(report, position_)) return;
  if (summed_.empty()) sums_of_squares_ = report.tensor_sums_of_squares;
  summed_.insert(from);
  if (summed_.size() < replica_count_) return;
  SealResult result;
  result.tensor_sums_of_squares = sums_of_squares_;
  result.non_finite_origin = roll_.NonFiniteOrigin(position_);
  for (size_t i = 0; i < result.tensor_sums_of_squares.size() && result.non_finite_origin.empty(); ++i) {
    if (std::isfinite(result.tensor_sums_of_squares[i])) continue;
    result.non_finite_origin = absl::StrCat("the gradient of ", tensors_[i]);
  }
  result.finite = result.non_finite_origin.empty();
  if (!result.finite && non_finite_origin_.empty()) NoteNonFinite(result.non_finite_origin, outbox);
  result.rows = roll_.RowsOf(position_);
  phase_ = Phase::kSealed;
  sealed_ = result;
  for (auto& [session_id, trainer] : trainers_) trainer.deciding = trainer.sealed;
  AnswerSeals(result, outbox);
}

void StepProtocol::Act(const AttemptEnd& end, Outbox& outbox) {
  if (IsOf(end, position_)) EndAttempt(NextAttempt(), end.outcome, end.reason, outbox);
}

void StepProtocol::Act(int64_t index, const CommitSpec& decision, Outbox& outbox) {
  if (phase_ != Phase::kSealed || !IsOf(decision, position_)) return;
  phase_ = Phase::kApplying;
  decision_ = std::make_shared<const CommitSpec>(decision);
  decision_index_ = index;
  RefuseOthers(decision, outbox);
  device_.Apply(decision_);
}

void StepProtocol::RefuseOthers(const CommitSpec& decision, Outbox& outbox) {
  for (WaitingCommit& commit : waiting_commits_) {
    if (Same(decision, commit.spec)) continue;
    outbox.Add(std::move(commit.done), absl::StatusOr<StepPosition>(OtherHyperparameters(decision, commit.spec)));
  }
  std::erase_if(waiting_commits_, [&](const WaitingCommit& commit) { return !Same(decision, commit.spec); });
  Answer(waiting_discards_, CommittedAlready(decision.step), outbox);
}

void StepProtocol::Applied(const absl::Status& status, Outbox& outbox) {
  if (!status.ok()) {
    AnswerCommits(status, outbox);
    EndAttempt(NextAttempt(), StepOutcome::kAborted, absl::StrCat("the step could not be applied: ", status.message()),
               outbox);
    return CatchUp(outbox);
  }
  CommittedByAll(outbox);  // the one before, whose successor all have summed
  committed_ = {*decision_, *sealed_, {position_.step + 1, position_.attempt, position_.weights_version + 1}};
  committed_index_ = decision_index_;
  committed_by_all_ = false;
  position_ = committed_->position;
  TellOnceStable();
  for (auto& [session_id, trainer] : trainers_) trainer.committed = true;
  roll_.Committed();
  NoteCommitted(outbox);
  StartAttempt();
  device_.ReleaseStash();
  if (committed_index_ <= stable_) CommittedByAll(outbox);
  CatchUp(outbox);
}

void StepProtocol::TellOnceStable() {
  for (WaitingCommit& commit : waiting_commits_) untold_commits_.push_back(std::move(commit.done));
  waiting_commits_.clear();
}

void StepProtocol::CommittedByAll(Outbox& outbox) {
  committed_by_all_ = true;
  if (committed_.has_value()) Answer(untold_commits_, committed_->position, outbox);
}

void StepProtocol::Stable(int64_t index, Outbox& outbox) {
  stable_ = index;
  if (!committed_by_all_ && committed_index_ <= stable_) CommittedByAll(outbox);
}

void StepProtocol::Act(int from, const RestoreOrder& order, Outbox& outbox) {
  // Each trainer of a run asks for it, and the first has got it for all.
  if (IsRestored(from, order.checkpoint) && order.weights_version < restored_position_.weights_version) {
    if (from == rank_) AnswerRestore(restored_position_, outbox);
    return;
  }
  phase_ = Phase::kRestoring;
  restoring_from_ = from;
  device_.Restore(from, order.checkpoint);
}

void StepProtocol::Restored(const CheckpointEdition& checkpoint, absl::StatusOr<int64_t> step, Outbox& outbox) {
  const int from = phase_ == Phase::kRestoring ? restoring_from_ : rank_;
  const bool asked_here = phase_ == Phase::kRestoring && from == rank_;
  StepPosition next = NextAttempt();
  if (step.ok()) {
    CommittedByAll(outbox);
    committed_.reset();  // undone
    device_.ReleaseStash();
    next.step = *step;
    ++next.weights_version;
  }
  EndAttempt(next, InProgress() ? std::make_optional(StepOutcome::kAborted) : std::nullopt,
             step.ok() ? "a checkpoint was restored"
                       : absl::StrCat("a checkpoint could not be restored: ", step.status().message()),
             outbox);
  if (step.ok()) {
    restored_checkpoint_ = checkpoint;
    restored_from_ = from;
    restored_position_ = position_;
  }
  if (asked_here) AnswerRestore(step.ok() ? absl::StatusOr<StepPosition>(position_) : step.status(), outbox);
  CatchUp(outbox);
}

bool StepProtocol::IsRestored(int from, const CheckpointEdition& checkpoint) const {
  return checkpoint.name == restored_checkpoint_.name &&
         (from != restored_from_ || checkpoint.edition == restored_checkpoint_.edition);
}

void StepProtocol::AnswerRestore(absl::StatusOr<StepPosition> result, Outbox& outbox) {
  if (waiting_restores_.empty()) return;  // stopped meanwhile
  outbox.Add(std::move(waiting_restores_.front()), std::move(result));
  waiting_restores_.erase(waiting_restores_.begin());
}

void StepProtocol::Formed(int64_t generation, const std::vector<int>& replicas, Outbox& outbox) {
  formed_ = true;
  generation_ = generation;
  replica_count_ = replicas.size();
  roll_.Begin(replicas);
  ProposeReport(outbox);
  if (owed_end_.has_value() && IsOf(*owed_end_, position_)) peers_.Propose(*owed_end_, outbox);
  owed_end_.reset();
  CatchUp(outbox);
}

void StepProtocol::Lost(const absl::Status& why, bool heard_all, Outbox& outbox) {
  if (formed_ && Busy()) {
    agreed_.push_back([=, this](Outbox& outbox) { ActOnLoss(why, heard_all, outbox); });
  } else {
    ActOnLoss(why, heard_all, outbox);
  }
}

void StepProtocol::ActOnLoss(const absl::Status& why, bool heard_all, Outbox& outbox) {
  undecided_ = undecided_ || (summed_here_ && !heard_all);
  formed_ = false;
  loss_ = std::string(why.message());
  agreed_.clear();
  stable_ = -1;
  committed_index_ = kEarlier;
  roll_.Begin({});
  if (!undecided_ && (InProgress() || !waiting_discards_.empty())) {
    EndAttempt(NextAttempt(), StepOutcome::kAborted, absl::StrCat("a replica was lost: ", loss_), outbox);
  }
  Answer(waiting_restores_, ReplicasMissing(Missing()), outbox);
  peers_.Rejoin();
}

void StepProtocol::Received(const StepPosition& position, const std::optional<CommittedStep>& committed,
                            Outbox& outbox) {
  auto outcome = InProgress() ? std::make_optional(StepOutcome::kAborted) : std::nullopt;
  const bool same = committed.has_value() && committed_.has_value() &&
                    Same(committed->decision, committed_->decision) && committed->position == committed_->position;
  if (!same) {
    Answer(untold_commits_, StepAborted("the commit went down with the replicas that had it", position), outbox);
  }
  committed_ = committed;
  committed_index_ = kEarlier;
  committed_by_all_ = false;
  if (undecided_ && committed_.has_value() && IsOf(committed_->decision, position_)) {
    outcome = StepOutcome::kCommitted;
    AnswerSeals(committed_->sealed, outbox);
    RefuseOthers(committed_->decision, outbox);
    TellOnceStable();
  }
  restored_checkpoint_ = {};
  device_.ReleaseStash();
  EndAttempt(position, outcome, "this replica went on from the state of another one", outbox);
}

void StepProtocol::GoOnFrom(const StepPosition& position, Outbox& outbox) {
  if (position == position_) return;
  const auto outcome = InProgress() ? std::make_optional(StepOutcome::kAborted) : std::nullopt;
  EndAttempt(position, outcome, "a replica was lost", outbox);
}

StepPosition StepProtocol::NextAttempt() const {
  return {position_.step, position_.attempt + 1, position_.weights_version};
}

absl::StatusOr<StepPosition> StepProtocol::Discarded(int64_t step) const {
  if (step != position_.step) return OtherStep(step, position_);
  return position_;
}

void StepProtocol::EndAttempt(const StepPosition& next, std::optional<StepOutcome> outcome, const std::string& why,
                              Outbox& outbox) {
  if (outcome.has_value()) NoteEnded(*outcome, why, outbox);
  const int64_t step = std::exchange(position_, next).step;
  end_reason_ = why;
  const absl::Status aborted = StepAborted(absl::StrCat("the step's attempt is over: ", why), position_);
  for (auto& [session_id, trainer] : trainers_) trainer.deciding = false;
  AnswerSeals(aborted, outbox);
  AnswerCommits(aborted, outbox);
  Answer(waiting_discards_, Discarded(step), outbox);
  StartAttempt();
  metrics_.SetStep(position_.step, position_.attempt);
  device_.ClearGradients();
}

void StepProtocol::NoteCommitted(Outbox& outbox) {
  metrics_.CountStep(StepOutcome::kCommitted);
  metrics_.SetStep(position_.step, position_.attempt);
  if (!Logs(LogLevel::kInfo)) return;
  const CommitSpec& decision = committed_->decision;
  int64_t rows = 0;
  for (const auto& [layer, count] : committed_->sealed.rows) rows += count;
  double squares = 0;
  for (const double sum : committed_->sealed.tensor_sums_of_squares) squares += sum;
  outbox.Do([fields = LogFields{{"step", position_.step},
                                {"attempt", position_.attempt},
                                {"session", decision.session_id},
                                {"rows", rows},
                                {"gradient_norm", std::sqrt(squares) * decision.gradient_scale}}] {
    LogInfo("step committed", fields);
  });
}

void StepProtocol::NoteEnded(StepOutcome outcome, const std::string& why, Outbox& outbox) {
  metrics_.CountStep(outcome);
  const bool discarded = outcome == StepOutcome::kDiscarded;
  outbox.Do([discarded, fields = LogFields{{"step", position_.step}, {"attempt", position_.attempt}, {"why", why}}] {
    Log(discarded ? LogLevel::kInfo : LogLevel::kWarning, discarded ? "attempt discarded" : "attempt aborted", fields);
  });
}

void StepProtocol::NoteNonFinite(const std::string& origin, Outbox& outbox) {
  metrics_.CountNonFinite();
  outbox.Do([fields = LogFields{{"step", position_.step}, {"attempt", position_.attempt}, {"origin", origin}}] {
    LogWarning("gradient not finite", fields);
  });
}

void StepProtocol::StartAttempt() {
  phase_ = Phase::kOpen;
  ledger_.Clear();
  non_finite_origin_.clear();
  summed_.clear();
  summed_here_ = undecided_ = false;
  decisions_deadline_.reset();
  sealed_.reset();
  decision_ = nullptr;
  for (auto& [session_id, trainer] : trainers_) trainer.sealed = false;
}

void StepProtocol::AnswerSeals(const absl::StatusOr<SealResult>& result, Outbox& outbox) {
  for (WaitingSeal& seal : waiting_seals_) outbox.Add(std::move(seal.done), result);
  waiting_seals_.clear();
}

void StepProtocol::AnswerCommits(const absl::StatusOr<StepPosition>& result, Outbox& outbox) {
  for (WaitingCommit& commit : waiting_commits_) outbox.Add(std::move(commit.done), result);
  waiting_commits_.clear();
}

void StepProtocol::Answer(std::vector<PositionDone>& waiting, const absl::StatusOr<StepPosition>& result,
                          Outbox& outbox) {
  for (PositionDone& done : waiting) outbox.Add(std::move(done), result);
  waiting.clear();
}

}  // namespace shardmlp
