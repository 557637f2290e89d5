#include "server/engine/session_table.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr int kMaxTrainers = 4096;
constexpr size_t kMaxRunIdBytes = 128;

absl::Status Invalid(const std::string& message) {
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, message);
}

absl::Status CheckTrainer(const SessionSpec& spec) {
  if (spec.run_id.empty() || spec.run_id.size() > kMaxRunIdBytes) {
    return Invalid(absl::StrCat("run_id has ", spec.run_id.size(), " bytes; expected 1 to ", kMaxRunIdBytes));
  }
  if (spec.trainer_count < 1 || spec.trainer_count > kMaxTrainers) {
    return Invalid(absl::StrCat("trainer_count is ", spec.trainer_count, "; expected 1 to ", kMaxTrainers));
  }
  if (spec.trainer_rank < 0 || spec.trainer_rank >= spec.trainer_count) {
    return Invalid(absl::StrCat("trainer_rank is ", spec.trainer_rank, "; expected 0 to ", spec.trainer_count - 1));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<int64_t> SessionTable::Open(const SessionSpec& spec, absl::Time now) {
  if (const int64_t open = FindOpening(spec); open != 0) {
    sessions_[open].lease_end = now + limits_.lease;
    return open;
  }
  if (spec.role == SessionRole::kTrain) {
    SHARDMLP_RETURN_IF_ERROR(CheckTrainer(spec));
    if (!limits_.frozen) SHARDMLP_RETURN_IF_ERROR(CheckRun(spec, now));
  }
  if (static_cast<int64_t>(sessions_.size()) >= limits_.max_sessions) {
    return Error(absl::StatusCode::kResourceExhausted, Reason::kTooManySessions,
                 absl::StrCat("all ", limits_.max_sessions, " sessions that may be open are open"));
  }
  if (spec.role == SessionRole::kRead && Count(SessionRole::kRead) >= limits_.max_readers) {
    return Error(absl::StatusCode::kResourceExhausted, Reason::kTooManySessions,
                 absl::StrCat("all ", limits_.max_readers, " read sessions that may be open are open; the rest of the ",
                              limits_.max_sessions, " sessions is kept for trainers"));
  }
  int64_t session_id = 0;
  do {
    session_id = absl::Uniform<int64_t>(random_, 1, std::numeric_limits<int64_t>::max());
  } while (sessions_.contains(session_id));
  sessions_[session_id] = {spec, now + limits_.lease, 0};
  return session_id;
}

// 0 where there is none.
int64_t SessionTable::FindOpening(const SessionSpec& spec) const {
  if (spec.opening_id == 0) return 0;
  for (const auto& [id, session] : sessions_) {
    const SessionSpec& other = session.spec;
    if (other.opening_id == spec.opening_id && other.run_id == spec.run_id && other.role == spec.role &&
        other.trainer_rank == spec.trainer_rank) {
      return id;
    }
  }
  return 0;
}

absl::Status SessionTable::CheckRun(const SessionSpec& spec, absl::Time now) const {
  for (const auto& [id, session] : sessions_) {
    const SessionSpec& other = session.spec;
    if (other.role != SessionRole::kTrain) continue;
    const std::string until = absl::StrCat(
        session.open_calls > 0 ? "it has a call open"
                               : absl::StrCat("its lease ends in ", absl::FormatDuration(session.lease_end - now)));
    if (other.run_id != spec.run_id) {
      return Error(
          absl::StatusCode::kFailedPrecondition, Reason::kRunConflict,
          absl::StrCat("run '", other.run_id, "' trains here; run '", spec.run_id,
                       "' has to wait until it has closed its sessions (rank ", other.trainer_rank, ": ", until, ")"),
          {{"run_id", other.run_id}});
    }
    if (other.trainer_count != spec.trainer_count) {
      return Error(absl::StatusCode::kFailedPrecondition, Reason::kRunConflict,
                   absl::StrCat("run '", spec.run_id, "' has ", other.trainer_count,
                                " trainers, got a trainer_count of ", spec.trainer_count));
    }
    if (other.trainer_rank == spec.trainer_rank) {
      return Error(absl::StatusCode::kFailedPrecondition, Reason::kRunConflict,
                   absl::StrCat("rank ", spec.trainer_rank, " of run '", spec.run_id, "' is here already; ", until));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<SessionSpec> SessionTable::Find(int64_t session_id, absl::Time now) {
  const auto session = sessions_.find(session_id);
  if (session == sessions_.end()) {
    return Error(absl::StatusCode::kNotFound, Reason::kUnknownSession,
                 absl::StrCat("session ", session_id,
                              " is not open: it was never opened here, was closed, or its lease "
                              "of ",
                              absl::FormatDuration(limits_.lease), " ended without a sign of it"));
  }
  session->second.lease_end = now + limits_.lease;
  return session->second.spec;
}

bool SessionTable::Close(int64_t session_id) { return sessions_.erase(session_id) > 0; }

void SessionTable::CallOpened(int64_t session_id) {
  const auto session = sessions_.find(session_id);
  if (session != sessions_.end()) ++session->second.open_calls;
}

void SessionTable::CallClosed(int64_t session_id, absl::Time now) {
  const auto session = sessions_.find(session_id);
  if (session == sessions_.end()) return;
  --session->second.open_calls;
  session->second.lease_end = now + limits_.lease;
}

std::vector<int64_t> SessionTable::Expire(absl::Time now) {
  std::vector<int64_t> expired;
  for (const auto& [id, session] : sessions_) {
    if (session.open_calls == 0 && session.lease_end <= now) expired.push_back(id);
  }
  for (const int64_t id : expired) sessions_.erase(id);
  return expired;
}

int64_t SessionTable::Count(SessionRole role) const {
  int64_t count = 0;
  for (const auto& [id, session] : sessions_) count += session.spec.role == role ? 1 : 0;
  return count;
}

}  // namespace shardmlp
