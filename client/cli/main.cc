// shardmlpctl: looks at a server, watches it, verifies it, saves and restores its checkpoints, and drains it.
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cpp/client.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

enum ExitCode { kDone = 0, kNotAllWell = 1, kUsage = 2, kFailed = 3, kTimedOut = 4 };

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
  const absl::StatusOr<bool> within = Verify(client, *layers, line.rows, std::cout);
  if (!within.ok()) return Report(within.status());
  return *within ? kDone : kNotAllWell;
}

int RunDrain(Client& client, const CommandLine& line) {
  const absl::StatusOr<bool> whole = Drain(client, line.timeout, line.json, std::cerr, std::cout);
  if (whole.ok()) return *whole ? kDone : kNotAllWell;
  Report(whole.status());
  return absl::IsDeadlineExceeded(whole.status()) ? kTimedOut : kFailed;
}

int Run(const CommandLine& line) {
  ClientOptions options;
  options.connect_timeout = line.connect_timeout;
  options.credentials = line.credentials;
  if (line.command == "drain") options.retry.budget = absl::ZeroDuration();  // a server that is gone is no failure
  if (line.command == "top")
    return Report(Top(line.target, options, {line.interval, line.count, line.json}, std::cout));
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
