// How a client connects, waits and retries.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/time/time.h"
#include "proto/client_times.h"
#include "proto/http2.h"

namespace shardmlp {

struct RetryOptions {
  absl::Duration budget = kClientRetryBudget;                // from the first failure of a call to giving up
  absl::Duration initial_backoff = absl::Milliseconds(100);  // doubled by each failure, less up to half at random
  absl::Duration max_backoff = absl::Seconds(5);
};

// How a client and a server know each other: names of PEM files, which are read for each connection, and of a token's,
// which is read for each call. A Unix socket takes no TLS.
struct ClientCredentials {
  std::string ca_file = {};      // of the CA that the server's certificate comes from; empty: no TLS
  std::string cert_file = {};    // the client's own certificate, for a server that wants one; with its key
  std::string key_file = {};     // of cert_file
  std::string server_name = {};  // that the server's certificate names; empty: the target's host
  std::string token_file = {};   // its first line goes with every call
};

struct ClientOptions {
  int connections = 1;      // calls take them in turn
  int64_t shard_bytes = 0;  // of a message, about; 0: as the server prefers
  absl::Duration connect_timeout = absl::Seconds(10);
  // A call that neither sends nor gets a message for so long fails. Memory of the caller's that is still in a stopped
  // server's connection is waited for, which takes kKeepaliveTimeout (proto/http2.h) more at most.
  absl::Duration stall_timeout = kClientStallTimeout;
  absl::Duration seal_timeout = kClientSealTimeout;  // SealStep, CommitStep and DiscardStep; above the server's own
  absl::Duration checkpoint_timeout = absl::Minutes(30);
  RetryOptions retry = {};
  ClientCredentials credentials = {};
  // Asked every kInterruptInterval by each thread that waits in a call, with no lock held. True ends the call, which
  // then fails with CANCELLED (CANCELLED) where it had not ended by itself. Empty: nothing interrupts.
  std::function<bool()> interrupted = {};
  // Asked after each failure of a call that would be sent again, by the thread that waits in it, with no lock held.
  // True ends the tries: the call fails with UNAVAILABLE (UNREACHABLE). For who knows that the server won't be back
  // soon.
  std::function<bool()> abandoned = {};
};

inline constexpr absl::Duration kInterruptInterval = absl::Milliseconds(100);
// What a call may have under way in each direction: it gets no more than so many bytes a round trip.
inline constexpr int64_t kCallWindowBytes = kStreamWindowBytes;

}  // namespace shardmlp
