// `shardmlpctl plan`: what servers would hold, and how fast training with them would be, by arithmetic alone.
//
// docs/performance.md has the formulas in words. Everything here is a pure function.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/cli/layer_cost.h"
#include "client/cpp/served_model.h"
#include "kernels/matrix.h"

namespace shardmlp {

struct PlanLink {
  double bytes_per_second = 0;  // each way
  absl::Duration round_trip = absl::ZeroDuration();
};

// Achieved rates, FLOP/s.
struct PlanRates {
  double server_forward = 0;
  double server_backward = 0;
  double trainer = 0;  // 0: not known
};

struct PlanCalls {
  int64_t rows = 0;       // of a call
  int64_t tile_rows = 0;  // of the server
  DType dtype = DType::kF32;
  CostOptions backward = {.weight_gradient = true};
  bool forward_only = false;
};

// Seconds that a row of a call takes each part that works beside the others.
struct RowTimes {
  double up = 0;
  double compute = 0;
  double down = 0;

  double slowest() const;
};

// What a link gives one call at most: a stream has no more than its window under way.
double CallBytesPerSecond(const PlanLink& link);

RowTimes RowTimesOf(const CallCost& row, double flops_per_second, double bytes_per_second);

// A round trip; the first tile received, computed and sent back; and for each further row the slowest of the three.
double CallSeconds(const RowTimes& row, int64_t rows, int64_t tile_rows, absl::Duration round_trip);

// Where a token's time goes, over a forward and a backward of each layer, one call after the other; seconds.
struct TokenTime {
  double own = 0;      // the trainer's, for what it keeps
  double compute = 0;  // the servers'
  double link = 0;     // the slower direction of each call
  double remote = 0;   // all that calls take: no less than `compute` or `link`

  double total() const { return own + remote; }
};

enum class PlanBound { kCompute, kLink, kTrainer, kRoundTrips };
// "the servers' arithmetic" and so on.
std::string Name(PlanBound bound);

struct Throughput {
  double tokens_per_second = 0;
  PlanBound bound = PlanBound::kCompute;  // what would have to be faster
};

// `own_flops`: of the trainer's part of a token, forward and backward.
TokenTime TokenTimeOf(const std::vector<ClientLayer>& layers, const PlanCalls& calls, const PlanLink& link,
                      const PlanRates& rates, double own_flops);

// Of all trainers, each with a link of its own, where no two calls of one overlap: as many as their own time allows,
// and no more than the busiest server can compute, or carry over its one link. `servers`: the layers of each.
Throughput RemoteThroughput(const std::vector<std::vector<ClientLayer>>& servers, const PlanCalls& calls,
                            const PlanLink& link, const PlanRates& rates, double own_flops, int64_t trainers);

// Of all trainers, where each computes its MLPs itself, and recomputes nothing.
double LocalTokensPerSecond(const std::vector<ClientLayer>& layers, const PlanRates& rates, double own_flops,
                            bool weight_gradient, int64_t trainers);

// About how large messages should be: so large that what one costs beside its bytes is a twentieth of its time on the
// link, and not so large that a tile waits for a whole one; a power of two.
int64_t BestShardBytes(const PlanLink& link);

// Layers in `count` runs as alike in number as may be.
std::vector<std::vector<ClientLayer>> SpreadLayers(const std::vector<ClientLayer>& layers, int64_t count);

}  // namespace shardmlp
