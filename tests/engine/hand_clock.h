// Time that passes when the test says so.
#pragma once

#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace shardmlp::testing {

// Thread-safe.
class HandClock {
 public:
  // For EngineOptions::clock; may outlive this.
  std::function<absl::Time()> reader() const {
    return [state = state_] {
      absl::MutexLock lock(&state->mutex);
      return state->now;
    };
  }
  void Advance(absl::Duration duration) {
    absl::MutexLock lock(&state_->mutex);
    state_->now += duration;
  }

 private:
  struct State {
    absl::Mutex mutex;
    absl::Time now ABSL_GUARDED_BY(mutex) = absl::FromUnixSeconds(1'000'000);
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace shardmlp::testing
