// shardmlpctl: looks at a server, watches, verifies and loads it, saves and restores its checkpoints, drains it, and
// plans servers to be.
#include <unistd.h>

#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/cli/bench/bench.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/layers.h"
#include "client/cli/plan/measured_plan.h"
#include "client/cli/plan/plan_report.h"
#include "client/cli/stop.h"
#include "client/cli/top/top.h"
#include "client/cli/verify/verify.h"
#include "client/cpp/client.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

enum ExitCode { kDone = 0, kNotAllWell = 1, kUsage = 2, kFailed = 3, kTimedOut = 4 };

constexpr int64_t kDefaultVerifyRows = 16;

int Report(const absl::Status& status) {
  if (status.ok()) return kDone;
  std::cerr << "shardmlpctl: " << status.message() << " [" << absl::StatusCodeToString(status.code());
  if (const Reason reason = ReasonOf(status); reason != Reason::kUnspecified) std::cerr << ", " << Name(reason);
  std::cerr << "]\n";
  return status.code() == absl::StatusCode::kInvalidArgument ? kUsage : kFailed;
}

int RunVerify(Client& client, const CommandLine& line) {
  const absl::StatusOr<std::vector<ClientLayer>> layers = SelectLayers(client.model(), line.layers);
  if (!layers.ok()) return Report(layers.status());
  const int64_t rows = line.rows > 0 ? line.rows : kDefaultVerifyRows;
  const absl::StatusOr<bool> within = Verify(client, *layers, rows, std::cout);
  if (!within.ok()) return Report(within.status());
  return *within ? kDone : kNotAllWell;
}

int RunDrain(Client& client, const CommandLine& line) {
  const absl::StatusOr<bool> whole = Drain(client, line.timeout, line.json, std::cerr, std::cout);
  if (whole.ok()) return *whole ? kDone : kNotAllWell;
  Report(whole.status());
  return absl::IsDeadlineExceeded(whole.status()) ? kTimedOut : kFailed;
}

std::ostream* Progress() { return isatty(STDERR_FILENO) != 0 ? &std::cerr : nullptr; }

int ExitCodeOf(const LoadTotals& load) { return load.failed_calls() == 0 ? kDone : kNotAllWell; }

int RunBench(const CommandLine& line, const ClientOptions& options) {
  const std::string& plot = line.bench.plot;
  if (!plot.empty()) {
    if (const absl::Status gnuplot = CheckGnuplot(); !gnuplot.ok()) return Report(gnuplot);
  }
  NoteStopSignals();
  const int64_t rows = line.rows > 0 ? line.rows : kDefaultBenchRows;
  const absl::StatusOr<BenchReport> report = Bench(line.target, options, line.layers, rows, line.bench, Progress());
  if (!report.ok()) return Report(report.status());
  const auto print = line.json ? PrintBenchAsJson : PrintBench;
  print(*report, std::cout);
  if (!plot.empty()) {
    if (const absl::Status drawn = PlotBench(*report, plot); !drawn.ok()) return Report(drawn);
  }
  return ExitCodeOf(report->measured);
}

int RunPlan(const CommandLine& line, ClientOptions options) {
  const int64_t rows = line.rows > 0 ? line.rows : kDefaultPlanRows;
  if (!line.plan.model.empty()) {
    const absl::StatusOr<PlanReport> plan = MakePlan(line.plan, rows);
    if (!plan.ok()) return Report(plan.status());
    const auto print = line.json ? PrintPlanAsJson : PrintPlan;
    print(*plan, std::cout);
    return kDone;
  }
  NoteStopSignals();
  options.interrupted = StopSignalled;
  const absl::StatusOr<MeasuredPlan> plan = MeasurePlan(line.target, options, line.layers, rows, line.plan, Progress());
  if (!plan.ok()) return Report(plan.status());
  const auto print = line.json ? PrintMeasuredPlanAsJson : PrintMeasuredPlan;
  print(*plan, std::cout);
  return ExitCodeOf(plan->load.measured);
}

int Run(const CommandLine& line) {
  ClientOptions options;
  options.connect_timeout = line.connect_timeout;
  options.credentials = line.credentials;
  if (line.command == "bench") return RunBench(line, options);
  if (line.command == "plan") return RunPlan(line, options);
  if (line.command == "top") {
    return Report(Top(line.target, options, {line.interval, line.count, line.json}, std::cout));
  }
  if (line.command == "drain") options.retry.budget = absl::ZeroDuration();  // a server that is gone is no failure
  const absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(line.target, options);
  if (!client.ok()) return Report(client.status());
  if (line.command == "drain") return RunDrain(**client, line);
  if (line.command == "verify") return RunVerify(**client, line);
  if (line.command == "checkpoint") {
    return Report(RunCheckpoint(**client, line.checkpoint_action, line.checkpoint_name, std::cout));
  }
  const auto print = line.json ? PrintInfoAsJson : PrintInfo;
  print((*client)->model(), std::cout);
  return kDone;
}

int Main(const std::vector<const char*>& arguments) {
  for (const absl::string_view argument : arguments) {
    if (argument == "--help" || argument == "-h" || argument == "help") {
      std::cout << Usage(arguments);
      return kDone;
    }
  }
  const absl::StatusOr<CommandLine> line = ParseCommandLine(arguments);
  return line.ok() ? Run(*line) : Report(line.status());
}

}  // namespace
}  // namespace shardmlp

int main(int argc, char** argv) { return shardmlp::Main({argv + 1, argv + argc}); }
