#include "client/cli/plan/plan_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr double kTera = 1e12;
constexpr double kBytesAGigabit = 1e9 / 8;

int64_t TrainingBytes(const MemoryPlan& plan) {
  return plan.weights_bytes + plan.gradients_bytes + plan.master_weights_bytes + plan.optimizer_bytes;
}

// What the stash has room for: x of all rows between their forward and backward, and G and U as well.
CostOptions BackwardOf(const PlanFlags& flags, const PlannedModel& model, int64_t rows, DType wire) {
  CostOptions options{
      .weight_gradient = !flags.frozen, .x_kept = flags.stash_bytes > 0, .gate_up_kept = flags.stash_bytes > 0};
  for (const std::vector<ClientLayer>& layers : model.servers) {
    int64_t x_bytes = 0;
    int64_t gate_up_bytes = 0;
    for (const ClientLayer& layer : layers) {
      x_bytes += layer.hidden_size * SizeOf(wire);
      gate_up_bytes += layer.intermediate_size * (layer.gated ? 2 : 1) * SizeOf(flags.dtype);
    }
    const int64_t kept_rows = rows * flags.trainers;
    options.x_kept = options.x_kept && flags.stash_bytes / kept_rows >= x_bytes;
    options.gate_up_kept = options.gate_up_kept && flags.stash_bytes / kept_rows >= x_bytes + gate_up_bytes;
  }
  return options;
}

Recommendation Recommend(const PlanReport& report) {
  const int64_t memory = report.flags.trainer_memory;
  const bool local_fits = memory == 0 || report.local_bytes <= memory;
  const bool local_is_faster = report.local_tokens_per_second >= report.servers.tokens_per_second;
  if (local_fits && (local_is_faster || !report.model.fits)) return Recommendation::kLocal;
  return report.model.fits ? Recommendation::kServers : Recommendation::kNeither;
}

std::string Gib(int64_t bytes) { return absl::StrFormat("%.1f GiB", static_cast<double>(bytes) / (int64_t{1} << 30)); }

std::string Explain(const PlanReport& report) {
  const double ratio = report.servers.tokens_per_second / report.local_tokens_per_second;
  const int64_t memory = report.flags.trainer_memory;
  const bool local_fits = memory == 0 || report.local_bytes <= memory;
  switch (report.recommendation) {
    case Recommendation::kLocal:
      return absl::StrCat("keep it local: ", ratio <= 1 ? absl::StrFormat("%.2f times as fast", 1 / ratio)
                                                        : std::string("the servers have no room"));
    case Recommendation::kServers:
      return absl::StrCat("use servers: ", absl::StrFormat("%.2f times as fast as local", ratio),
                          local_fits ? "" : absl::StrCat("; local does not fit into ", Gib(memory)));
    case Recommendation::kNeither: return "neither fits";
  }
  return "";
}

// Bytes of a token over all layers.
CallCost TokenCost(const PlanReport& report, CallKind kind) {
  CallCost sum;
  for (const std::vector<ClientLayer>& layers : report.model.servers) {
    for (const ClientLayer& layer : layers) {
      const CallCost cost = CostOf(layer, kind, /*rows=*/1, report.calls.dtype, report.calls.backward);
      sum.flops += cost.flops;
      sum.sent_bytes += cost.sent_bytes;
      sum.received_bytes += cost.received_bytes;
    }
  }
  return sum;
}

void PrintServers(const PlanReport& report, std::ostream& out) {
  const PlannedModel& model = report.model;
  for (size_t i = 0; i < model.servers.size(); ++i) {
    const std::vector<ClientLayer>& layers = model.servers[i];
    const ClientLayer& first = layers.front();
    out << absl::StreamFormat("server %d: layers %d-%d, %d to %d to %d, in %s\n%s", i + 1, first.layer,
                              layers.back().layer, first.hidden_size, first.intermediate_size, first.output_size,
                              Name(report.flags.dtype), model.memory[i].ToString());
  }
  if (report.flags.server_memory > 0) {
    out << "  " << (model.fits ? "fits into " : "does not fit into ") << Gib(report.flags.server_memory);
    if (!model.fits || *model.least_servers < report.flags.servers) {
      out << (model.least_servers ? absl::StrCat("; servers that would do: ", *model.least_servers)
                                  : std::string("; no number of servers would do"));
    }
    out << "\n";
  }
}

nlohmann::ordered_json MemoryAsJson(const MemoryPlan& plan) {
  return {{"weights_bytes", plan.weights_bytes},
          {"gradients_bytes", plan.gradients_bytes},
          {"master_weights_bytes", plan.master_weights_bytes},
          {"optimizer_bytes", plan.optimizer_bytes},
          {"workspace_bytes", plan.workspace_bytes},
          {"staging_bytes", plan.staging_bytes},
          {"ledger_bytes", plan.ledger_bytes},
          {"stash_bytes", plan.stash_bytes},
          {"total_bytes", plan.total_bytes()},
          {"tile_row_count", plan.tile_row_count}};
}

}  // namespace

absl::StatusOr<PlanReport> MakePlan(const PlanFlags& flags, int64_t rows) {
  if (flags.server_tflops == 0 || flags.trainer_tflops == 0 || flags.link_gbps == 0) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 "plan --model takes --server-tflops, --trainer-tflops and --link-gbps; --help tells more");
  }
  PlanReport report{.flags = flags, .model = {}, .calls = {}, .link = {}, .token = {}, .servers = {}};
  SHARDMLP_ASSIGN_OR_RETURN(report.model, PlanModel(flags));
  report.calls = {.rows = rows,
                  .tile_rows = report.model.memory.front().tile_row_count,
                  .dtype = flags.wire_dtype.value_or(flags.dtype)};
  report.calls.backward = BackwardOf(flags, report.model, rows, report.calls.dtype);
  report.link = {.bytes_per_second = flags.link_gbps * kBytesAGigabit, .round_trip = flags.round_trip};
  const PlanRates rates{.server_forward = flags.server_tflops * kTera,
                        .server_backward = flags.server_tflops * kTera,
                        .trainer = flags.trainer_tflops * kTera};
  std::vector<ClientLayer> all;
  for (const auto& layers : report.model.servers) all.insert(all.end(), layers.begin(), layers.end());
  const double own_flops = report.model.own_flops;
  report.token = TokenTimeOf(all, report.calls, report.link, rates, own_flops);
  report.servers = RemoteThroughput(report.model.servers, report.calls, report.link, rates, own_flops, flags.trainers);
  report.local_tokens_per_second = LocalTokensPerSecond(all, rates, own_flops, !flags.frozen, flags.trainers);
  for (const MemoryPlan& plan : report.model.memory) report.local_bytes += TrainingBytes(plan);
  report.recommendation = Recommend(report);
  return report;
}

void PrintPlan(const PlanReport& report, std::ostream& out) {
  const CallCost forward = TokenCost(report, CallKind::kForward);
  const CallCost backward = TokenCost(report, CallKind::kBackward);
  const TokenTime& token = report.token;
  PrintServers(report, out);
  out << absl::StreamFormat(
      "\na token   %.3g GFLOP forward, %.3g backward on the servers; %.3g on the trainer\n"
      "          %.3g MB to the servers, %.3g back\n"
      "          %.3g us of the trainer's own, %.3g in calls (arithmetic %.3g, link %.3g)\n\n",
      forward.flops / 1e9, backward.flops / 1e9, report.model.own_flops / 1e9,
      static_cast<double>(forward.sent_bytes + backward.sent_bytes) / 1e6,
      static_cast<double>(forward.received_bytes + backward.received_bytes) / 1e6, token.own * 1e6, token.remote * 1e6,
      token.compute * 1e6, token.link * 1e6);
  out << absl::StreamFormat("servers   %10.1f tokens a second, bounded by %s\n", report.servers.tokens_per_second,
                            Name(report.servers.bound));
  out << absl::StreamFormat("local     %10.1f tokens a second, with %s of weights, gradients and optimizer state\n",
                            report.local_tokens_per_second, Gib(report.local_bytes));
  out << absl::StreamFormat("so        %s\n\n", Explain(report));
  out << absl::StreamFormat("shards    about %d KiB\n", BestShardBytes(report.link) / 1024);
  out << "connections  1: a trainer's calls follow each other, and each goes over one\n";
}

void PrintPlanAsJson(const PlanReport& report, std::ostream& out) {
  constexpr const char* kRecommendations[] = {"servers", "local", "neither"};
  const TokenTime& token = report.token;
  const CallCost forward = TokenCost(report, CallKind::kForward);
  const CallCost backward = TokenCost(report, CallKind::kBackward);
  nlohmann::ordered_json json = {{"model_type", report.model.model_type}, {"rows", report.calls.rows}};
  for (size_t i = 0; i < report.model.servers.size(); ++i) {
    json["servers"].push_back({{"first_layer", report.model.servers[i].front().layer},
                               {"last_layer", report.model.servers[i].back().layer},
                               {"memory", MemoryAsJson(report.model.memory[i])}});
  }
  json["fits"] = report.model.fits;
  if (report.model.least_servers) json["least_servers"] = *report.model.least_servers;
  json["token"] = {{"forward_flops", forward.flops},
                   {"backward_flops", backward.flops},
                   {"own_flops", report.model.own_flops},
                   {"sent_bytes", forward.sent_bytes + backward.sent_bytes},
                   {"received_bytes", forward.received_bytes + backward.received_bytes},
                   {"own_seconds", token.own},
                   {"compute_seconds", token.compute},
                   {"link_seconds", token.link},
                   {"remote_seconds", token.remote}};
  json["tokens_per_second"] = report.servers.tokens_per_second;
  json["bound"] = Name(report.servers.bound);
  json["local"] = {{"tokens_per_second", report.local_tokens_per_second}, {"bytes", report.local_bytes}};
  json["recommendation"] = kRecommendations[static_cast<size_t>(report.recommendation)];
  json["shard_bytes"] = BestShardBytes(report.link);
  json["connections"] = 1;
  out << json.dump(2) << "\n";
}

}  // namespace shardmlp
