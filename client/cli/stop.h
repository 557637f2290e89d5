// Ctrl-C that ends what is under way, and not the program.
#pragma once

#include "absl/time/time.h"

namespace shardmlp {

// From now on the first SIGINT or SIGTERM is noted, and the second ends the program as ever.
void NoteStopSignals();
// Whether one was noted. Thread-safe, and cheap.
bool StopSignalled();
// Waits until then; false where a signal came first. Thread-safe.
bool SleepUnlessStopped(absl::Time until);

}  // namespace shardmlp
