// A layer's weights, read from the server into a ReferenceMlp.
#pragma once

#include "absl/status/statusor.h"
#include "client/cli/verify/reference_mlp.h"
#include "client/cpp/client.h"

namespace shardmlp {

// UNIMPLEMENTED, naming it, for a tensor or an activation that is unknown here; INTERNAL where the tensors aren't
// all that the layer should have.
absl::StatusOr<ReferenceMlp> ReadLayerWeights(Client& client, const ClientLayer& layer);

}  // namespace shardmlp
