// A thread that does one job after another.
#pragma once

#include <deque>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/pulse.h"

namespace shardmlp {

// Thread-safe; submitting never blocks.
class JobThread {
 public:
  JobThread();
  ~JobThread();

  void Submit(absl::AnyInvocable<void()> job);
  // Finishes the job that has begun, drops the others and later ones, and joins the thread. Not for a job. Repeats do
  // nothing.
  void Stop();

  // At work while it does a job, unless that says otherwise.
  Pulse& pulse() { return pulse_; }

 private:
  void Run();
  bool JobOrStopped() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopped_ || !jobs_.empty(); }

  Pulse pulse_;
  absl::Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<absl::AnyInvocable<void()>> jobs_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace shardmlp
