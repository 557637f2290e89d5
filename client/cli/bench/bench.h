// `shardmlpctl bench`: loads a server, and says what it kept up.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/bench/bench_flags.h"
#include "client/cli/bench/load.h"
#include "client/cli/bench/remote_load.h"
#include "client/cpp/client.h"

namespace shardmlp {

struct BenchReport {
  std::string target;
  ServedModel model;
  LoadShape shape;
  BenchFlags flags;
  LoadTotals warm_up;
  LoadTotals measured;
  bool stopped = false;  // ahead of its end, by a signal

  // Of a layer: rows that went forward, and back where they did.
  double TokensPerSecond() const;
};

// Loads the layers that `layers` says, as SelectLayers takes it, with calls of `rows` rows. `progress`: where a line is
// written again and again; null: nowhere. Fails where no load could be made; calls that fail are counted.
absl::StatusOr<BenchReport> Bench(const std::string& target, ClientOptions options, const std::string& layers,
                                  int64_t rows, const BenchFlags& flags, std::ostream* progress);

// As a table, and as JSON.
void PrintBench(const BenchReport& report, std::ostream& out);
void PrintBenchAsJson(const BenchReport& report, std::ostream& out);

// FAILED_PRECONDITION where gnuplot, which draws, is not there.
absl::Status CheckGnuplot();
// Latency by percentile, as a PNG at `path`.
absl::Status PlotBench(const BenchReport& report, const std::string& path);

}  // namespace shardmlp
