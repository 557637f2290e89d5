#include "server/sync/rendezvous/loop.h"

#include <chrono>
#include <utility>

#include "absl/synchronization/notification.h"

namespace shardmlp {

absl::Time SteadyNow() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

Loop::Loop(absl::Duration pace, Task tick) : pace_(pace), tick_(std::move(tick)), thread_([this] { Work(); }) {}

Loop::~Loop() {
  {
    absl::MutexLock lock(&mutex_);
    ends_ = true;
  }
  thread_.join();
}

void Loop::Post(Task task) {
  absl::MutexLock lock(&mutex_);
  tasks_.push_back(std::move(task));
}

void Loop::Run(absl::FunctionRef<void()> task) {
  if (thread_.get_id() == std::this_thread::get_id()) return task();
  absl::Notification done;
  Post([&] {
    task();
    done.Notify();
  });
  done.WaitForNotification();
}

void Loop::Work() {
  absl::Time next_tick = SteadyNow() + pace_;
  while (true) {
    std::deque<Task> tasks;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithTimeout(absl::Condition(this, &Loop::HasWork), next_tick - SteadyNow());
      if (tasks_.empty() && ends_) return;
      tasks.swap(tasks_);
    }
    for (Task& task : tasks) task();
    if (const absl::Time now = SteadyNow(); now >= next_tick) {
      tick_();
      next_tick = now + pace_;
    }
  }
}

}  // namespace shardmlp
