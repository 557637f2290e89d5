// A model in a folder, and the servers that are planned for it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/plan/plan_flags.h"
#include "client/cpp/served_model.h"
#include "server/engine/memory_plan.h"

namespace shardmlp {

struct PlannedModel {
  std::string model_type;
  std::vector<std::vector<ClientLayer>> servers;  // the layers of each
  std::vector<MemoryPlan> memory;                 // of each, by the function that servers plan with themselves
  // Of what a trainer keeps, a token, forward and backward: attention, by its projections and scores, and the head.
  double own_flops = 0;
  bool fits = true;                                     // --server-memory, where it is said
  std::optional<int64_t> least_servers = std::nullopt;  // that would fit; absent where no number does
};

// Reads config.json alone. Fails as a server would that is started so, but for what does not fit.
absl::StatusOr<PlannedModel> PlanModel(const PlanFlags& flags);

}  // namespace shardmlp
