#include "client/cpp/call_watch.h"

#include <algorithm>

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

void CallWatch::Finish(const grpc::Status& status) {
  absl::MutexLock lock(&mutex_);
  finished_ = true;
  status_ = status;
}

bool CallWatch::AwaitFinished(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithTimeout(absl::Condition(&finished_), timeout);
}

absl::Status CallWatch::AwaitFinishedOrCause(absl::Duration stall_timeout, const std::function<bool()>& interrupted) {
  int64_t seen = progress_.load(std::memory_order_relaxed);
  absl::Time moved = absl::Now();
  while (!AwaitFinished(std::min(stall_timeout / kLooks, kInterruptInterval))) {
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
                              const std::function<bool()>& interrupted) {
  if (absl::Status cause = AwaitFinishedOrCause(stall_timeout, interrupted); !cause.ok()) {
    context.TryCancel();
    if (!AwaitFinished(kCancelGrace)) {
      connection.Break();
      AwaitFinished(absl::InfiniteDuration());
    }
    return cause;
  }
  absl::MutexLock lock(&mutex_);
  return FromGrpcStatus(status_);
}

}  // namespace shardmlp
