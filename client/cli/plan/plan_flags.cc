#include "client/cli/plan/plan_flags.h"

#include <CLI/CLI.hpp>
#include <string>

#include "client/cli/flags.h"

namespace shardmlp {
namespace {

constexpr int64_t kMost = 1 << 20;  // servers, trainers

}  // namespace

void AddPlanFlags(CLI::App& app, PlanFlags& flags) {
  app.add_option("--model", flags.model,
                 "Hugging Face folder, of which config.json is enough: plan for it by arithmetic (default: measure the "
                 "server at --target, predict what it does under load, and load it).")
      ->type_name("FOLDER");
  AddCountFlag(app, "--servers", flags.servers, "Servers that the layers are spread over (default: 1).", kMost);
  AddCountFlag(app, "--trainers", flags.trainers, "Trainers, each with a link of its own (default: 1).", kMost);
  AddNumberFlag(app, "--server-tflops", flags.server_tflops, "TFLOP/s that a server's device achieves in --dtype.");
  AddNumberFlag(app, "--trainer-tflops", flags.trainer_tflops, "TFLOP/s that a trainer's device achieves.");
  AddNumberFlag(app, "--link-gbps", flags.link_gbps, "Gbit/s of the link, each way.");
  AddTimeFlag(app, "--rtt", flags.round_trip, "Round trip over it (default: 200us).");
  AddBytesFlag(app, "--server-memory", flags.server_memory, "Memory of each server's device.");
  AddSwitch(app, "--gpu", flags.gpu, "It is a GPU's, apart from the host's.");
  AddBytesFlag(app, "--trainer-memory", flags.trainer_memory, "Memory that a trainer could have for MLPs.");
  AddCountFlag(app, "--sequence", flags.sequence, "Tokens that attend to each other (default: 2048).");
  AddDTypeFlag(app, "--dtype", flags.dtype, "Of the servers' weights and arithmetic (default: f32).");
  AddDTypeFlag(app, "--wire-dtype", flags.wire_dtype, "What activations travel as (default: --dtype).");
  AddSwitch(app, "--frozen", flags.frozen, "As the servers' flag: input gradients alone.");
  AddBytesFlag(app, "--workspace-bytes", flags.workspace_bytes, "As the servers' flag.");
  AddBytesFlag(app, "--stash-bytes", flags.stash_bytes, "As the servers' flag.");
  AddCountFlag(app, "--max-calls", flags.max_calls, "As the servers' flag.");
  AddCountFlag(app, "--clients", flags.clients, "Clients that load the server at --target (default: 1).", kMost);
  AddTimeFlag(app, "--duration", flags.duration, "Of each load of it (default: 5s).");
}

const char* PlanExamples() {
  return R"(With --model it connects nowhere, and takes --server-tflops, --trainer-tflops and --link-gbps. Without, it measures
round trip, link and the server's rate by single calls, says what they should add up to, and loads the server as bench does.
BYTES are 1048576, 512KiB or 4GiB; TIME is 500us, 30s or 5m.

Examples:
  shardmlpctl plan --model=llama-8b --dtype=bf16 --server-tflops=300 --trainer-tflops=40 --link-gbps=25
  shardmlpctl plan --model=llama-8b --servers=2 --server-memory=80GiB --gpu ... --json | jq .recommendation
  shardmlpctl --target=gpu-box:50051 plan --rows=8192 --clients=2

Exit codes: 0 done; 1 calls failed while it was measured; 2 the command line is wrong; 3 the server can't be reached or
refused, or the model can't be served.)";
}

}  // namespace shardmlp
