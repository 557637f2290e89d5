// What `shardmlpctl plan --model` says of servers that are not there yet.
#pragma once

#include <cstdint>
#include <ostream>

#include "absl/status/statusor.h"
#include "client/cli/plan/plan.h"
#include "client/cli/plan/plan_flags.h"
#include "client/cli/plan/planned_model.h"

namespace shardmlp {

enum class Recommendation { kServers, kLocal, kNeither };

struct PlanReport {
  PlanFlags flags;
  PlannedModel model;
  PlanCalls calls;
  PlanLink link;
  TokenTime token;
  Throughput servers;
  double local_tokens_per_second = 0;
  int64_t local_bytes = 0;  // of weights, gradients and optimizer state, which trainers would hold themselves
  Recommendation recommendation = Recommendation::kServers;
};

// INVALID_ARGUMENT where a rate is missing; else fails as PlanModel does. `rows`: of a call.
absl::StatusOr<PlanReport> MakePlan(const PlanFlags& flags, int64_t rows);

void PrintPlan(const PlanReport& report, std::ostream& out);
void PrintPlanAsJson(const PlanReport& report, std::ostream& out);

}  // namespace shardmlp
