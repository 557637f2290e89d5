// What `shardmlpctl plan` says of a server that is there: what single calls let expect, and what a load then gives.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/bench/bench.h"
#include "client/cli/plan/plan.h"
#include "client/cli/plan/plan_flags.h"
#include "client/cpp/client.h"

namespace shardmlp {

// Tokens a second of a layer, by what was varied.
struct Variant {
  int64_t value = 0;
  double tokens_per_second = 0;
};

struct MeasuredPlan {
  PlanCalls calls;
  PlanLink link;
  PlanRates rates;
  Throughput predicted;  // tokens a second of a layer
  BenchReport load;
  std::vector<Variant> shards = {};       // by bytes
  std::vector<Variant> connections = {};  // by number, of a client

  double ratio() const { return load.TokensPerSecond() / predicted.tokens_per_second; }
};

// The variant that is best; the first, which is what clients do by themselves, where it is as good to a twentieth.
const Variant& BestOf(const std::vector<Variant>& variants);

// Measures by single calls, in a read session: round trips by renewals of the lease, the link by reading the largest
// tensor, arithmetic by calls of one tile, whose time on the link is taken off. Then loads the server as `flags` say.
absl::StatusOr<MeasuredPlan> MeasurePlan(const std::string& target, const ClientOptions& options,
                                         const std::string& layers, int64_t rows, const PlanFlags& flags,
                                         std::ostream* progress);

void PrintMeasuredPlan(const MeasuredPlan& plan, std::ostream& out);
void PrintMeasuredPlanAsJson(const MeasuredPlan& plan, std::ostream& out);

}  // namespace shardmlp
