// One thread that does what others post to it.
#pragma once

#include <deque>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace shardmlp {

// Time that nobody sets: good for differences alone.
absl::Time SteadyNow();

// Thread-safe.
class Loop {
 public:
  using Task = absl::AnyInvocable<void()>;

  // Calls `tick` on the thread at this pace, too.
  explicit Loop(
      absl::Duration pace = absl::InfiniteDuration(), Task tick = [] {});
  // Returns once all that was posted is done. To be called on another thread.
  ~Loop();

  // Tasks run in order.
  void Post(Task task);
  // Returns once `task` has run; at once where this is the thread.
  void Run(absl::FunctionRef<void()> task);

 private:
  void Work();
  bool HasWork() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return ends_ || !tasks_.empty(); }

  const absl::Duration pace_;
  Task tick_;  // the thread's
  absl::Mutex mutex_;
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace shardmlp
