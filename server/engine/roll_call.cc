#include "server/engine/roll_call.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

absl::Status Conflict(const std::string& message) {
  return Error(absl::StatusCode::kFailedPrecondition, Reason::kRunConflict, message);
}

}  // namespace

void RollCall::Begin(const std::vector<int>& replicas) {
  reports_.clear();
  reported_.clear();
  for (const int replica : replicas) reported_[replica] = false;
}

std::vector<RollCall::Refusal> RollCall::Take(int from, TrainerReport report) {
  std::vector<Refusal> refused = LetMove(from, report);
  for (auto trainer = report.sealed.begin(); trainer != report.sealed.end();) {
    const int rank = trainer->first;
    const absl::Status status =
        Check(from, {report.run_id, SessionRole::kTrain, report.trainer_count, rank, /*opening_id=*/0});
    if (!status.ok()) refused.push_back({from, rank, status});
    trainer = status.ok() ? std::next(trainer) : report.sealed.erase(trainer);
  }
  reports_[from] = std::move(report);
  reported_[from] = true;
  return refused;
}

std::vector<RollCall::Refusal> RollCall::LetMove(int from, const TrainerReport& report) {
  std::vector<Refusal> refused;
  for (auto& [replica, other] : reports_) {
    if (replica == from || other.run_id != report.run_id) continue;
    for (const auto& [rank, opened] : report.opened) {
      if (!other.sealed.contains(rank) || other.opened[rank] >= opened) continue;
      other.sealed.erase(rank);
      refused.push_back({replica, rank,
                         Conflict(absl::StrCat("rank ", rank, " of run '", report.run_id, "' has moved from replica ",
                                               replica, " to replica ", from))});
    }
  }
  return refused;
}

absl::Status RollCall::Check(int at, const SessionSpec& trainer) const {
  for (const auto& [replica, report] : reports_) {
    if (replica == at || report.sealed.empty()) continue;
    if (report.run_id != trainer.run_id) {
      return Conflict(absl::StrCat("run '", report.run_id, "' trains at replica ", replica, "; run '", trainer.run_id,
                                   "' has to wait until it has closed its sessions"));
    }
    if (report.trainer_count != trainer.trainer_count) {
      return Conflict(absl::StrCat("run '", trainer.run_id, "' has ", report.trainer_count, " trainers at replica ",
                                   replica, ", got a trainer_count of ", trainer.trainer_count));
    }
    if (report.sealed.contains(trainer.trainer_rank)) {
      return Conflict(absl::StrCat("rank ", trainer.trainer_rank, " of run '", trainer.run_id, "' is at replica ",
                                   replica, " already"));
    }
  }
  return absl::OkStatus();
}

int RollCall::trainer_count() const {
  for (const auto& [replica, report] : reports_) {
    if (!report.sealed.empty()) return report.trainer_count;
  }
  return 0;
}

std::map<int, bool> RollCall::Sealed(const StepPosition& open) const {
  std::map<int, bool> all;
  for (const auto& [replica, report] : reports_) {
    for (const auto& [rank, sealed] : report.sealed) all[rank] = sealed && IsOf(report, open);
  }
  return all;
}

bool RollCall::AllReported() const {
  return std::all_of(reported_.begin(), reported_.end(), [](const auto& entry) { return entry.second; });
}

bool RollCall::AllSealed(const StepPosition& open) const {
  const std::map<int, bool> sealed = Sealed(open);
  if (!AllReported() || sealed.empty() || static_cast<int>(sealed.size()) < trainer_count()) return false;
  return std::all_of(sealed.begin(), sealed.end(), [](const auto& entry) { return entry.second; });
}

bool RollCall::InProgress(const StepPosition& open) const {
  return std::any_of(reports_.begin(), reports_.end(),
                     [&](const auto& entry) { return entry.second.in_progress && IsOf(entry.second, open); });
}

void RollCall::Committed() {
  for (auto& [replica, report] : reports_) report.committed = !report.sealed.empty();
}

bool RollCall::CommittedElsewhere(int at) const {
  return std::any_of(reports_.begin(), reports_.end(),
                     [at](const auto& entry) { return entry.first != at && entry.second.committed; });
}

std::string RollCall::Missing(const StepPosition& open) const {
  const std::map<int, bool> sealed = Sealed(open);
  if (sealed.empty()) return "every trainer (not connected)";
  std::vector<std::string> missing;
  for (int rank = 0; rank < trainer_count(); ++rank) {
    if (!sealed.contains(rank)) {
      missing.push_back(absl::StrCat("rank ", rank, " (not connected)"));
    } else if (!sealed.at(rank)) {
      missing.push_back(absl::StrCat("rank ", rank));
    }
  }
  for (const auto& [replica, reported] : reported_) {
    if (!reported) missing.push_back(absl::StrCat("the trainers of replica ", replica));
  }
  return absl::StrJoin(missing, ", ");
}

LayerRows RollCall::RowsOf(const StepPosition& open) const {
  LayerRows all;
  for (const auto& [replica, report] : reports_) {
    if (!IsOf(report, open)) continue;
    for (const auto& [layer, rows] : report.rows) all[layer] += rows;
  }
  return all;
}

std::string RollCall::NonFiniteOrigin(const StepPosition& open) const {
  for (const auto& [replica, report] : reports_) {
    if (IsOf(report, open) && !report.non_finite_origin.empty()) return report.non_finite_origin;
  }
  return "";
}

}  // namespace shardmlp
