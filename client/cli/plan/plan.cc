#include "client/cli/plan/plan.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "client/cpp/options.h"

namespace shardmlp {
namespace {

// What a message costs beside its bytes, both ends together: measured, see docs/performance.md.
constexpr double kMessageSeconds = 50e-6;
constexpr double kMessagesToShare = 20;
constexpr int64_t kLeastShardBytes = 128 << 10;
constexpr int64_t kMostShardBytes = 4 << 20;

CallCost RowCost(const ClientLayer& layer, CallKind kind, const PlanCalls& calls) {
  return CostOf(layer, kind, /*rows=*/1, calls.dtype, calls.backward);
}

// Calls `visit(times of a row)` for each call of a step.
template <typename Visit>
void ForEachCall(const std::vector<ClientLayer>& layers, const PlanCalls& calls, const PlanRates& rates,
                 double bytes_per_second, Visit visit) {
  for (const ClientLayer& layer : layers) {
    visit(RowTimesOf(RowCost(layer, CallKind::kForward, calls), rates.server_forward, bytes_per_second));
    if (calls.forward_only) continue;
    visit(RowTimesOf(RowCost(layer, CallKind::kBackward, calls), rates.server_backward, bytes_per_second));
  }
}

PlanBound BoundOf(const TokenTime& token) {
  const double idle = token.remote - std::max(token.compute, token.link);
  const double largest = std::max({token.own, token.compute, token.link, idle});
  if (largest == token.own) return PlanBound::kTrainer;
  if (largest == token.compute) return PlanBound::kCompute;
  return largest == token.link ? PlanBound::kLink : PlanBound::kRoundTrips;
}

}  // namespace

double RowTimes::slowest() const { return std::max({up, compute, down}); }

double CallBytesPerSecond(const PlanLink& link) {
  const double round_trip = absl::ToDoubleSeconds(link.round_trip);
  if (round_trip <= 0) return link.bytes_per_second;
  return std::min(link.bytes_per_second, static_cast<double>(kCallWindowBytes) / round_trip);
}

RowTimes RowTimesOf(const CallCost& row, double flops_per_second, double bytes_per_second) {
  return {.up = static_cast<double>(row.sent_bytes) / bytes_per_second,
          .compute = row.flops / flops_per_second,
          .down = static_cast<double>(row.received_bytes) / bytes_per_second};
}

double CallSeconds(const RowTimes& row, int64_t rows, int64_t tile_rows, absl::Duration round_trip) {
  const auto first = static_cast<double>(std::min(rows, tile_rows));
  return absl::ToDoubleSeconds(round_trip) + first * (row.up + row.compute + row.down) +
         (static_cast<double>(rows) - first) * row.slowest();
}

std::string Name(PlanBound bound) {
  switch (bound) {
    case PlanBound::kCompute: return "the servers' arithmetic";
    case PlanBound::kLink: return "the link";
    case PlanBound::kTrainer: return "the trainer's own part";
    case PlanBound::kRoundTrips: return "round trips, and tiles that wait for their rows: more rows a call";
  }
  return "";
}

TokenTime TokenTimeOf(const std::vector<ClientLayer>& layers, const PlanCalls& calls, const PlanLink& link,
                      const PlanRates& rates, double own_flops) {
  TokenTime token;
  if (own_flops > 0) token.own = own_flops / rates.trainer;
  ForEachCall(layers, calls, rates, CallBytesPerSecond(link), [&](const RowTimes& row) {
    token.compute += row.compute;
    token.link += std::max(row.up, row.down);
    token.remote += CallSeconds(row, calls.rows, calls.tile_rows, link.round_trip) / static_cast<double>(calls.rows);
  });
  return token;
}

Throughput RemoteThroughput(const std::vector<std::vector<ClientLayer>>& servers, const PlanCalls& calls,
                            const PlanLink& link, const PlanRates& rates, double own_flops, int64_t trainers) {
  std::vector<ClientLayer> all;
  for (const std::vector<ClientLayer>& layers : servers) all.insert(all.end(), layers.begin(), layers.end());
  const TokenTime token = TokenTimeOf(all, calls, link, rates, own_flops);
  Throughput throughput{.tokens_per_second = static_cast<double>(trainers) / token.total(), .bound = BoundOf(token)};
  const auto limit = [&throughput](double seconds, PlanBound bound) {
    if (1 / seconds < throughput.tokens_per_second) throughput = {1 / seconds, bound};
  };
  for (const std::vector<ClientLayer>& layers : servers) {
    RowTimes sums;
    ForEachCall(layers, calls, rates, link.bytes_per_second, [&](const RowTimes& row) {
      sums.compute += row.compute;
      sums.up += row.up;
      sums.down += row.down;
    });
    limit(sums.compute, PlanBound::kCompute);
    limit(std::max(sums.up, sums.down), PlanBound::kLink);
  }
  return throughput;
}

double LocalTokensPerSecond(const std::vector<ClientLayer>& layers, const PlanRates& rates, double own_flops,
                            bool weight_gradient, int64_t trainers) {
  const PlanCalls kept{.rows = 1, .backward = {.weight_gradient = weight_gradient, .gate_up_kept = true}};
  double flops = own_flops;
  for (const ClientLayer& layer : layers) {
    flops += RowCost(layer, CallKind::kForward, kept).flops + RowCost(layer, CallKind::kBackward, kept).flops;
  }
  return static_cast<double>(trainers) * rates.trainer / flops;
}

int64_t BestShardBytes(const PlanLink& link) {
  const double bytes = kMessagesToShare * kMessageSeconds * CallBytesPerSecond(link);
  const auto power = static_cast<int>(std::lround(std::log2(std::max(bytes, 1.0))));
  return std::clamp(int64_t{1} << std::min(power, 62), kLeastShardBytes, kMostShardBytes);
}

std::vector<std::vector<ClientLayer>> SpreadLayers(const std::vector<ClientLayer>& layers, int64_t count) {
  std::vector<std::vector<ClientLayer>> servers;
  const auto size = static_cast<int64_t>(layers.size());
  for (int64_t server = 0; server < count; ++server) {
    servers.emplace_back(layers.begin() + server * size / count, layers.begin() + (server + 1) * size / count);
  }
  return servers;
}

}  // namespace shardmlp
