// absl::Notification, BlockingCounter and Barrier where tsan sees what they order. See CMakeLists.txt for why.
#include "absl/synchronization/barrier.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace absl {
ABSL_NAMESPACE_BEGIN

Notification::~Notification() { MutexLock lock(&mutex_); }

void Notification::Notify() {
  MutexLock lock(&mutex_);
  notified_yet_.store(true, std::memory_order_release);
}

bool Notification::WaitForNotificationWithDeadline(Time deadline) const {
  const bool notified = mutex_.LockWhenWithDeadline(Condition(this, &Notification::HasBeenNotified), deadline);
  mutex_.Unlock();
  return notified;
}

void Notification::WaitForNotification() const { WaitForNotificationWithDeadline(InfiniteFuture()); }

bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  return WaitForNotificationWithDeadline(Now() + timeout);
}

BlockingCounter::BlockingCounter(int initial_count)
    : count_(initial_count), num_waiting_(0), done_(initial_count == 0) {}

bool BlockingCounter::DecrementCount() {
  MutexLock lock(&lock_);
  done_ = count_.fetch_sub(1) == 1;
  return done_;
}

void BlockingCounter::Wait() {
  MutexLock lock(&lock_);
  lock_.Await(Condition(&done_));
}

bool Barrier::Block() {
  MutexLock lock(&lock_);
  --num_to_block_;
  lock_.Await(Condition(
      +[](int* left) { return *left == 0; }, &num_to_block_));
  return --num_to_exit_ == 0;
}

ABSL_NAMESPACE_END
}  // namespace absl
