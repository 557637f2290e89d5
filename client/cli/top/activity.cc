#include "client/cli/top/activity.h"

#include <cmath>

namespace shardmlp {
namespace {

constexpr char kStageSeconds[] = "shardmlp_stage_seconds";
constexpr char kRpcSeconds[] = "grpc_server_handling_seconds";

int64_t Whole(double value) { return std::llround(value); }

ByValue AboveZero(ByValue values) {
  std::erase_if(values, [](const auto& entry) { return !(entry.second > 0); });
  return values;
}

Durations DurationsOf(const Window& window, const std::string& histogram, const Labels& labels) {
  return {.per_second = window.CountRate(histogram, labels),
          .p50_seconds = window.Quantile(0.5, histogram, labels),
          .p99_seconds = window.Quantile(0.99, histogram, labels)};
}

void AddSteps(const Window& window, Activity& to) {
  to.step = Whole(window.Value("shardmlp_step"));
  to.attempt = Whole(window.Value("shardmlp_attempt"));
  to.attempts = window.RatesBy("outcome", "shardmlp_steps_total");
  for (const char* phase : {"seal", "sync", "apply"}) {
    to.phase_p90_seconds[phase] = window.Quantile(0.9, "shardmlp_step_phase_seconds", {{"phase", phase}});
  }
  to.non_finite_steps = window.Rate("shardmlp_non_finite_steps_total");
}

void AddTraffic(const Window& window, Activity& to) {
  to.rows = window.RatesBy("pass", "shardmlp_rows_total");
  to.repeated_rows = window.Rate("shardmlp_repeated_rows_total");
  to.payload_bytes = window.RatesBy("direction", "shardmlp_payload_bytes_total");
  to.open_calls = Whole(window.Value("shardmlp_open_calls"));
  to.sessions = window.ValuesBy("role", "shardmlp_sessions");
}

void AddComputing(const Window& window, Activity& to) {
  to.queued_tiles = Whole(window.Value("shardmlp_queued_tiles"));
  for (const char* pass : kPasses) {
    to.tile_rows[pass] = window.Rate("shardmlp_rows_total", {{"pass", pass}}) /
                         window.CountRate(kStageSeconds, {{"pass", pass}, {"stage", "compute"}});
  }
  to.busy_ratio = window.SumRate(kStageSeconds, {{"stage", "compute"}});
  to.flops = window.RatesBy("kind", "shardmlp_gemm_flops_total");
  to.recomputed_ratio =
      window.Rate("shardmlp_gemm_flops_total", {{"kind", "recomputed"}}) / window.Rate("shardmlp_gemm_flops_total");
}

void AddMemory(const Window& window, Activity& to) {
  to.planned_bytes = window.ValuesBy("use", "shardmlp_planned_memory_bytes");
  to.resident_bytes = window.Value("process_resident_memory_bytes");
  to.bound_bytes = window.Value("shardmlp_memory_bound_bytes");
  to.stash_bytes = window.Value("shardmlp_stash_bytes");
  to.stash_full_ratio = to.stash_bytes / window.Value("shardmlp_planned_memory_bytes", {{"use", "stash"}});
  const double hit = window.Rate("shardmlp_stash_tickets_total", {{"event", "hit"}});
  to.stash_found_ratio = hit / (hit + window.Rate("shardmlp_stash_tickets_total", {{"event", "missed"}}));
}

void AddLatencies(const Window& window, Activity& to) {
  for (const char* pass : kPasses) {
    for (const char* stage : kStages) {
      to.stages[pass][stage] = DurationsOf(window, kStageSeconds, {{"pass", pass}, {"stage", stage}});
    }
  }
  for (const auto& [method, rate] : AboveZero(window.RatesBy("grpc_method", "grpc_server_started_total"))) {
    to.rpcs[method] = DurationsOf(window, kRpcSeconds, {{"grpc_method", method}});
    to.rpcs[method].per_second = rate;
  }
}

void AddFailures(const Window& window, Activity& to) {
  double all = 0;
  double failed = 0;
  for (const auto& [code, rate] : window.RatesBy("grpc_code", "grpc_server_handled_total")) {
    all += rate;
    if (code != "OK" && code != "Canceled") failed += rate;
  }
  to.failed_ratio = failed / all;
  to.failures = AboveZero(window.RatesBy("reason", "shardmlp_failures_total"));
}

void AddReplicas(const Window& window, Activity& to) {
  to.replicas = Whole(window.Value("shardmlp_replicas"));
  to.replica_members = Whole(window.Value("shardmlp_replica_members"));
  to.replica_generation = Whole(window.Value("shardmlp_replica_generation"));
  to.replica_generations_lost = Whole(window.Value("shardmlp_replica_generations_lost_total"));
  to.synced_bytes = window.Rate("shardmlp_synced_bytes_total");
}

}  // namespace

Activity ActivityIn(const Window& window) {
  Activity activity;
  activity.seconds = window.seconds();
  AddSteps(window, activity);
  AddTraffic(window, activity);
  AddComputing(window, activity);
  AddMemory(window, activity);
  AddLatencies(window, activity);
  AddFailures(window, activity);
  AddReplicas(window, activity);
  return activity;
}

}  // namespace shardmlp
