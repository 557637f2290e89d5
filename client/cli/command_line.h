// shardmlpctl's command line.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cli/bench/bench_flags.h"
#include "client/cli/plan/plan_flags.h"
#include "client/cpp/options.h"

namespace shardmlp {

struct CommandLine {
  std::string target = "localhost:50051";  // host:port or unix:/path
  absl::Duration connect_timeout = absl::Seconds(10);
  ClientCredentials credentials;
  bool json = false;                           // info, top, drain, bench and plan
  absl::Duration interval = absl::Seconds(2);  // top
  int64_t count = 0;                           // top: of reports; 0: endless
  absl::Duration timeout = absl::Minutes(10);  // drain
  std::string layers;                          // verify, bench and plan: as SelectLayers takes them
  int64_t rows = 0;                            // verify: a layer; bench and plan: a call; 0: the command's default
  std::string command;                         // "info", "top", "verify", "checkpoint", "bench", "plan" or "drain"
  std::string checkpoint_action;               // checkpoint: "save", "restore" or "list"
  std::string checkpoint_name;                 // save and restore
  BenchFlags bench;
  PlanFlags plan;
};

// Flags may stand before or behind the command. INVALID_ARGUMENT, naming what is unknown, missing or has a bad value.
// "--help" is the caller's to look for.
absl::StatusOr<CommandLine> ParseCommandLine(absl::Span<const char* const> arguments);

// What --help prints: of the command among the arguments, or of the whole where there is none.
std::string Usage(absl::Span<const char* const> arguments);

}  // namespace shardmlp
