// Clients that load a server.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/bench/load.h"
#include "client/cpp/client.h"

namespace shardmlp {

// What the calls of a client are.
struct LoadShape {
  std::vector<ClientLayer> layers = {};  // forward in this order, then backward in the opposite one
  int64_t rows = 0;
  DType dtype = DType::kF32;  // on the wire
  bool forward_only = false;
  // Weight gradients too, in a train session, whose step is discarded in the end. Without, read sessions: backward
  // gives the input gradient alone. Neither changes a weight.
  bool train = false;
};

// `count` clients, each with a session and connections of its own, as trainers have them. They send and receive from
// memory that does not change, of about `rows` rows each. Fails as connecting and opening sessions do.
absl::StatusOr<std::vector<std::unique_ptr<LoadClient>>> ConnectLoadClients(const std::string& target,
                                                                            const ClientOptions& options,
                                                                            const LoadShape& shape, int count);

}  // namespace shardmlp
