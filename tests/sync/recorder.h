// An observer that writes down what it hears.
#pragma once

#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/sync/replicas.h"

namespace shardmlp::testing {

// "formed 3: ranks 0 2, from rank 2", "0: hello from 1", "stable 0", "lost: rank 1 was lost", or "cut off, lost: ..."
// where it may not have heard all, "refused: ...". Thread-safe.
class Recorder final : public ReplicaObserver {
 public:
  void Formed(const Generation& generation) override {
    absl::MutexLock lock(&mutex_);
    generation_ = generation;
    std::string ranks;
    for (const ReplicaMember& member : generation.members) absl::StrAppend(&ranks, " ", member.rank);
    events_.push_back(absl::StrCat("formed ", generation.number, ": ranks", ranks, ", from rank ",
                                   generation.members[generation.source].rank));
  }
  void Agreed(int64_t index, int from_rank, const std::string& message) override {
    Add(absl::StrCat(index, ": ", message, " from ", from_rank));
  }
  void Stable(int64_t index) override { Add(absl::StrCat("stable ", index)); }
  void Lost(const absl::Status& why, bool heard_all) override {
    absl::MutexLock lock(&mutex_);
    lost_ = why;
    events_.push_back(absl::StrCat(heard_all ? "" : "cut off, ", "lost: ", why.message()));
  }
  void Refused(const absl::Status& why) override {
    absl::MutexLock lock(&mutex_);
    refused_ = why;
    events_.push_back(absl::StrCat("refused: ", why.message()));
  }

  // What was heard since the last call.
  std::vector<std::string> Take() {
    absl::MutexLock lock(&mutex_);
    return std::exchange(events_, {});
  }
  std::vector<std::string> events() const {
    absl::MutexLock lock(&mutex_);
    return events_;
  }
  // The last one that was formed.
  Generation generation() const {
    absl::MutexLock lock(&mutex_);
    return generation_;
  }
  absl::Status lost() const {
    absl::MutexLock lock(&mutex_);
    return lost_;
  }
  absl::Status refused() const {
    absl::MutexLock lock(&mutex_);
    return refused_;
  }
  // Waits until an event holds `text`. False after a minute without.
  bool Hears(const std::string& text) const {
    absl::MutexLock lock(&mutex_);
    const auto heard = [&] {
      mutex_.AssertReaderHeld();
      for (const std::string& event : events_) {
        if (event.find(text) != std::string::npos) return true;
      }
      return false;
    };
    return mutex_.AwaitWithTimeout(absl::Condition(&heard), absl::Minutes(1));
  }

 private:
  void Add(std::string event) {
    absl::MutexLock lock(&mutex_);
    events_.push_back(std::move(event));
  }

  mutable absl::Mutex mutex_;
  std::vector<std::string> events_ ABSL_GUARDED_BY(mutex_);
  Generation generation_ ABSL_GUARDED_BY(mutex_);
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  absl::Status refused_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardmlp::testing
