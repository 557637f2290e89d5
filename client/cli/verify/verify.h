// `shardmlpctl verify`: whether a server computes what it should.
#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"

namespace shardmlp {

// Computes `rows` tokens of each layer here, in f64, and on the server, in a read session, and writes the largest
// differences of y and dx over the largest reference. True where all are within kernels/error_bounds.h.
absl::StatusOr<bool> Verify(Client& client, const std::vector<ClientLayer>& layers, int64_t rows, std::ostream& out);

}  // namespace shardmlp
