// One tensor's weights from the server, chunk by chunk.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/connection.h"

namespace shardmlp {

// One try. Fills `to`, which has exactly the tensor's size, and returns the weights version that it is of. UNAVAILABLE
// where the stream was cut short; INTERNAL where the chunks are not what the protocol says.
absl::StatusOr<int64_t> ReadTensorOnce(Connections& connections, const std::string& name, absl::Span<char> to);

}  // namespace shardmlp
