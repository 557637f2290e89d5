// From the parameter groups of a commit to one set of hyperparameters a tensor.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/optimizer.h"
#include "server/engine/step_types.h"
#include "server/model/model_spec.h"

namespace shardmlp {

// In ModelSpec::tensors' order. INVALID_ARGUMENT, naming it, for a tensor in no group or in two, one that the server
// does not have, or a hyperparameter out of range.
absl::StatusOr<std::vector<Hyperparameters>> ResolveGroups(const std::vector<ParameterGroup>& groups,
                                                           const ModelSpec& model);

}  // namespace shardmlp
