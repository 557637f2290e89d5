#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/bench/bench.h"
#include "client/cli/bench/bench_json.h"

namespace shardmlp {
namespace {

struct Percentile {
  const char* name;
  double quantile;
};
constexpr Percentile kPercentiles[] = {{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}, {"p99.9", 0.999}};

std::string Milliseconds(absl::Duration duration) {
  const double ms = absl::ToDoubleMilliseconds(duration);
  return absl::StrFormat("%.*f", ms < 10 ? 2 : ms < 1000 ? 1 : 0, ms);
}

// How the load was, in words.
std::string Describe(const BenchReport& report) {
  const BenchFlags& flags = report.flags;
  const LoadShape& shape = report.shape;
  const auto name_of = [](std::string* out, const ClientLayer& layer) { absl::StrAppend(out, layer.layer); };
  return absl::StrCat(flags.clients, flags.clients == 1 ? " client" : " clients",
                      flags.connections == 1 ? "" : absl::StrCat(" of ", flags.connections, " connections"), ", ",
                      flags.rate > 0 ? absl::StrFormat("%g calls a second", flags.rate) : std::string("closed loop"),
                      ", ", shape.rows, " rows a call in ", Name(shape.dtype), ", ",
                      shape.forward_only ? "forward alone"
                      : shape.train      ? "forward and backward with weight gradients"
                                         : "forward and backward of input gradients",
                      ", layers ", absl::StrJoin(shape.layers, ",", name_of));
}

void PrintKind(absl::string_view name, const KindTotals& kind, double seconds, std::ostream& out) {
  const auto rate = [seconds](double amount) { return amount / seconds; };
  out << absl::StreamFormat("%-9s %8d %9.1f %10.0f %9.1f %9.1f %9.1f", name, kind.calls,
                            rate(static_cast<double>(kind.calls)), rate(static_cast<double>(kind.cost.rows)),
                            rate(kind.cost.flops) / 1e9, rate(static_cast<double>(kind.cost.sent_bytes)) / 1e6,
                            rate(static_cast<double>(kind.cost.received_bytes)) / 1e6);
  for (const Percentile& percentile : kPercentiles) {
    out << absl::StreamFormat(" %8s", Milliseconds(kind.latencies.Quantile(percentile.quantile)));
  }
  out << absl::StreamFormat(" %8s\n", Milliseconds(kind.latencies.max()));
}

nlohmann::ordered_json KindAsJson(const KindTotals& kind, double seconds) {
  const auto rate = [seconds](auto amount) { return static_cast<double>(amount) / seconds; };
  nlohmann::ordered_json json = {{"calls", kind.calls},
                                 {"calls_per_second", rate(kind.calls)},
                                 {"tokens", kind.cost.rows},
                                 {"tokens_per_second", rate(kind.cost.rows)},
                                 {"flops", kind.cost.flops},
                                 {"flops_per_second", rate(kind.cost.flops)},
                                 {"sent_bytes", kind.cost.sent_bytes},
                                 {"sent_bytes_per_second", rate(kind.cost.sent_bytes)},
                                 {"received_bytes", kind.cost.received_bytes},
                                 {"received_bytes_per_second", rate(kind.cost.received_bytes)}};
  nlohmann::ordered_json& latency = json["latency_seconds"];
  latency["mean"] = absl::ToDoubleSeconds(kind.latencies.mean());
  for (const Percentile& percentile : kPercentiles) {
    latency[percentile.name] = absl::ToDoubleSeconds(kind.latencies.Quantile(percentile.quantile));
  }
  latency["max"] = absl::ToDoubleSeconds(kind.latencies.max());
  return json;
}

nlohmann::ordered_json LoadAsJson(const BenchReport& report) {
  const BenchFlags& flags = report.flags;
  nlohmann::ordered_json json = {{"clients", flags.clients},
                                 {"connections", flags.connections},
                                 {"rows", report.shape.rows},
                                 {"dtype", std::string(Name(report.shape.dtype))},
                                 {"forward_only", report.shape.forward_only},
                                 {"train", report.shape.train},
                                 {"loop", flags.rate > 0 ? "open" : "closed"},
                                 {"rate", flags.rate},
                                 {"shard_bytes", flags.shard_bytes}};
  json["layers"] = nlohmann::json::array();
  for (const ClientLayer& layer : report.shape.layers) json["layers"].push_back(layer.layer);
  return json;
}

}  // namespace

void PrintBench(const BenchReport& report, std::ostream& out) {
  const LoadTotals& measured = report.measured;
  const double seconds = absl::ToDoubleSeconds(measured.elapsed);
  out << absl::StreamFormat("server    %s: %s, computed in %s\n", report.target, report.model.model_type,
                            Name(report.model.compute_dtype));
  out << "load      " << Describe(report) << "\n";
  out << absl::StreamFormat("measured  %.1f s%s, after %d calls of warm-up\n\n", seconds,
                            report.stopped ? ", then stopped" : "", report.warm_up.calls());
  out << absl::StreamFormat("%-9s %8s %9s %10s %9s %9s %9s %44s\n", "", "", "", "", "", "MB/s", "MB/s",
                            "latency, ms          ");
  out << absl::StreamFormat("%-9s %8s %9s %10s %9s %9s %9s", "", "calls", "calls/s", "tokens/s", "GFLOP/s", "sent",
                            "received");
  for (const Percentile& percentile : kPercentiles) out << absl::StreamFormat(" %8s", percentile.name);
  out << absl::StreamFormat(" %8s\n", "max");
  PrintKind("forward", measured.forward, seconds, out);
  if (!report.shape.forward_only) PrintKind("backward", measured.backward, seconds, out);
  out << absl::StreamFormat("\n%.1f tokens a second through a layer%s, %.1f GFLOP/s with recompute\n",
                            report.TokensPerSecond(), report.shape.forward_only ? "" : ", forward and backward",
                            (measured.forward.cost.flops + measured.backward.cost.flops) / seconds / 1e9);
  if (measured.unsent_calls > 0) {
    out << absl::StreamFormat("%d calls were due and not sent: no client was free. Too slow for %g calls a second\n",
                              measured.unsent_calls, report.flags.rate);
  }
  for (const auto& [reason, failures] : measured.failures) {
    out << absl::StreamFormat("%d calls failed: %s: %s\n", failures.calls, reason, failures.first);
  }
}

nlohmann::ordered_json BenchAsJson(const BenchReport& report) {
  const LoadTotals& measured = report.measured;
  const double seconds = absl::ToDoubleSeconds(measured.elapsed);
  nlohmann::ordered_json json = {{"target", report.target},
                                 {"model_type", report.model.model_type},
                                 {"compute_dtype", std::string(Name(report.model.compute_dtype))},
                                 {"load", LoadAsJson(report)},
                                 {"warm_up",
                                  {{"calls", report.warm_up.calls()},
                                   {"failed_calls", report.warm_up.failed_calls()},
                                   {"seconds", absl::ToDoubleSeconds(report.warm_up.elapsed)}}},
                                 {"seconds", seconds},
                                 {"stopped", report.stopped},
                                 {"calls", measured.calls()},
                                 {"calls_per_second", static_cast<double>(measured.calls()) / seconds},
                                 {"tokens_per_second", report.TokensPerSecond()},
                                 {"forward", KindAsJson(measured.forward, seconds)},
                                 {"backward", KindAsJson(measured.backward, seconds)},
                                 {"unsent_calls", measured.unsent_calls},
                                 {"stopped_calls", measured.stopped_calls},
                                 {"failed_calls", measured.failed_calls()}};
  json["failures"] = nlohmann::json::object();
  for (const auto& [reason, failures] : measured.failures) {
    json["failures"][reason] = {{"calls", failures.calls}, {"first", failures.first}};
  }
  return json;
}

void PrintBenchAsJson(const BenchReport& report, std::ostream& out) { out << BenchAsJson(report).dump(2) << "\n"; }

}  // namespace shardmlp
