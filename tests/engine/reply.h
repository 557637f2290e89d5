// An answer that comes later, from another thread.
#pragma once

#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "gtest/gtest.h"

namespace shardmlp::testing {

// Thread-safe. Fails the test where the answer comes twice.
template <typename T>
class Reply {
 public:
  // What is to be called with the answer; once.
  absl::AnyInvocable<void(absl::StatusOr<T>)> done() {
    return [state = state_](absl::StatusOr<T> result) {
      absl::MutexLock lock(&state->mutex);
      EXPECT_FALSE(state->answered) << "answered twice";
      state->result = std::move(result);
      state->answered = true;
    };
  }
  bool answered() const {
    absl::MutexLock lock(&state_->mutex);
    return state_->answered;
  }
  absl::StatusOr<T> Wait() const {
    absl::MutexLock lock(&state_->mutex);
    state_->mutex.Await(absl::Condition(&state_->answered));
    return state_->result;
  }

 private:
  struct State {
    absl::Mutex mutex;
    bool answered ABSL_GUARDED_BY(mutex) = false;
    absl::StatusOr<T> result ABSL_GUARDED_BY(mutex) = absl::UnknownError("not answered");
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace shardmlp::testing
