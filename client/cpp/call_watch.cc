#include "client/cpp/call_watch.h"

#include "absl/strings/str_cat.h"
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

bool CallWatch::AwaitFinishedOrStall(absl::Duration stall_timeout) {
  int64_t seen = progress_.load(std::memory_order_relaxed);
  int quiet = 0;
  while (!AwaitFinished(stall_timeout / kLooks)) {
    const int64_t now = progress_.load(std::memory_order_relaxed);
    quiet = now == seen ? quiet + 1 : 0;
    seen = now;
    if (quiet == kLooks) return false;
  }
  return true;
}

absl::Status CallWatch::Await(grpc::ClientContext& context, Connection& connection, absl::Duration stall_timeout) {
  if (!AwaitFinishedOrStall(stall_timeout)) {
    context.TryCancel();
    if (!AwaitFinished(kCancelGrace)) {
      connection.Break();
      AwaitFinished(absl::InfiniteDuration());
    }
    return Error(absl::StatusCode::kDeadlineExceeded, Reason::kStalled,
                 absl::StrCat("no message went or came for ", absl::FormatDuration(stall_timeout)));
  }
  absl::MutexLock lock(&mutex_);
  return FromGrpcStatus(status_);
}

}  // namespace shardmlp
