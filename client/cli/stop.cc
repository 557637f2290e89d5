#include "client/cli/stop.h"

#include <algorithm>
#include <atomic>
#include <csignal>

#include "absl/time/clock.h"

namespace shardmlp {
namespace {

std::atomic<bool> signalled = false;
constexpr absl::Duration kLook = absl::Milliseconds(50);
static_assert(std::atomic<bool>::is_always_lock_free);

}  // namespace

void NoteStopSignals() {
  struct sigaction action = {};
  action.sa_handler = [](int) { signalled = true; };
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool StopSignalled() { return signalled; }

bool SleepUnlessStopped(absl::Time until) {
  for (absl::Time now = absl::Now(); now < until && !StopSignalled(); now = absl::Now()) {
    absl::SleepFor(std::min(until - now, kLook));
  }
  return !StopSignalled();
}

}  // namespace shardmlp
