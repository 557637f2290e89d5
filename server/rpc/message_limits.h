// Sizes of the messages that a server takes and gives, which GetModel advertises.
#pragma once

#include <cstdint>

namespace shardmlp {

struct MessageLimits {
  int64_t max_message_bytes = 8 << 20;      // received
  int64_t preferred_shard_bytes = 1 << 20;  // payload of a message, either way
};

}  // namespace shardmlp
