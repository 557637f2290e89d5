#include "server/engine/job_thread.h"

#include <utility>

namespace shardmlp {

JobThread::JobThread() : thread_([this] { Run(); }) {}

JobThread::~JobThread() { Stop(); }

void JobThread::Submit(absl::AnyInvocable<void()> job) {
  absl::MutexLock lock(&mutex_);
  if (!stopped_) jobs_.push_back(std::move(job));
}

void JobThread::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void JobThread::Run() {
  while (true) {
    absl::AnyInvocable<void()> job;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &JobThread::JobOrStopped));
      if (stopped_) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    const Pulse::Scope works(pulse_, Pulse::At::kWork);
    job();
  }
}

}  // namespace shardmlp
