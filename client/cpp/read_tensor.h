// One tensor's weights from the server, chunk by chunk.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/cpp/connection.h"

namespace shardmlp {

// One try. Fills `to`, which has exactly the tensor's size. UNAVAILABLE where the stream was cut short; INTERNAL where
// the chunks are not what the protocol says.
absl::Status ReadTensorOnce(Connections& connections, const std::string& name, absl::Span<char> to);

}  // namespace shardmlp
