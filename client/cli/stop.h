// Ctrl-C that ends what is under way, and not the program.
#pragma once

namespace shardmlp {

// From now on the first SIGINT or SIGTERM is noted, and the second ends the program as ever.
void NoteStopSignals();
// Whether one was noted. Thread-safe, and cheap.
bool StopSignalled();

}  // namespace shardmlp
