// Whether a thread that others wait for goes on: it says what it is at, and somebody watches how long it is at one
// thing.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

#include "absl/time/time.h"

namespace shardmlp {

// Of one thread. Any may read it.
class Pulse {
 public:
  enum class At {
    kNothing,
    kWork,
    kFiles,     // a checkpoint's, which take as long as the disk does
    kReplicas,  // waits for what another replica has to do, or another thread of this one
  };

  // The thread is at something, and then again at what it was at before. Made and destroyed by the thread itself.
  class Scope {
   public:
    Scope(Pulse& pulse, At at) : pulse_(pulse), before_(pulse.at()) { pulse_.Beat(at); }
    ~Scope() { pulse_.Beat(before_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Pulse& pulse_;
    const At before_;
  };

  At at() const { return static_cast<At>(state_.load() % kKinds); }
  // Another with each beat.
  int64_t state() const { return state_.load(); }

 private:
  static constexpr int64_t kKinds = 4;

  void Beat(At at) { state_ = (state_ / kKinds + 1) * kKinds + static_cast<int64_t>(at); }

  std::atomic<int64_t> state_ = 0;
};

// How long a thread has been at one thing, for one who looks now and then.
class Stillness {
 public:
  // A look counts for no more than `most`: clocks jump.
  absl::Duration Look(const Pulse& pulse, absl::Time now, absl::Duration most) {
    const int64_t state = pulse.state();
    const absl::Duration passed = std::min(now - std::exchange(looked_, now), most);
    stood_ = std::exchange(state_, state) == state ? stood_ + passed : absl::ZeroDuration();
    return stood_;
  }

 private:
  int64_t state_ = -1;
  absl::Time looked_;
  absl::Duration stood_;
};

}  // namespace shardmlp
