#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/cli/top/top_report.h"
#include "client/cli/trainers_json.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

using Json = nlohmann::ordered_json;

Json Number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json Numbers(const ByValue& values) {
  Json json = Json::object();
  for (const auto& [label, value] : values) json[label] = Number(value);
  return json;
}

Json Times(const Durations& durations) {
  return {{"per_second", Number(durations.per_second)},
          {"p50_seconds", Number(durations.p50_seconds)},
          {"p99_seconds", Number(durations.p99_seconds)}};
}

void AddActivity(const Activity& activity, Json& to) {
  to["step"] = activity.step;
  to["attempt"] = activity.attempt;
  to["attempts_per_second"] = Numbers(activity.attempts);
  to["phase_p90_seconds"] = Numbers(activity.phase_p90_seconds);
  to["non_finite_steps_per_second"] = Number(activity.non_finite_steps);
  to["rows_per_second"] = Numbers(activity.rows);
  to["repeated_rows_per_second"] = Number(activity.repeated_rows);
  to["payload_bytes_per_second"] = Numbers(activity.payload_bytes);
  to["open_calls"] = activity.open_calls;
  to["queued_tiles"] = activity.queued_tiles;
  to["tile_rows"] = Numbers(activity.tile_rows);
  to["busy_ratio"] = Number(activity.busy_ratio);
  to["flops_per_second"] = Numbers(activity.flops);
  to["recomputed_ratio"] = Number(activity.recomputed_ratio);
  for (const auto& [pass, stages] : activity.stages) {
    for (const char* stage : kStages) to["stages"][pass][stage] = Times(stages.at(stage));
  }
  to["rpcs"] = Json::object();
  for (const auto& [method, times] : activity.rpcs) to["rpcs"][method] = Times(times);
  to["failed_ratio"] = Number(activity.failed_ratio);
  to["failures_per_second"] = Numbers(activity.failures);
  to["memory"] = {{"planned_bytes", Numbers(activity.planned_bytes)},
                  {"resident_bytes", Number(activity.resident_bytes)},
                  {"bound_bytes", Number(activity.bound_bytes)}};
  to["stash"] = {{"bytes", Number(activity.stash_bytes)},
                 {"full_ratio", Number(activity.stash_full_ratio)},
                 {"found_ratio", Number(activity.stash_found_ratio)}};
  to["sessions"] = Numbers(activity.sessions);
  to["replicas"] = {{"replicas", activity.replicas},
                    {"members", activity.replica_members},
                    {"generation", activity.replica_generation},
                    {"generations_lost", activity.replica_generations_lost},
                    {"synced_bytes_per_second", Number(activity.synced_bytes)}};
}

}  // namespace

std::string TopJson(const TopReport& report) {
  Json json = {{"time", absl::FormatTime(absl::RFC3339_full, report.time, absl::UTCTimeZone())},
               {"target", report.target},
               {"reached", report.reached.ok()},
               {"away_seconds", absl::ToDoubleSeconds(report.away)}};
  if (!report.reached.ok()) {
    json["reason"] = std::string(Name(ReasonOf(report.reached)));
    json["error"] = std::string(report.reached.message());
    return absl::StrCat(json.dump(), "\n");
  }
  json["model_type"] = report.model.model_type;
  json["seconds"] = report.activity.seconds;
  AddActivity(report.activity, json);
  json["trainers"] = TrainersAsJson(report.model);
  return absl::StrCat(json.dump(), "\n");
}

}  // namespace shardmlp
