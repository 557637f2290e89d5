// Which layers of a served model a command is about.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/served_model.h"

namespace shardmlp {

// Layers by "0-3,7", each served and ascending; all of them for "". INVALID_ARGUMENT or NOT_FOUND.
absl::StatusOr<std::vector<ClientLayer>> SelectLayers(const ServedModel& model, const std::string& layers);

}  // namespace shardmlp
