// How a client connects, waits and retries.
#pragma once

#include <functional>

#include "absl/time/time.h"

namespace shardmlp {

struct RetryOptions {
  absl::Duration budget = absl::Seconds(60);                 // from the first failure of a call to giving up
  absl::Duration initial_backoff = absl::Milliseconds(100);  // doubled by each failure, less up to half at random
  absl::Duration max_backoff = absl::Seconds(5);
};

struct ClientOptions {
  int connections = 1;  // calls take them in turn
  absl::Duration connect_timeout = absl::Seconds(10);
  // A call that neither sends nor gets a message for so long fails. Memory of the caller's that is still in a stopped
  // server's connection is waited for, which takes kKeepaliveTimeout (proto/http2.h) more at most.
  absl::Duration stall_timeout = absl::Seconds(120);
  absl::Duration seal_timeout = absl::Minutes(10);  // SealStep, CommitStep and DiscardStep; above the server's own
  absl::Duration checkpoint_timeout = absl::Minutes(30);
  RetryOptions retry = {};
  // Asked every kInterruptInterval by each thread that waits in a call, with no lock held. True ends the call, which
  // then fails with CANCELLED (CANCELLED) where it had not ended by itself. Empty: nothing interrupts.
  std::function<bool()> interrupted = {};
};

inline constexpr absl::Duration kInterruptInterval = absl::Milliseconds(100);

}  // namespace shardmlp
