// What was decided under a lock and is done after it: answers above all.
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
    for (auto& action : actions_) action();
  }

  template <typename Callback, typename Result>
  void Add(Callback done, Result result) {
    Do([done = std::move(done), result = std::move(result)]() mutable { done(std::move(result)); });
  }
  void Do(absl::AnyInvocable<void()> action) { actions_.push_back(std::move(action)); }

 private:
  std::vector<absl::AnyInvocable<void()>> actions_;
};

}  // namespace shardmlp
