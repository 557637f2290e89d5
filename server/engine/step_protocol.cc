#include "server/engine/step_protocol.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/status.h"
#include "server/engine/step_errors.h"

namespace shardmlp {

StepProtocol::StepProtocol(StepDevice& device, StepPeers& peers, Metrics& metrics, std::vector<std::string> tensors,
                           absl::Duration seal_timeout, int64_t first_weights_version, int rank)
    : device_(device),
      peers_(peers),
      metrics_(metrics),
      tensors_(std::move(tensors)),
      seal_timeout_(seal_timeout),
      rank_(rank) {
  position_.weights_version = first_weights_version;
}

std::vector<TrainerStatus> StepProtocol::trainers() const {
  std::vector<TrainerStatus> trainers;
  for (const auto& [session_id, trainer] : trainers_) trainers.push_back({trainer.spec, trainer.sealed});
  std::sort(trainers.begin(), trainers.end(),
            [](const auto& a, const auto& b) { return a.spec.trainer_rank < b.spec.trainer_rank; });
  return trainers;
}

void StepProtocol::AddTrainer(int64_t session_id, const SessionSpec& spec, Outbox& outbox) {
  refused_.erase(session_id);
  // Where none is formed, it comes before the next one.
  const int64_t opened = formed_ ? generation_ : generation_ + 1;
  if (trainers_.try_emplace(session_id, Trainer{.spec = spec, .opened = opened}).second) ProposeReport(outbox);
}

void StepProtocol::RemoveTrainer(int64_t session_id, bool lost, Outbox& outbox) {
  refused_.erase(session_id);
  const auto trainer = trainers_.find(session_id);
  if (trainer == trainers_.end()) return;
  const SessionSpec spec = trainer->second.spec;
  const bool took_part = trainer->second.sealed || !ledger_.RowsOf(session_id).empty();
  const bool in_progress = InProgress() || roll_.InProgress(position_);
  trainers_.erase(trainer);
  // A decided step is applied whoever is left.
  if (phase_ != Phase::kApplying && (took_part || (lost && in_progress))) {
    ProposeEnd(StepOutcome::kAborted,
               absl::StrCat("trainer rank ", spec.trainer_rank, " of run '", spec.run_id, "' ",
                            lost ? "was lost: its lease ended" : "closed its session in mid-step"),
               outbox);
  }
  ProposeReport(outbox);
}

absl::StatusOr<StepProtocol::Trainer*> StepProtocol::FindTrainer(int64_t session_id) {
  if (const auto refused = refused_.find(session_id); refused != refused_.end()) return refused->second;
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
    return StepAborted(absl::StrCat("the attempt is over (", end_reason_, "): ", message), position_);
  }
  return Error(absl::StatusCode::kFailedPrecondition, Reason::kStaleAttempt, message, PositionMetadata(position_));
}

absl::StatusOr<LedgerVerdict> StepProtocol::Admit(const Contribution& contribution, int64_t step, int64_t attempt,
                                                  const std::string& non_finite, Outbox& outbox) {
  SHARDMLP_RETURN_IF_ERROR(CheckOpen(step, attempt));
  const auto trainer = trainers_.find(contribution.session_id);
  if (trainer == trainers_.end()) {
    if (const auto refused = refused_.find(contribution.session_id); refused != refused_.end()) return refused->second;
    return Error(absl::StatusCode::kNotFound, Reason::kUnknownSession,
                 absl::StrCat("session ", contribution.session_id, " ended while its call was open"));
  }
  SHARDMLP_ASSIGN_OR_RETURN(const LedgerVerdict verdict, ledger_.Check(contribution));
  if (verdict == LedgerVerdict::kRepeat) return verdict;
  if (trainer->second.sealed || (phase_ != Phase::kOpen && phase_ != Phase::kRestoring)) {
    return Error(absl::StatusCode::kFailedPrecondition, Reason::kAlreadySealed,
                 absl::StrCat("session ", contribution.session_id, " has sealed step ", step,
                              " and can add no rows to it; got call ", contribution.call_id));
  }
  const bool first = !InProgress();
  ledger_.Mark(contribution);
  if (first) ProposeReport(outbox);
  if (!non_finite.empty() && non_finite_origin_.empty()) {
    non_finite_origin_ = non_finite;
    NoteNonFinite(non_finite, outbox);  // the attempt, once
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

std::string StepProtocol::Missing() const {
  if (formed_) return roll_.Missing(position_);
  const std::string missing = peers_.Missing();
  return absl::StrCat("replicas: ", missing, missing.empty() ? "" : "; ", loss_);
}

void StepProtocol::Seal(const SealSpec& spec, absl::Time now, SealDone done, Outbox& outbox) {
  const absl::StatusOr<Trainer*> trainer = FindTrainer(spec.session_id);
  if (!trainer.ok()) return outbox.Add(std::move(done), absl::StatusOr<SealResult>(trainer.status()));
  if (committed_.has_value() && IsOf(spec, committed_->decision)) {
    return outbox.Add(std::move(done), absl::StatusOr<SealResult>(committed_->sealed));
  }
  absl::Status status = CheckOpen(spec.step, spec.attempt);
  if (status.ok()) status = CheckRows(spec);
  if (!status.ok()) return outbox.Add(std::move(done), absl::StatusOr<SealResult>(status));
  if (sealed_.has_value()) return outbox.Add(std::move(done), absl::StatusOr<SealResult>(*sealed_));
  const bool first = !std::exchange((*trainer)->sealed, true);
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
  if (first) ProposeReport(outbox);
}

void StepProtocol::Commit(const CommitSpec& spec, PositionDone done, Outbox& outbox) {
  const auto answer = [&](absl::StatusOr<StepPosition> result) { outbox.Add(std::move(done), std::move(result)); };
  const absl::StatusOr<Trainer*> trainer = FindTrainer(spec.session_id);
  if (!trainer.ok()) return answer(trainer.status());
  (*trainer)->deciding = false;
  if (committed_.has_value() && IsOf(spec, committed_->decision)) {
    if (!Same(committed_->decision, spec)) return answer(OtherHyperparameters(committed_->decision, spec));
    if (committed_by_all_) return answer(committed_->position);
    return untold_commits_.push_back(std::move(done));
  }
  if (const absl::Status status = CheckOpen(spec.step, spec.attempt); !status.ok()) return answer(status);
  if (decision_ != nullptr && !Same(*decision_, spec)) return answer(OtherHyperparameters(*decision_, spec));
  if (!sealed_.has_value()) {
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
  waiting_commits_.push_back({spec, std::move(done)});
  // The first is decided on; what the others have to say to that is seen then.
  if (waiting_commits_.size() == 1 && decision_ == nullptr) peers_.Propose(spec, outbox);
}

void StepProtocol::Discard(const DiscardSpec& spec, PositionDone done, Outbox& outbox) {
  const auto answer = [&](absl::StatusOr<StepPosition> result) { outbox.Add(std::move(done), std::move(result)); };
  const absl::StatusOr<Trainer*> trainer = FindTrainer(spec.session_id);
  if (!trainer.ok()) return answer(trainer.status());
  (*trainer)->deciding = false;
  if ((committed_.has_value() && IsOf(spec, committed_->decision)) ||
      (decision_ != nullptr && IsOf(spec, *decision_))) {
    return answer(CommittedAlready(spec.step));
  }
  const absl::Status open = CheckOpen(spec.step, spec.attempt);
  if (ReasonOf(open) == Reason::kStepAborted) return answer(Discarded(spec.step));
  if (!open.ok()) return answer(open);
  waiting_discards_.push_back(std::move(done));
  if (waiting_discards_.size() > 1) return;
  ProposeEnd(StepOutcome::kDiscarded,
             absl::StrCat("discarded by trainer rank ", (*trainer)->spec.trainer_rank, ": ", spec.reason), outbox);
}

void StepProtocol::Restore(const CheckpointEdition& checkpoint, PositionDone done, Outbox& outbox) {
  if (!formed_) {
    return outbox.Add(std::move(done), absl::StatusOr<StepPosition>(ReplicasMissing(Missing())));
  }
  waiting_restores_.push_back(std::move(done));
  peers_.Propose(RestoreOrder{checkpoint, position_.weights_version}, outbox);
}

std::optional<StepPosition> StepProtocol::AlreadyRestored(const CheckpointEdition& checkpoint) const {
  if (!IsRestored(rank_, checkpoint) || !(position_ == restored_position_) || InProgress()) return std::nullopt;
  return position_;
}

void StepProtocol::ProposeReport(Outbox& outbox) {
  if (!formed_) return;
  TrainerReport report;
  report.step = position_.step;
  report.attempt = position_.attempt;
  report.in_progress = InProgress();
  report.non_finite_origin = non_finite_origin_;
  for (const auto& [session_id, trainer] : trainers_) {
    report.run_id = trainer.spec.run_id;
    report.trainer_count = trainer.spec.trainer_count;
    report.sealed[trainer.spec.trainer_rank] = trainer.sealed;
    report.opened[trainer.spec.trainer_rank] = trainer.opened;
    report.committed |= trainer.committed;
    for (const auto& [layer, rows] : ledger_.RowsOf(session_id)) report.rows[layer] += rows;
  }
  peers_.Propose(report, outbox);
}

void StepProtocol::ProposeEnd(StepOutcome outcome, const std::string& reason, Outbox& outbox) {
  const AttemptEnd end{position_.step, position_.attempt, outcome, reason};
  if (formed_) {
    peers_.Propose(end, outbox);
  } else {
    owed_end_ = end;
  }
}

bool StepProtocol::InProgress() const {
  return !ledger_.empty() || !waiting_seals_.empty() || (phase_ != Phase::kOpen && phase_ != Phase::kRestoring) ||
         std::any_of(trainers_.begin(), trainers_.end(), [](const auto& entry) { return entry.second.sealed; });
}

bool StepProtocol::Deciding() const {
  return phase_ != Phase::kOpen || !waiting_commits_.empty() || !untold_commits_.empty() ||
         std::any_of(trainers_.begin(), trainers_.end(), [](const auto& entry) { return entry.second.deciding; });
}

void StepProtocol::HandBack(const std::string& why, Outbox& outbox) {
  if (CanHandBack()) ProposeEnd(StepOutcome::kAborted, why, outbox);
}

bool StepProtocol::RunUnderWay(int64_t session_id) const {
  return roll_.CommittedElsewhere(rank_) || std::any_of(trainers_.begin(), trainers_.end(), [&](const auto& entry) {
           return entry.first != session_id && entry.second.committed;
         });
}

bool StepProtocol::Idle() const {
  return formed_ && phase_ == Phase::kOpen && !InProgress() && !roll_.InProgress(position_);
}

void StepProtocol::ExpireSeals(absl::Time now, Outbox& outbox) {
  if (undecided_) {
    if (!decisions_deadline_.has_value()) decisions_deadline_ = now + seal_timeout_;
    if (*decisions_deadline_ <= now) {
      AnswerCommits(ReplicasMissing(Missing()), outbox);
      Answer(waiting_discards_, ReplicasMissing(Missing()), outbox);
      decisions_deadline_.reset();
    }
  } else if (phase_ != Phase::kOpen) {
    return;  // nobody is missing, and the device will answer
  }
  const auto expired = std::stable_partition(waiting_seals_.begin(), waiting_seals_.end(),
                                             [now](const WaitingSeal& seal) { return seal.deadline > now; });
  for (auto seal = expired; seal != waiting_seals_.end(); ++seal) {
    outbox.Add(std::move(seal->done),
               absl::StatusOr<SealResult>(
                   Error(absl::StatusCode::kUnavailable, formed_ ? Reason::kTrainerMissing : Reason::kReplicaMissing,
                         absl::StrCat("not every trainer sealed step ", position_.step, " within ",
                                      absl::FormatDuration(seal_timeout_), "; missing: ", Missing()),
                         {{"missing", Missing()}})));
  }
  waiting_seals_.erase(expired, waiting_seals_.end());
}

void StepProtocol::Stop(const absl::Status& status, Outbox& outbox) {
  AnswerSeals(status, outbox);
  AnswerCommits(status, outbox);
  for (auto* waiting : {&untold_commits_, &waiting_discards_, &waiting_restores_}) Answer(*waiting, status, outbox);
}

}  // namespace shardmlp
