#include "client/cli/bench/bench_flags.h"

#include <CLI/CLI.hpp>
#include <string>

#include "client/cli/flags.h"

namespace shardmlp {
namespace {

constexpr int64_t kMaxClients = 4096;
constexpr int64_t kMaxConnections = 64;
constexpr absl::Duration kDefaultDuration = absl::Seconds(10);

}  // namespace

absl::Duration BenchDuration(const BenchFlags& flags) {
  if (flags.duration > absl::ZeroDuration()) return flags.duration;
  return flags.calls > 0 ? absl::InfiniteDuration() : kDefaultDuration;
}

void AddBenchFlags(CLI::App& app, BenchFlags& flags) {
  AddCountFlag(app, "--clients", flags.clients, "Clients, each with a session (default: 1).", kMaxClients);
  AddCountFlag(app, "--connections", flags.connections, "Connections of each client (default: 1).", kMaxConnections);
  AddDTypeFlag(app, "--dtype", flags.dtype, "What activations travel as (default: what the server computes in).");
  AddSwitch(app, "--forward-only", flags.forward_only, "No backward calls.");
  AddSwitch(app, "--train", flags.train,
            "Backward with weight gradients, in train sessions whose step is discarded in the end; refused while a run "
            "trains there (default: read sessions, input gradients alone). No weight changes in either.");
  AddNumberFlag(app, "--rate", flags.rate,
                "Calls a second, due evenly (an open loop): latency counts from when a call was due, so that a server "
                "that stalls is charged for all that it held up (default: each client's next call is due once its last "
                "was answered).");
  AddTimeFlag(app, "--duration", flags.duration, "How long (default: 10s, or where --calls is given, no end).");
  AddCountFlag(app, "--calls", flags.calls, "End after so many calls, over all clients.");
  AddTimeFlag(app, "--warm-up", flags.warmup, "A load of that long ahead, which is not counted (default: 1s).");
  AddTimeFlag(app, "--retry", flags.retry,
              "Send a call that fails again for so long, as trainers do for a minute (default: 0s, count it).");
  AddBytesFlag(app, "--shard-bytes", flags.shard_bytes, "About so many in a message (default: as the server prefers).");
  app.add_option("--plot", flags.plot, "Draw latency by percentile into this PNG; takes gnuplot.")
      ->type_name("FILE.png");
}

const char* BenchExamples() {
  return R"(BYTES are 1048576, 512KiB or 4MiB; TIME is 500ms, 30s or 5m. Ctrl-C ends the load, and shows what was measured.

Examples:
  shardmlpctl bench --clients=4 --rows=2048
  shardmlpctl bench --rate=50 --clients=16 --duration=1m --plot=latency.png
  shardmlpctl bench --train --layers=0-3 --calls=200 --json | jq .forward.latency_seconds.p99

Exit codes: 0 done; 1 some calls failed; 2 the command line is wrong; 3 the server can't be reached or refused, or what is
needed here is missing.)";
}

}  // namespace shardmlp
