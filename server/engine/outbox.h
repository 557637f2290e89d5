// Answers that were decided under a lock and are given after it.
#pragma once

#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"

namespace shardmlp {

// Declare it ahead of the lock, so that it delivers once the lock is released.
class Outbox {
 public:
  Outbox() = default;
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;
  ~Outbox() {
    for (auto& answer : answers_) answer();
  }

  template <typename Callback, typename Result>
  void Add(Callback done, Result result) {
    answers_.push_back([done = std::move(done), result = std::move(result)]() mutable { done(std::move(result)); });
  }

 private:
  std::vector<absl::AnyInvocable<void()>> answers_;
};

}  // namespace shardmlp
