#include "client/cli/plan/measured_plan.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "client/cli/bench/remote_load.h"
#include "client/cli/layers.h"
#include "client/cli/stop.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr int kLeastRepeats = 3;
constexpr int kMostRepeats = 25;
constexpr absl::Duration kRepeatFor = absl::Seconds(1);
// Of a time from which others are taken off, that is left at least: they were measured at other moments.
constexpr double kLeastLeft = 0.1;
// What clients do by themselves comes first: 0 is what the server prefers.
constexpr int64_t kShardBytes[] = {0, 256 << 10, 1 << 20, 4 << 20};
constexpr int64_t kConnections[] = {1, 2};

// The median times of `once`, which does each of `parts` in its turn.
absl::StatusOr<std::vector<double>> MedianSeconds(size_t parts, const std::function<absl::Status()>& once) {
  const LoadClock clock = SteadyClock();
  const absl::Duration start = clock.now();
  std::vector<std::vector<double>> seconds(parts);
  for (int i = 0; i < kLeastRepeats || (i < kMostRepeats && clock.now() - start < kRepeatFor); ++i) {
    for (std::vector<double>& of_part : seconds) {
      const absl::Duration begin = clock.now();
      SHARDMLP_RETURN_IF_ERROR(once());
      of_part.push_back(absl::ToDoubleSeconds(clock.now() - begin));
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& of_part : seconds) {
    std::sort(of_part.begin(), of_part.end());
    medians.push_back(of_part[of_part.size() / 2]);
  }
  return medians;
}

double TakeOff(double seconds, double others) { return std::max(seconds - others, kLeastLeft * seconds); }

absl::StatusOr<PlanLink> MeasureLink(Client& client) {
  SHARDMLP_ASSIGN_OR_RETURN(const std::unique_ptr<Session> session,
                            client.OpenSession({.run_id = "plan", .role = ClientRole::kRead}));
  SHARDMLP_ASSIGN_OR_RETURN(const auto renewing, MedianSeconds(1, [&] { return session->Resync().status(); }));
  const std::vector<ClientTensor>& tensors = client.model().tensors;
  const ClientTensor& largest =
      *std::max_element(tensors.begin(), tensors.end(),
                        [](const ClientTensor& a, const ClientTensor& b) { return a.byte_count() < b.byte_count(); });
  std::string bytes(static_cast<size_t>(largest.byte_count()), 0);
  SHARDMLP_ASSIGN_OR_RETURN(const auto reading, MedianSeconds(1, [&] {
                              return client.ReadTensor(largest.name, absl::MakeSpan(bytes)).status();
                            }));
  return PlanLink{.bytes_per_second = static_cast<double>(bytes.size()) / TakeOff(reading[0], renewing[0]),
                  .round_trip = absl::Seconds(renewing[0])};
}

// Of calls of one tile, of the first layer.
absl::StatusOr<PlanRates> MeasureArithmetic(const std::string& target, const ClientOptions& options,
                                            const ClientLayer& layer, const PlanCalls& calls, const PlanLink& link) {
  const int64_t rows = std::min(calls.rows, calls.tile_rows);
  SHARDMLP_ASSIGN_OR_RETURN(
      const auto clients,
      ConnectLoadClients(target, options, {.layers = {layer}, .rows = rows, .dtype = calls.dtype}, /*count=*/1));
  // It does a forward and a backward in turn.
  SHARDMLP_ASSIGN_OR_RETURN(const auto seconds, MedianSeconds(2, [&] { return clients.front()->Run().status; }));
  const auto rate_of = [&](CallKind kind, double measured) {
    const CallCost cost = CostOf(layer, kind, rows, calls.dtype, calls.backward);
    const double on_link = static_cast<double>(cost.sent_bytes + cost.received_bytes) / CallBytesPerSecond(link);
    return cost.flops / TakeOff(measured, absl::ToDoubleSeconds(link.round_trip) + on_link);
  };
  return PlanRates{.server_forward = rate_of(CallKind::kForward, seconds[0]),
                   .server_backward = rate_of(CallKind::kBackward, seconds[1])};
}

BenchFlags LoadFlags(const PlanFlags& flags) {
  BenchFlags load;
  load.clients = flags.clients;
  load.dtype = flags.wire_dtype;
  load.duration = flags.duration;
  load.warmup = flags.duration / 4;
  return load;
}

// The load once more for each value of what `field` says.
absl::StatusOr<std::vector<Variant>> Vary(const std::function<absl::StatusOr<BenchReport>(const BenchFlags&)>& run,
                                          BenchFlags load, int64_t BenchFlags::*field,
                                          absl::Span<const int64_t> values) {
  load.duration /= 2;
  std::vector<Variant> variants;
  for (const int64_t value : values) {
    if (StopSignalled()) break;
    load.*field = value;
    SHARDMLP_ASSIGN_OR_RETURN(const BenchReport report, run(load));
    variants.push_back({value, report.TokensPerSecond()});
  }
  return variants;
}

}  // namespace

absl::StatusOr<MeasuredPlan> MeasurePlan(const std::string& target, const ClientOptions& options,
                                         const std::string& layers, int64_t rows, const PlanFlags& flags,
                                         std::ostream* progress) {
  MeasuredPlan plan{.calls = {}, .link = {}, .rates = {}, .predicted = {}, .load = {}};
  std::vector<ClientLayer> selected;
  {
    SHARDMLP_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Client::Connect(target, options));
    const ServedModel& model = client->model();
    SHARDMLP_ASSIGN_OR_RETURN(selected, SelectLayers(model, layers));
    plan.calls = {.rows = rows,
                  .tile_rows = model.tile_row_count,
                  .dtype = flags.wire_dtype.value_or(model.compute_dtype),
                  .backward = {}};
    SHARDMLP_ASSIGN_OR_RETURN(plan.link, MeasureLink(*client));
  }
  SHARDMLP_ASSIGN_OR_RETURN(plan.rates, MeasureArithmetic(target, options, selected.front(), plan.calls, plan.link));
  plan.predicted = RemoteThroughput({selected}, plan.calls, plan.link, plan.rates, /*own_flops=*/0, flags.clients);
  // Of all layers, one after the other; a load counts the tokens of each.
  plan.predicted.tokens_per_second *= static_cast<double>(selected.size());

  const auto run = [&](const BenchFlags& load) { return Bench(target, options, layers, rows, load, progress); };
  const BenchFlags load = LoadFlags(flags);
  SHARDMLP_ASSIGN_OR_RETURN(plan.load, run(load));
  SHARDMLP_ASSIGN_OR_RETURN(plan.shards, Vary(run, load, &BenchFlags::shard_bytes, kShardBytes));
  SHARDMLP_ASSIGN_OR_RETURN(plan.connections, Vary(run, load, &BenchFlags::connections, kConnections));
  return plan;
}

const Variant& BestOf(const std::vector<Variant>& variants) {
  constexpr double kAsGood = 1.05;
  const Variant& best = *std::max_element(variants.begin(), variants.end(), [](const Variant& a, const Variant& b) {
    return a.tokens_per_second < b.tokens_per_second;
  });
  return best.tokens_per_second > kAsGood * variants.front().tokens_per_second ? best : variants.front();
}

}  // namespace shardmlp
