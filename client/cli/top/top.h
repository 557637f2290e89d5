// `shardmlpctl top`: what a server does, again and again.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"

namespace shardmlp {

struct TopOptions {
  absl::Duration interval = absl::Seconds(2);
  int64_t count = 0;  // of reports; 0: until SIGINT or SIGTERM
  bool json = false;
};

// Shows again and again what a server does: on the terminal at standard output, or as lines to `out` where that is
// none. Goes on where the server goes away, and says so. Fails where it is not there at first, or was not at the last.
absl::Status Top(const std::string& target, ClientOptions options, const TopOptions& top, std::ostream& out);

}  // namespace shardmlp
