#include "client/cpp/call_watch.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/retry.h"
#include "kernels/status.h"
#include "proto/status_bridge.h"

namespace shardmlp {
namespace {

// Looks at progress so often in a stall time-out; waking for each message would cost more.
constexpr int kLooks = 4;

}  // namespace

void CallWatch::Notify() {
  absl::MutexLock lock(&mutex_);
  news_ = true;
}

void CallWatch::Finish(const grpc::Status& status) {
  absl::MutexLock lock(&mutex_);
  finished_ = true;
  status_ = status;
}

bool CallWatch::AwaitFinished(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithTimeout(absl::Condition(&finished_), timeout);
}

CallWatch::Seen CallWatch::AwaitNews(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(this, &CallWatch::finished_or_news), timeout);
  if (finished_) return Seen::kFinished;
  return std::exchange(news_, false) ? Seen::kNews : Seen::kNothing;
}

absl::Status CallWatch::AwaitFinishedOrCause(absl::Duration stall_timeout, const std::function<bool()>& interrupted,
                                             const std::function<absl::Status()>& on_news) {
  int64_t seen = progress_.load(std::memory_order_relaxed);
  absl::Time moved = absl::Now();
  for (Seen what; (what = AwaitNews(std::min(stall_timeout / kLooks, kInterruptInterval))) != Seen::kFinished;) {
    if (what == Seen::kNews) SHARDMLP_RETURN_IF_ERROR(on_news());
    if (interrupted && interrupted()) return Interrupted();
    const int64_t now = progress_.load(std::memory_order_relaxed);
    if (now != seen) {
      seen = now;
      moved = absl::Now();
    } else if (absl::Now() - moved >= stall_timeout) {
      return Error(absl::StatusCode::kDeadlineExceeded, Reason::kStalled,
                   absl::StrCat("no message went or came for ", absl::FormatDuration(stall_timeout)));
    }
  }
  return absl::OkStatus();
}

absl::Status CallWatch::Await(grpc::ClientContext& context, Connection& connection, absl::Duration stall_timeout,
                              const std::function<bool()>& interrupted, const std::function<absl::Status()>& on_news) {
  if (absl::Status cause = AwaitFinishedOrCause(stall_timeout, interrupted, on_news); !cause.ok()) {
    Cancel(context, connection);
    return cause;
  }
  absl::MutexLock lock(&mutex_);
  return FromGrpcStatus(status_);
}

void CallWatch::Cancel(grpc::ClientContext& context, Connection& connection) {
  context.TryCancel();
  if (AwaitFinished(kCancelGrace)) return;
  connection.Break();
  AwaitFinished(absl::InfiniteDuration());
}

}  // namespace shardmlp
