#include "client/cli/command_line.h"

#include <CLI/CLI.hpp>
#include <limits>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "client/cli/flags.h"

namespace shardmlp {
namespace {

constexpr char kFooter[] = R"(Examples:
  shardmlpctl --target=gpu-box:50051 info
  shardmlpctl --target=unix:/run/shardmlp.sock --json info | jq .position.step
  shardmlpctl top                                 # live; Ctrl-C ends it
  shardmlpctl top --json --interval=10s --count=6 | jq .rows_per_second
  shardmlpctl verify --layers=0,29 --rows=4
  shardmlpctl checkpoint save before-warmup
  shardmlpctl bench --clients=4 --rows=2048
  shardmlpctl plan --model=llama-8b --dtype=bf16 --server-tflops=300 --trainer-tflops=40 --link-gbps=25
  shardmlpctl --token-file=token drain --timeout=2m && echo gone

Exit codes: 0 done; 1 verify found an error above its bound, calls of bench failed, or a drained server had to cut calls off or
to leave a sealed step undecided; 2 the command line is wrong; 3 the server can't be reached, refused, or could not do it; 4
drain was not over in time.)";

// Those lines of the footer's examples that are of the command `name`.
std::string ExamplesOf(absl::string_view name) {
  std::string examples = "Examples:";
  for (const absl::string_view line : absl::StrSplit(kFooter, '\n')) {
    if (absl::StrContains(line, "shardmlpctl ") && absl::StrContains(line, absl::StrCat(" ", name))) {
      absl::StrAppend(&examples, "\n", line);
    }
  }
  return examples;
}

constexpr absl::Duration kLeastTime = absl::Milliseconds(1);

absl::Status Invalid(absl::string_view message) {
  return absl::InvalidArgumentError(absl::StrCat(message, "; --help tells more"));
}

void AddConnectionFlags(CLI::App& app, CommandLine& line) {
  app.add_option("--target", line.target, "host:port or unix:/path (default: localhost:50051).")->type_name("ADDRESS");
  AddTimeFlag(app, "--connect-timeout", line.connect_timeout, "How long to try to reach it (default: 10s).",
              kLeastTime);
  ClientCredentials& files = line.credentials;
  const auto add = [&app](const char* name, const char* variable, const char* value, std::string& field,
                          const char* help) { app.add_option(name, field, help)->envname(variable)->type_name(value); };
  add("--tls-ca", "SHARDMLP_TLS_CA", "FILE", files.ca_file, "PEM: the CA of the server's certificate; turns TLS on.");
  add("--tls-cert", "SHARDMLP_TLS_CERT", "FILE", files.cert_file, "PEM: a certificate of your own, if it wants one.");
  add("--tls-key", "SHARDMLP_TLS_KEY", "FILE", files.key_file, "PEM: the certificate's key.");
  add("--tls-server-name", "SHARDMLP_TLS_SERVER_NAME", "NAME", files.server_name,
      "What its certificate names, if not the target's host.");
  add("--token-file", "SHARDMLP_TOKEN_FILE", "FILE", files.token_file, "Its first line goes with every call.");
}

void AddJsonFlag(CLI::App& app, CommandLine& line) {
  app.add_flag("--json", line.json, "info, top, drain, bench, plan: write JSON; top an object a line.")
      ->check(CLI::IsMember({"true", "false"}).description(""));
}

void AddTopFlags(CLI::App& app, CommandLine& line) {
  AddTimeFlag(app, "--interval", line.interval, "Time between two reports, which rates are over (default: 2s).",
              kLeastTime);
  AddCountFlag(app, "--count", line.count, "End after so many reports (default: go on until Ctrl-C).");
}

void AddDrainFlags(CLI::App& app, CommandLine& line) {
  AddTimeFlag(app, "--timeout", line.timeout, "How long to wait until the server is gone (default: 10m).", kLeastTime);
}

void AddLayerFlags(CLI::App& app, CommandLine& line) {
  app.add_option("--layers", line.layers, "verify, bench, and plan of a server: these layers (default: all).")
      ->type_name("0-3,7");
  app.add_option("--rows", line.rows,
                 "verify: rows a layer (default: 16); bench and plan: rows a call (default: 1024, 4096).")
      ->type_name("N")
      ->check(CLI::Range(int64_t{1}, std::numeric_limits<int64_t>::max()).description(""));
}

void AddCheckpointActions(CLI::App& checkpoint, CommandLine& line) {
  checkpoint.require_subcommand(0, 1);
  const auto add = [&](const char* action, const char* help) {
    CLI::App* const added = checkpoint.add_subcommand(action, help);
    added->callback([&line, action] { line.checkpoint_action = action; });
    return added;
  };
  const auto add_name = [&line](CLI::App* action) {
    action->add_option("NAME", line.checkpoint_name, "The checkpoint.")->type_name("")->required();
  };
  add_name(add("save", "NAME: saves weights and optimizer state as of the last step."));
  add_name(add("restore", "NAME: goes back to them; ends the open attempt."));
  add_name(add("delete", "NAME: takes it off the server's disk."));
  add("list", "Oldest first.");
}

// Flags and commands, which fill `line` while CLI11 parses them. CLI11 throws what it finds wrong.
void AddAll(CLI::App& app, CommandLine& line) {
  app.set_help_flag("-h,--help", "Print this.");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.footer(kFooter);
  app.fallthrough();
  app.require_subcommand(0, 1);  // none is said below, after what stands in its place
  AddConnectionFlags(app, line);
  AddJsonFlag(app, line);
  AddLayerFlags(app, line);
  // A command inherits what is set above.
  app.add_subcommand("info", "What it serves, its memory, its trainers, its step.");
  AddTopFlags(*app.add_subcommand(
                  "top", "Shows live what it does: calls and their stages, FLOP/s, memory, sessions, steps, failures."),
              line);
  app.add_subcommand("verify", "Compares its results with f64 computed here.");
  AddCheckpointActions(*app.add_subcommand("checkpoint", "Saves, restores, deletes and lists checkpoints."), line);
  AddBenchFlags(*app.add_subcommand("bench", "Loads it, and says what it kept up: rates and latencies."), line.bench);
  AddPlanFlags(*app.add_subcommand("plan", "Memory and speed to expect: of servers to be, or of one that is there."),
               line.plan);
  AddDrainFlags(*app.add_subcommand(
                    "drain", "Has the server end as SIGTERM does, once its calls and step are over, and waits for it."),
                line);
  for (CLI::App* const command : app.get_subcommands({})) command->set_help_flag();
  app.callback([&app, &line] {
    for (const CLI::App* const command : app.get_subcommands()) line.command = command->get_name();
  });
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(absl::Span<const char* const> arguments) {
  CommandLine line;
  CLI::App app;
  AddAll(app, line);
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));  // it wants the last first
  } catch (const CLI::ParseError& error) {
    return Invalid(error.what());
  }
  if (line.command.empty()) {
    return Invalid("a command is missing: info, top, verify, checkpoint, bench, plan or drain");
  }
  if (line.command == "checkpoint" && line.checkpoint_action.empty()) {
    return Invalid("what to do is missing: checkpoint save, restore, delete or list");
  }
  return line;
}

std::string Usage(absl::Span<const char* const> arguments) {
  CommandLine line;
  CLI::App whole("A look at a shardmlp server.", "shardmlpctl");
  AddAll(whole, line);
  std::string name;
  for (const CLI::App* const command : whole.get_subcommands({})) {
    if (absl::c_linear_search(arguments, command->get_name())) name = command->get_name();
  }
  if (name.empty()) return whole.help("", CLI::AppFormatMode::All);
  // Flags may stand before a command, so that all of them are the whole's.
  CLI::App app(whole.get_subcommand(name)->get_description(), absl::StrCat("shardmlpctl ", name));
  app.set_help_flag("-h,--help", "Print this.");
  AddConnectionFlags(app, line);
  const bool loads = name == "bench" || name == "plan";
  if (name == "info" || name == "top" || name == "drain" || loads) AddJsonFlag(app, line);
  if (name == "verify" || loads) AddLayerFlags(app, line);
  if (name == "top") AddTopFlags(app, line);
  if (name == "drain") AddDrainFlags(app, line);
  if (name == "checkpoint") AddCheckpointActions(app, line);
  if (name == "bench") AddBenchFlags(app, line.bench);
  if (name == "plan") AddPlanFlags(app, line.plan);
  app.footer(name == "bench" ? BenchExamples() : name == "plan" ? PlanExamples() : ExamplesOf(name));
  return app.help("", CLI::AppFormatMode::All);
}

}  // namespace shardmlp
