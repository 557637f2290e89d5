#include "client/cli/stop.h"

#include <atomic>
#include <csignal>

namespace shardmlp {
namespace {

std::atomic<bool> signalled = false;
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

}  // namespace shardmlp
