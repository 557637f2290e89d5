#include "server/engine/step_protocol.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

ErrorMetadata PositionMetadata(const StepPosition& position) {
  return {{"step", absl::StrCat(position.step)}, {"attempt", absl::StrCat(position.attempt)}};
}

bool Same(const CommitSpec& a, const CommitSpec& b) {
  return a.gradient_scale == b.gradient_scale && a.fresh_optimizer == b.fresh_optimizer && a.groups == b.groups;
}

absl::Status DecisionConflict(const std::string& message) {
  return Error(absl::StatusCode::kFailedPrecondition, Reason::kDecisionConflict, message);
}

// `decision` stands; what `spec` says otherwise.
absl::Status OtherHyperparameters(const CommitSpec& decision, const CommitSpec& spec) {
  std::string difference = absl::StrCat("another division into groups than its ", decision.groups.size());
  if (spec.gradient_scale != decision.gradient_scale) {
    difference = absl::StrCat("gradient_scale ", spec.gradient_scale, " for ", decision.gradient_scale);
  } else if (spec.fresh_optimizer != decision.fresh_optimizer) {
    difference = absl::StrCat("fresh_optimizer ", spec.fresh_optimizer, " for ", decision.fresh_optimizer);
  }
  for (size_t i = 0; i < std::min(spec.groups.size(), decision.groups.size()); ++i) {
    const ParameterGroup& got = spec.groups[i];
    const ParameterGroup& decided = decision.groups[i];
    if (got.tensors != decided.tensors || got.hyperparameters == decided.hyperparameters) continue;
    difference =
        absl::StrCat("group ", i, " as ", Describe(got.hyperparameters), " for ", Describe(decided.hyperparameters));
    break;
  }
  return DecisionConflict(absl::StrCat("another trainer committed step ", decision.step,
                                       " with other hyperparameters; this one has ", difference,
                                       ". Commit with those, or restore a checkpoint on all trainers"));
}

bool IsStep(const CommitSpec* commit, int64_t step, int64_t attempt) {
  return commit != nullptr && commit->step == step && commit->attempt == attempt;
}

}  // namespace

StepProtocol::StepProtocol(StepDevice& device, Metrics& metrics, std::vector<std::string> tensors,
                           absl::Duration seal_timeout, int64_t first_weights_version)
    : device_(device), metrics_(metrics), tensors_(std::move(tensors)), seal_timeout_(seal_timeout) {
  position_.weights_version = first_weights_version;
}

std::vector<TrainerStatus> StepProtocol::trainers() const {
  std::vector<TrainerStatus> trainers;
  for (const auto& [session_id, trainer] : trainers_) trainers.push_back({trainer.spec, trainer.sealed});
  std::sort(trainers.begin(), trainers.end(),
            [](const auto& a, const auto& b) { return a.spec.trainer_rank < b.spec.trainer_rank; });
  return trainers;
}

void StepProtocol::AddTrainer(int64_t session_id, const SessionSpec& spec) {
  trainers_.try_emplace(session_id, Trainer{.spec = spec});
}

void StepProtocol::RemoveTrainer(int64_t session_id, bool lost, Outbox& outbox) {
  const auto trainer = trainers_.find(session_id);
  if (trainer == trainers_.end()) return;
  const SessionSpec spec = trainer->second.spec;
  const bool took_part = trainer->second.sealed || !ledger_.RowsOf(session_id).empty();
  const bool in_progress = InProgress();
  trainers_.erase(trainer);
  // A decided step is applied whoever is left.
  if (phase_ == Phase::kApplying) return;
  if (took_part || (lost && in_progress)) {
    EndAttempt(StepOutcome::kAborted,
               absl::StrCat("trainer rank ", spec.trainer_rank, " of run '", spec.run_id, "' ",
                            lost ? "was lost: its lease ended" : "closed its session in mid-step"),
               outbox);
  }
}

absl::StatusOr<StepProtocol::Trainer*> StepProtocol::FindTrainer(int64_t session_id) {
  const auto trainer = trainers_.find(session_id);
  if (trainer == trainers_.end()) {
    return Error(absl::StatusCode::kFailedPrecondition, Reason::kFrozen,
                 absl::StrCat("session ", session_id, " takes part in no step: it reads, or the server is frozen"));
  }
  return &trainer->second;
}

absl::Status StepProtocol::CheckOpen(int64_t step, int64_t attempt) const {
  if (step == position_.step && attempt == position_.attempt) return absl::OkStatus();
  const std::string message = absl::StrCat("got step ", step, " attempt ", attempt, "; step ", position_.step,
                                           " attempt ", position_.attempt, " is open");
  if (attempt < position_.attempt) {
    return Error(absl::StatusCode::kAborted, Reason::kStepAborted,
                 absl::StrCat("the attempt is over (", end_reason_, "): ", message), PositionMetadata(position_));
  }
  return Error(absl::StatusCode::kFailedPrecondition, Reason::kStaleAttempt, message, PositionMetadata(position_));
}

absl::StatusOr<LedgerVerdict> StepProtocol::Admit(const Contribution& contribution, int64_t step, int64_t attempt,
                                                  const std::string& non_finite) {
  SHARDMLP_RETURN_IF_ERROR(CheckOpen(step, attempt));
  const auto trainer = trainers_.find(contribution.session_id);
  if (trainer == trainers_.end()) {
    return Error(absl::StatusCode::kNotFound, Reason::kUnknownSession,
                 absl::StrCat("session ", contribution.session_id, " ended while its call was open"));
  }
  SHARDMLP_ASSIGN_OR_RETURN(const LedgerVerdict verdict, ledger_.Check(contribution));
  if (verdict == LedgerVerdict::kRepeat) return verdict;
  if (trainer->second.sealed || phase_ != Phase::kOpen) {
    return Error(absl::StatusCode::kFailedPrecondition, Reason::kAlreadySealed,
                 absl::StrCat("session ", contribution.session_id, " has sealed step ", step,
                              " and can add no rows to it; got call ", contribution.call_id));
  }
  ledger_.Mark(contribution);
  if (!non_finite.empty() && non_finite_origin_.empty()) {
    non_finite_origin_ = non_finite;
    metrics_.CountNonFinite();  // the attempt, once
  }
  return verdict;
}

absl::Status StepProtocol::CheckRows(const SealSpec& spec) const {
  const LayerRows counted = ledger_.RowsOf(spec.session_id);
  std::set<int> layers;
  for (const auto& [layer, rows] : counted) layers.insert(layer);
  for (const auto& [layer, rows] : spec.rows) layers.insert(layer);
  std::vector<std::string> differences;
  ErrorMetadata metadata;
  for (const int layer : layers) {
    const int64_t got = spec.rows.contains(layer) ? spec.rows.at(layer) : 0;
    const int64_t expected = counted.contains(layer) ? counted.at(layer) : 0;
    if (got == expected) continue;
    differences.push_back(absl::StrCat("layer ", layer, ": sent ", got, ", counted ", expected));
    metadata.push_back({absl::StrCat("layer_", layer), absl::StrCat("sent ", got, " counted ", expected)});
  }
  if (differences.empty()) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition, Reason::kRowCountMismatch,
               absl::StrCat("the rows that the session says it sent are not those that were counted (",
                            absl::StrJoin(differences, "; "), "); discard the step"),
               metadata);
}

bool StepProtocol::AllSealed() const {
  if (trainers_.empty()) return false;
  if (static_cast<int>(trainers_.size()) < trainers_.begin()->second.spec.trainer_count) return false;
  return std::all_of(trainers_.begin(), trainers_.end(), [](const auto& entry) { return entry.second.sealed; });
}

std::string StepProtocol::Missing() const {
  if (trainers_.empty()) return "every trainer (not connected)";
  std::map<int, bool> sealed;
  for (const auto& [session_id, trainer] : trainers_) sealed[trainer.spec.trainer_rank] = trainer.sealed;
  std::vector<std::string> missing;
  for (int rank = 0; rank < trainers_.begin()->second.spec.trainer_count; ++rank) {
    if (!sealed.contains(rank)) {
      missing.push_back(absl::StrCat("rank ", rank, " (not connected)"));
    } else if (!sealed[rank]) {
      missing.push_back(absl::StrCat("rank ", rank));
    }
  }
  return absl::StrJoin(missing, ", ");
}

void StepProtocol::Seal(const SealSpec& spec, absl::Time now, SealDone done, Outbox& outbox) {
  const absl::StatusOr<Trainer*> trainer = FindTrainer(spec.session_id);
  if (!trainer.ok()) return outbox.Add(std::move(done), absl::StatusOr<SealResult>(trainer.status()));
  if (IsStep(last_commit_.get(), spec.step, spec.attempt)) {
    return outbox.Add(std::move(done), absl::StatusOr<SealResult>(last_sealed_));
  }
  absl::Status status = CheckOpen(spec.step, spec.attempt);
  if (status.ok()) status = CheckRows(spec);
  if (!status.ok()) return outbox.Add(std::move(done), absl::StatusOr<SealResult>(status));
  if (sealed_.has_value()) return outbox.Add(std::move(done), absl::StatusOr<SealResult>(*sealed_));
  (*trainer)->sealed = true;
  if (waiting_seals_.empty()) first_seal_ = now;
  const auto earlier = std::find_if(waiting_seals_.begin(), waiting_seals_.end(),
                                    [&](const WaitingSeal& seal) { return seal.session_id == spec.session_id; });
  if (earlier != waiting_seals_.end()) {
    outbox.Add(std::move(earlier->done),
               absl::StatusOr<SealResult>(
                   Error(absl::StatusCode::kCancelled, Reason::kCancelled,
                         absl::StrCat("a later seal of session ", spec.session_id, " took the place of this one"))));
    waiting_seals_.erase(earlier);
  }
  waiting_seals_.push_back({spec.session_id, now + seal_timeout_, std::move(done)});
  if (phase_ == Phase::kOpen && AllSealed()) {
    phase_ = Phase::kSumming;
    metrics_.ObserveStepPhase(StepPhase::kSeal, now - first_seal_);
    device_.SumGradients(position_);
  }
}

void StepProtocol::Summed(StepPosition of, absl::StatusOr<std::vector<double>> sums, Outbox& outbox) {
  if (phase_ != Phase::kSumming || !(of == position_)) return;
  if (!sums.ok()) {
    return EndAttempt(StepOutcome::kAborted,
                      absl::StrCat("the gradients could not be summed: ", sums.status().message()), outbox);
  }
  SealResult result;
  result.tensor_sums_of_squares = *std::move(sums);
  result.non_finite_origin = non_finite_origin_;
  for (size_t i = 0; i < result.tensor_sums_of_squares.size() && result.non_finite_origin.empty(); ++i) {
    if (std::isfinite(result.tensor_sums_of_squares[i])) continue;
    result.non_finite_origin = absl::StrCat("the gradient of ", tensors_[i]);
    metrics_.CountNonFinite();
  }
  result.finite = result.non_finite_origin.empty();
  for (const auto& [session_id, trainer] : trainers_) {
    for (const auto& [layer, rows] : ledger_.RowsOf(session_id)) result.rows[layer] += rows;
  }
  phase_ = Phase::kSealed;
  sealed_ = result;
  AnswerSeals(result, outbox);
}

void StepProtocol::AnswerSeals(const absl::StatusOr<SealResult>& result, Outbox& outbox) {
  for (WaitingSeal& seal : waiting_seals_) outbox.Add(std::move(seal.done), result);
  waiting_seals_.clear();
}

void StepProtocol::Commit(const CommitSpec& spec, PositionDone done, Outbox& outbox) {
  const auto answer = [&](absl::StatusOr<StepPosition> result) { outbox.Add(std::move(done), std::move(result)); };
  const absl::StatusOr<Trainer*> trainer = FindTrainer(spec.session_id);
  if (!trainer.ok()) return answer(trainer.status());
  if (IsStep(last_commit_.get(), spec.step, spec.attempt)) {
    if (Same(*last_commit_, spec)) return answer(last_committed_position_);
    return answer(OtherHyperparameters(*last_commit_, spec));
  }
  if (const absl::Status status = CheckOpen(spec.step, spec.attempt); !status.ok()) return answer(status);
  if (decision_ != nullptr) {
    if (Same(*decision_, spec)) return waiting_commits_.push_back(std::move(done));
    return answer(OtherHyperparameters(*decision_, spec));
  }
  if (phase_ != Phase::kSealed) {
    return answer(Error(absl::StatusCode::kFailedPrecondition, Reason::kNotSealed,
                        absl::StrCat("step ", spec.step, " is not sealed by all; ",
                                     phase_ == Phase::kSumming ? "its gradients are being summed"
                                                               : absl::StrCat("missing: ", Missing()))));
  }
  if (!sealed_->finite) {
    return answer(
        Error(absl::StatusCode::kFailedPrecondition, Reason::kNonFinite,
              absl::StrCat("step ", spec.step, " is not finite (", sealed_->non_finite_origin, "); discard it"),
              {{"origin", sealed_->non_finite_origin}}));
  }
  decision_ = std::make_shared<const CommitSpec>(spec);
  waiting_commits_.push_back(std::move(done));
  phase_ = Phase::kApplying;
  device_.Apply(decision_);
}

void StepProtocol::Applied(const absl::Status& status, Outbox& outbox) {
  if (!status.ok()) {
    AnswerCommits(status, outbox);
    return EndAttempt(StepOutcome::kAborted, absl::StrCat("the step could not be applied: ", status.message()), outbox);
  }
  last_commit_ = decision_;
  last_sealed_ = *sealed_;
  ++position_.step;
  ++position_.weights_version;
  last_committed_position_ = position_;
  for (auto& [session_id, trainer] : trainers_) trainer.committed = true;
  metrics_.CountStep(StepOutcome::kCommitted);
  metrics_.SetStep(position_.step, position_.attempt);
  StartAttempt();
  device_.ReleaseStash();
  AnswerCommits(position_, outbox);
}

void StepProtocol::AnswerCommits(const absl::StatusOr<StepPosition>& result, Outbox& outbox) {
  for (PositionDone& done : waiting_commits_) outbox.Add(std::move(done), result);
  waiting_commits_.clear();
}

void StepProtocol::Discard(const DiscardSpec& spec, PositionDone done, Outbox& outbox) {
  const auto answer = [&](absl::StatusOr<StepPosition> result) { outbox.Add(std::move(done), std::move(result)); };
  const absl::StatusOr<Trainer*> trainer = FindTrainer(spec.session_id);
  if (!trainer.ok()) return answer(trainer.status());
  if (IsStep(last_commit_.get(), spec.step, spec.attempt) || IsStep(decision_.get(), spec.step, spec.attempt)) {
    return answer(DecisionConflict(absl::StrCat(
        "step ", spec.step,
        " was committed, by another trainer or before, and can't be discarded. This trainer's own "
        "half is missing: commit with the same hyperparameters, or restore a checkpoint on all trainers")));
  }
  const absl::Status open = CheckOpen(spec.step, spec.attempt);
  if (ReasonOf(open) == Reason::kStepAborted) return answer(position_);
  if (!open.ok()) return answer(open);
  EndAttempt(StepOutcome::kDiscarded,
             absl::StrCat("discarded by trainer rank ", (*trainer)->spec.trainer_rank, ": ", spec.reason), outbox);
  answer(position_);
}

bool StepProtocol::InProgress() const {
  return !ledger_.empty() || !waiting_seals_.empty() || phase_ != Phase::kOpen ||
         std::any_of(trainers_.begin(), trainers_.end(), [](const auto& entry) { return entry.second.sealed; });
}

void StepProtocol::EndAttempt(std::optional<StepOutcome> outcome, const std::string& why, Outbox& outbox) {
  ++position_.attempt;
  end_reason_ = why;
  const absl::Status aborted = Error(absl::StatusCode::kAborted, Reason::kStepAborted,
                                     absl::StrCat("the step's attempt is over: ", why), PositionMetadata(position_));
  AnswerSeals(aborted, outbox);
  AnswerCommits(aborted, outbox);
  StartAttempt();
  if (outcome.has_value()) metrics_.CountStep(*outcome);
  metrics_.SetStep(position_.step, position_.attempt);
  device_.ClearGradients();
}

void StepProtocol::StartAttempt() {
  phase_ = Phase::kOpen;
  ledger_.Clear();
  non_finite_origin_.clear();
  sealed_.reset();
  decision_ = nullptr;
  for (auto& [session_id, trainer] : trainers_) trainer.sealed = false;
}

bool StepProtocol::RunUnderWay(int64_t session_id) const {
  return std::any_of(trainers_.begin(), trainers_.end(),
                     [&](const auto& entry) { return entry.first != session_id && entry.second.committed; });
}

void StepProtocol::Restored(int64_t step, Outbox& outbox) {
  const auto outcome = InProgress() ? std::make_optional(StepOutcome::kAborted) : std::nullopt;
  position_.step = step;
  ++position_.weights_version;
  last_commit_ = nullptr;  // undone
  device_.ReleaseStash();
  EndAttempt(outcome, "a checkpoint was restored", outbox);
}

void StepProtocol::ExpireSeals(absl::Time now, Outbox& outbox) {
  // Once all have sealed, nobody is missing, and the device will answer.
  if (phase_ != Phase::kOpen) return;
  const auto expired = std::stable_partition(waiting_seals_.begin(), waiting_seals_.end(),
                                             [now](const WaitingSeal& seal) { return seal.deadline > now; });
  for (auto seal = expired; seal != waiting_seals_.end(); ++seal) {
    outbox.Add(std::move(seal->done), absl::StatusOr<SealResult>(Error(
                                          absl::StatusCode::kUnavailable, Reason::kTrainerMissing,
                                          absl::StrCat("not every trainer sealed step ", position_.step, " within ",
                                                       absl::FormatDuration(seal_timeout_), "; missing: ", Missing()),
                                          {{"missing", Missing()}})));
  }
  waiting_seals_.erase(expired, waiting_seals_.end());
}

void StepProtocol::Stop(const absl::Status& status, Outbox& outbox) {
  AnswerSeals(status, outbox);
  AnswerCommits(status, outbox);
}

}  // namespace shardmlp
