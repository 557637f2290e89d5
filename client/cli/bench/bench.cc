#include "client/cli/bench/bench.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/cli/layers.h"
#include "client/cli/stop.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr char kClearLine[] = "\r\x1b[K";

void WriteProgress(std::ostream& out, absl::string_view phase, const LoadTotals& totals) {
  out << kClearLine
      << absl::StreamFormat("%s %.0f s: %d calls, %.1f a second, %d failed", phase,
                            absl::ToDoubleSeconds(totals.elapsed), totals.calls(),
                            static_cast<double>(totals.calls()) / absl::ToDoubleSeconds(totals.elapsed),
                            totals.failed_calls())
      << std::flush;
}

}  // namespace

double BenchReport::TokensPerSecond() const {
  const auto rows = static_cast<double>(measured.forward.cost.rows + measured.backward.cost.rows);
  return rows / (shape.forward_only ? 1 : 2) / absl::ToDoubleSeconds(measured.elapsed);
}

absl::StatusOr<BenchReport> Bench(const std::string& target, ClientOptions options, const std::string& layers,
                                  int64_t rows, const BenchFlags& flags, std::ostream* progress) {
  options.connections = static_cast<int>(flags.connections);
  options.shard_bytes = flags.shard_bytes;
  options.retry.budget = flags.retry;
  options.interrupted = StopSignalled;
  BenchReport report{.target = target, .model = {}, .shape = {}, .flags = flags, .warm_up = {}, .measured = {}};
  {
    SHARDMLP_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Client::Connect(target, options));
    report.model = client->model();
  }
  LoadShape& shape = report.shape;
  SHARDMLP_ASSIGN_OR_RETURN(shape.layers, SelectLayers(report.model, layers));
  shape.rows = rows;
  shape.dtype = flags.dtype.value_or(report.model.compute_dtype);
  shape.forward_only = flags.forward_only;
  shape.train = flags.train;
  SHARDMLP_ASSIGN_OR_RETURN(const std::vector<std::unique_ptr<LoadClient>> clients,
                            ConnectLoadClients(target, options, shape, static_cast<int>(flags.clients)));

  LoadOptions load{.pace = {.rate = flags.rate, .duration = flags.warmup}, .stopped = StopSignalled};
  const auto show = [&](absl::string_view phase) {
    if (progress == nullptr) return;
    load.progress = [=](const LoadTotals& totals) { WriteProgress(*progress, phase, totals); };
  };
  show("warming up");
  if (flags.warmup > absl::ZeroDuration()) report.warm_up = RunLoad(clients, load);
  show("measuring");
  load.pace.duration = BenchDuration(flags);
  if (flags.calls > 0) load.pace.call_count = flags.calls;
  report.measured = RunLoad(clients, load);
  report.stopped = StopSignalled();
  if (progress != nullptr) *progress << kClearLine << std::flush;
  return report;
}

}  // namespace shardmlp
