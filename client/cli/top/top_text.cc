#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/top/top_report.h"
#include "client/cli/units.h"

namespace shardmlp {
namespace {

using Lines = std::vector<std::string>;

std::string Clock(absl::Time time) { return absl::FormatTime("%H:%M:%S", time, absl::LocalTimeZone()); }
std::string Whole(absl::Duration time) { return absl::FormatDuration(absl::Ceil(time, absl::Seconds(1))); }

// 0 where there is none.
double At(const ByValue& values, const std::string& label) {
  const auto found = values.find(label);
  return found == values.end() ? 0 : found->second;
}

double Sum(const ByValue& values) {
  double sum = 0;
  for (const auto& [label, value] : values) sum += value;
  return sum;
}

std::string Rate(double bytes) { return absl::StrCat(Bytes(bytes), "/s"); }

void AddState(const Activity& a, Lines& to) {
  to.push_back(absl::StrCat("step       ", a.step, ", attempt ", a.attempt, "; a second: ",
                            Count(At(a.attempts, "committed")), " committed, ", Count(At(a.attempts, "discarded")),
                            " discarded, ", Count(At(a.attempts, "aborted")), " aborted"));
  to.push_back(absl::StrCat("phases     p90: seal ", Seconds(At(a.phase_p90_seconds, "seal")), ", sync ",
                            Seconds(At(a.phase_p90_seconds, "sync")), ", apply ",
                            Seconds(At(a.phase_p90_seconds, "apply"))));
  if (a.non_finite_steps > 0)
    to.push_back(absl::StrCat("NOT FINITE ", Count(a.non_finite_steps), " attempts a second"));
  to.push_back(absl::StrCat("calls      ", a.open_calls, " open, ", a.queued_tiles,
                            " tiles queued, the device is busy ", Percent(a.busy_ratio)));
  to.push_back(absl::StrCat("rows/s     forward ", Count(At(a.rows, "forward")), " (",
                            Count(At(a.tile_rows, "forward")), " a tile), backward ", Count(At(a.rows, "backward")),
                            " (", Count(At(a.tile_rows, "backward")), " a tile), repeated ", Count(a.repeated_rows)));
  to.push_back(absl::StrCat("payload    received ", Rate(At(a.payload_bytes, "received")), ", sent ",
                            Rate(At(a.payload_bytes, "sent"))));
  to.push_back(
      absl::StrCat("computing  ", Flops(Sum(a.flops)), ", of which ", Percent(a.recomputed_ratio), " recomputed"));
}

void AddMemory(const Activity& a, Lines& to) {
  to.push_back(absl::StrCat("memory     resident ", Bytes(a.resident_bytes), " of ", Bytes(a.bound_bytes), " (",
                            Percent(a.resident_bytes / a.bound_bytes), "); plan ", Bytes(Sum(a.planned_bytes))));
  if (const double stash = At(a.planned_bytes, "stash"); stash > 0) {
    to.push_back(absl::StrCat("stash      ", Bytes(a.stash_bytes), " of ", Bytes(stash), ", ",
                              Percent(a.stash_found_ratio), " found"));
  }
}

void AddSessions(const Activity& a, const ServedModel& model, Lines& to) {
  if (a.replicas > 1) {
    to.push_back(absl::StrCat("replicas   ", a.replica_members, " of ", a.replicas, " together, generation ",
                              a.replica_generation, ", ", a.replica_generations_lost, " lost; summed ",
                              Rate(a.synced_bytes)));
  }
  to.push_back(
      absl::StrCat("sessions   ", Count(At(a.sessions, "train")), " train, ", Count(At(a.sessions, "read")), " read"));
  for (const ClientTrainer& trainer : model.trainers) {
    to.push_back(absl::StrCat("           run '", trainer.run_id, "' rank ", trainer.trainer_rank, " of ",
                              trainer.trainer_count, trainer.sealed ? ", sealed" : ""));
  }
}

std::string Times(const Durations& times) {
  return absl::StrFormat("%9s %9s %9s", Count(times.per_second), Seconds(times.p50_seconds),
                         Seconds(times.p99_seconds));
}

void AddStages(const Activity& a, Lines& to) {
  to.push_back(absl::StrFormat("%-10s %9s %9s %9s  %9s %9s %9s", "stage", "forward/s", "p50", "p99", "backward/s",
                               "p50", "p99"));
  for (const char* stage : kStages) {
    to.push_back(absl::StrFormat("%-10s %s  %s", stage, Times(a.stages.at("forward").at(stage)),
                                 Times(a.stages.at("backward").at(stage))));
  }
}

void AddRpcs(const Activity& a, Lines& to) {
  to.push_back(absl::StrFormat("%-20s %9s %9s %9s", "rpc", "a second", "p50", "p99"));
  for (const auto& [method, times] : a.rpcs) to.push_back(absl::StrFormat("%-20s %s", method, Times(times)));
  to.push_back("");
  to.push_back(absl::StrCat("failed     ", Percent(a.failed_ratio), " of the rpcs"));
  for (const auto& [reason, rate] : a.failures) {
    to.push_back(absl::StrFormat("%-20s %9s", reason, Count(rate)));
  }
}

std::string Heading(const TopReport& report) {
  const ServedModel& model = report.model;
  const std::string what = absl::StrCat(report.target, "  ", model.model_type, " in ",
                                        std::string(Name(model.compute_dtype)), model.frozen ? ", frozen" : "");
  return absl::StrCat("shardmlpctl top  ", what, "  ", Clock(report.time), "  over ", Seconds(report.activity.seconds));
}

}  // namespace

std::string TopLineHeading() {
  return absl::StrFormat("%-8s %8s %8s %6s %6s %9s %11s %7s %12s %12s %9s %7s %10s\n", "time", "step", "sessions",
                         "calls", "queued", "busy", "rows/s", "FLOP/s", "recomputed", "received/s", "sent/s", "failed",
                         "resident");
}

std::string TopLine(const TopReport& report) {
  if (!report.reached.ok()) {
    return absl::StrCat(Clock(report.time), " not reached for ", Whole(report.away), ": ",
                        std::string(report.reached.message()), "\n");
  }
  const Activity& a = report.activity;
  return absl::StrFormat("%-8s %8d %8s %6d %6d %9s %11s %7s %12s %12s %9s %7s %10s\n", Clock(report.time), a.step,
                         Count(Sum(a.sessions)), a.open_calls, a.queued_tiles, Percent(a.busy_ratio),
                         Count(Sum(a.rows)), Count(Sum(a.flops)), Percent(a.recomputed_ratio),
                         Bytes(At(a.payload_bytes, "received")), Bytes(At(a.payload_bytes, "sent")),
                         Percent(a.failed_ratio), Bytes(a.resident_bytes));
}

std::vector<std::string> TopScreen(const TopReport& report) {
  Lines lines = {Heading(report), ""};
  if (!report.reached.ok()) {
    lines.back() = absl::StrCat("NOT REACHED for ", Whole(report.away), ": ", std::string(report.reached.message()));
    lines.push_back("what it did before:");
  } else if (report.away > absl::ZeroDuration()) {
    lines.back() = absl::StrCat("back after ", Whole(report.away));
  }
  AddState(report.activity, lines);
  AddMemory(report.activity, lines);
  AddSessions(report.activity, report.model, lines);
  lines.push_back("");
  AddStages(report.activity, lines);
  lines.push_back("");
  AddRpcs(report.activity, lines);
  return lines;
}

}  // namespace shardmlp
