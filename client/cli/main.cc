// shardmlpctl: looks at a server, verifies it, and saves and restores its checkpoints.
#include <algorithm>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cli/commands.h"
#include "client/cpp/client.h"
#include "kernels/status.h"

ABSL_FLAG(std::string, target, "localhost:50051", "host:port or unix:/path");
ABSL_FLAG(bool, json, false, "info: write JSON");
ABSL_FLAG(std::string, layers, "", "verify: layers such as 0-3,7; all where empty");
ABSL_FLAG(int64_t, rows, 16, "verify: rows a layer");
ABSL_FLAG(absl::Duration, connect_timeout, absl::Seconds(10), "how long to try to reach the server");

namespace shardmlp {
namespace {

constexpr absl::string_view kHelp = R"(shardmlpctl: a look at a shardmlp server

  shardmlpctl [FLAGS] info                      what it serves, its memory, its trainers, its step
  shardmlpctl [FLAGS] verify                    compares its results with f64 computed here
  shardmlpctl [FLAGS] checkpoint save NAME      saves weights and optimizer state as of the last step
  shardmlpctl [FLAGS] checkpoint restore NAME   goes back to them; ends the open attempt
  shardmlpctl [FLAGS] checkpoint list           oldest first

Flags:
  --target=localhost:50051    host:port or unix:/path
  --connect_timeout=10s       how long to try to reach it
  --json                      info: write JSON
  --layers=0-3,7              verify: these layers; all by default
  --rows=16                   verify: rows a layer

Examples:
  shardmlpctl --target=gpu-box:50051 info
  shardmlpctl --target=unix:/run/shardmlp.sock --json info | jq .position.step
  shardmlpctl verify --layers=0,29 --rows=4
  shardmlpctl checkpoint save before-warmup

Exit codes: 0 done; 1 verify found an error above its bound; 2 the command line is wrong; 3 the server can't be reached
or refused.
)";

enum ExitCode { kDone = 0, kAboveBound = 1, kUsage = 2, kFailed = 3 };

int Report(const absl::Status& status) {
  if (status.ok()) return kDone;
  std::cerr << "shardmlpctl: " << status.message() << " [" << absl::StatusCodeToString(status.code());
  if (const Reason reason = ReasonOf(status); reason != Reason::kUnspecified) std::cerr << ", " << Name(reason);
  std::cerr << "]\n";
  return status.code() == absl::StatusCode::kInvalidArgument ? kUsage : kFailed;
}

int RunVerify(Client& client) {
  const absl::StatusOr<std::vector<ClientLayer>> layers = SelectLayers(client.model(), absl::GetFlag(FLAGS_layers));
  if (!layers.ok()) return Report(layers.status());
  const absl::StatusOr<bool> within = Verify(client, *layers, absl::GetFlag(FLAGS_rows), std::cout);
  if (!within.ok()) return Report(within.status());
  return *within ? kDone : kAboveBound;
}

bool IsCommand(const std::vector<std::string>& arguments) {
  const size_t count = arguments.size();
  if (count == 1) return arguments[0] == "info" || arguments[0] == "verify";
  if (count < 2 || arguments[0] != "checkpoint") return false;
  const std::string& action = arguments[1];
  return (action == "list" && count == 2) || ((action == "save" || action == "restore") && count == 3);
}

int Run(const std::vector<std::string>& arguments) {
  if (!IsCommand(arguments) || absl::GetFlag(FLAGS_rows) < 1) {
    std::cerr << kHelp;
    return kUsage;
  }
  const std::string& command = arguments.front();
  ClientOptions options;
  options.connect_timeout = absl::GetFlag(FLAGS_connect_timeout);
  const absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(absl::GetFlag(FLAGS_target), options);
  if (!client.ok()) return Report(client.status());
  if (command == "verify") return RunVerify(**client);
  if (command == "checkpoint") {
    const std::string name = arguments.size() == 3 ? arguments[2] : "";
    return Report(RunCheckpoint(**client, arguments[1], name, std::cout));
  }
  const auto print = absl::GetFlag(FLAGS_json) ? PrintInfoAsJson : PrintInfo;
  print((*client)->model(), std::cout);
  return kDone;
}

}  // namespace
}  // namespace shardmlp

int main(int argc, char** argv) {
  const auto asks_for_help = [](absl::string_view argument) {
    return argument == "--help" || argument == "-h" || argument == "help";
  };
  if (std::any_of(argv + 1, argv + argc, asks_for_help)) {
    std::cout << shardmlp::kHelp;
    return shardmlp::kDone;
  }
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  return shardmlp::Run({arguments.begin() + 1, arguments.end()});
}
