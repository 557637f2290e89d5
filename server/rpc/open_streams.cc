#include "server/rpc/open_streams.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "server/rpc/shard_stream.h"

namespace shardmlp {

OpenStreams::OpenStreams(absl::Duration stall_timeout)
    : stall_timeout_(stall_timeout),
      check_interval_(std::clamp(stall_timeout / 4, absl::Milliseconds(10), absl::Seconds(1))),
      loan_(nullptr, [returned = loans_returned_](std::nullptr_t) { returned->Notify(); }),
      thread_([this] { Run(); }) {}

OpenStreams::~OpenStreams() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void OpenStreams::Add(std::shared_ptr<OpenStream> stream) {
  std::optional<absl::Status> ending;
  {
    absl::MutexLock lock(&mutex_);
    streams_.insert(stream);
    ending = ending_;
  }
  if (ending.has_value()) stream->Stop(*ending);
}

void OpenStreams::Remove(const std::shared_ptr<OpenStream>& stream) {
  absl::MutexLock lock(&mutex_);
  streams_.erase(stream);
}

void OpenStreams::Wake(std::shared_ptr<ShardStream> stream) {
  absl::MutexLock lock(&mutex_);
  woken_.push_back(std::move(stream));
}

void OpenStreams::EndAll(const absl::Status& status) {
  std::vector<std::shared_ptr<OpenStream>> streams;
  {
    absl::MutexLock lock(&mutex_);
    ending_ = status;
    streams.assign(streams_.begin(), streams_.end());
  }
  for (const auto& stream : streams) stream->Stop(status);
}

bool OpenStreams::AwaitNone(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  const auto none = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return streams_.empty(); };
  return mutex_.AwaitWithDeadline(absl::Condition(&none), deadline);
}

bool OpenStreams::AwaitLoans(absl::Time deadline) {
  loan_.reset();
  return loans_returned_->WaitForNotificationWithDeadline(deadline);
}

void OpenStreams::Run() {
  const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || !woken_.empty(); };
  absl::Time next_check = absl::Now() + check_interval_;
  while (true) {
    std::vector<std::shared_ptr<ShardStream>> woken;
    std::vector<std::shared_ptr<OpenStream>> checked;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithDeadline(absl::Condition(&has_work), next_check);
      if (stopping_) return;
      woken.swap(woken_);
      if (absl::Now() >= next_check) {
        checked.assign(streams_.begin(), streams_.end());
        next_check = absl::Now() + check_interval_;
      }
    }
    for (const auto& stream : woken) stream->Drive();
    for (const auto& stream : checked) stream->CheckStall(absl::Now());
  }
}

}  // namespace shardmlp
