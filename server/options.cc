#include "server/options.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/status.h"
#include "server/flag_values.h"
#include "server/rpc/listen_address.h"

namespace shardmlp {
namespace {

using absl::string_view;

struct Flag {
  string_view name;   // without the dashes
  string_view value;  // what its value is, for Usage; empty for a switch
  string_view help;
  absl::Status (*set)(string_view text, ServerOptions& options);
};

template <typename T, typename Field>
absl::Status Assign(absl::StatusOr<T> value, Field& field) {
  if (value.ok()) field = *std::move(value);
  return value.status();
}

absl::Status Assign(string_view text, std::string& field) {
  field = std::string(text);
  return absl::OkStatus();
}

absl::Status AddAddresses(string_view text, ServerOptions& options) {
  for (const string_view address : absl::StrSplit(text, ',')) options.rpc.listen.emplace_back(address);
  return absl::OkStatus();
}

const std::vector<Flag>& Flags() {
  using Options = ServerOptions;
  static const std::vector<Flag> flags = {
      {"model", "FOLDER", "Hugging Face folder: config.json and safetensors. Required.",
       [](string_view text, Options& o) { return Assign(text, o.model_path); }},
      {"layers", "0-15", "Layers to serve, first and last (default: all).",
       [](string_view text, Options& o) { return Assign(ParseLayers(text), o.model.layers); }},
      {"dtype", "f32|bf16|f64", "Element type of weights and arithmetic (default: f32).",
       [](string_view text, Options& o) { return Assign(ParseComputeDType(text), o.model.dtype); }},
      {"frozen", "", "Input gradients alone: no gradient or optimizer memory.",
       [](string_view text, Options& o) { return Assign(ParseSwitch(text), o.engine.frozen); }},
      {"listen", "ADDRESS,...",
       "host:port or unix:/path; may be repeated; port 0 takes a free one "
       "(default: 127.0.0.1:50051).",
       AddAddresses},
      {"insecure-listen-anywhere", "", "Allow addresses that are not loopback. There is no TLS and no password.",
       [](string_view text, Options& o) { return Assign(ParseSwitch(text), o.rpc.insecure_listen_anywhere); }},
      {"metrics-address", "ADDRESS", "Where Prometheus reads /metrics; empty for nowhere (default: 127.0.0.1:9464).",
       [](string_view text, Options& o) { return Assign(text, o.metrics_address); }},
      {"checkpoint-dir", "FOLDER", "Where checkpoints are kept; made where it is missing (default: none).",
       [](string_view text, Options& o) { return Assign(text, o.checkpoint_dir); }},
      {"restore", "NAME", "Checkpoint to start from; \"latest\" takes the latest, if there is one.",
       [](string_view text, Options& o) { return Assign(text, o.restore); }},
      {"workspace-bytes", "BYTES", "Memory of a tile, which sets its rows (default: what 1024 rows need).",
       [](string_view text, Options& o) { return Assign(ParseBytes(text), o.engine.workspace_bytes); }},
      {"memory-bytes", "BYTES", "Memory that the plan may take (default: what the machine, or its cgroup, has).",
       [](string_view text, Options& o) { return Assign(ParseBytes(text), o.backend.memory_bytes); }},
      {"max-calls", "N", "Calls that may be open at once; each has its own staging (default: 8).",
       [](string_view text, Options& o) { return Assign(ParseCount(text, 1), o.engine.max_call_count); }},
      {"max-sessions", "N", "Sessions that may be open at once (default: 256).",
       [](string_view text, Options& o) { return Assign(ParseCount(text, 1), o.engine.max_session_count); }},
      {"threads", "N", "Threads that compute (default: as many as the process may run on).",
       [](string_view text, Options& o) { return Assign(ParseCount(text, 1), o.backend.threads); }},
      {"lease", "TIME", "How long a session lives without a sign of it (default: 30s).",
       [](string_view text, Options& o) { return Assign(ParseDuration(text), o.engine.lease); }},
      {"seal-timeout", "TIME", "How long a seal waits for the other trainers (default: 5m).",
       [](string_view text, Options& o) { return Assign(ParseDuration(text), o.engine.seal_timeout); }},
      {"stall-timeout", "TIME", "How long a call waits for a client that neither sends nor reads (default: 60s).",
       [](string_view text, Options& o) { return Assign(ParseDuration(text), o.rpc.stall_timeout); }},
      {"drain-timeout", "TIME", "How long open calls may go on after SIGTERM (default: 25s).",
       [](string_view text, Options& o) { return Assign(ParseDuration(text), o.drain_timeout); }},
      {"log-level", "LEVEL", "debug, info, warning or error (default: info).",
       [](string_view text, Options& o) { return Assign(ParseLogLevel(text), o.log.level); }},
      {"log-format", "text|json", "A line an event on stderr (default: text).",
       [](string_view text, Options& o) { return Assign(ParseLogFormat(text), o.log.format); }},
  };
  return flags;
}

absl::Status Invalid(string_view message) {
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, message);
}

absl::StatusOr<const Flag*> FindFlag(string_view name) {
  const auto flag = std::find_if(Flags().begin(), Flags().end(), [&](const Flag& f) { return f.name == name; });
  if (flag == Flags().end()) return Invalid(absl::StrCat("unknown flag --", name, "; --help lists all"));
  return &*flag;
}

}  // namespace

absl::StatusOr<ServerOptions> ParseOptions(absl::Span<const char* const> arguments) {
  ServerOptions options;
  const std::vector<std::string> default_listen = std::exchange(options.rpc.listen, {});
  for (size_t i = 0; i < arguments.size(); ++i) {
    string_view argument = arguments[i];
    if (!absl::ConsumePrefix(&argument, "--")) {
      return Invalid(absl::StrCat("got \"", argument, "\", expected flags only; --help lists them"));
    }
    const std::vector<string_view> parts = absl::StrSplit(argument, absl::MaxSplits('=', 1));
    SHARDMLP_ASSIGN_OR_RETURN(const Flag* const flag, FindFlag(parts[0]));
    string_view text = "true";
    if (parts.size() == 2) {
      text = parts[1];
    } else if (!flag->value.empty()) {
      if (++i == arguments.size()) return Invalid(absl::StrCat("--", flag->name, " has no value"));
      text = arguments[i];
    }
    if (const absl::Status status = flag->set(text, options); !status.ok()) {
      return Invalid(absl::StrCat("--", flag->name, ": ", status.message()));
    }
  }
  if (options.rpc.listen.empty()) options.rpc.listen = default_listen;
  SHARDMLP_RETURN_IF_ERROR(Validate(options));
  return options;
}

absl::Status Validate(const ServerOptions& options) {
  if (options.model_path.empty()) return Invalid("--model is missing: the folder of the model to serve");
  for (const std::string& address : options.rpc.listen) {
    SHARDMLP_RETURN_IF_ERROR(CheckListenAddress(address, options.rpc.insecure_listen_anywhere));
  }
  if (!options.metrics_address.empty()) {
    SHARDMLP_RETURN_IF_ERROR(CheckListenAddress(options.metrics_address, options.rpc.insecure_listen_anywhere));
  }
  if (!options.restore.empty() && options.checkpoint_dir.empty()) {
    return Invalid(absl::StrCat("--restore=", options.restore, " needs --checkpoint-dir"));
  }
  // Else a seal would give up on a trainer that is dead before its lease says so.
  if (options.engine.seal_timeout < options.engine.lease) {
    return Invalid(absl::StrCat("--seal-timeout=", absl::FormatDuration(options.engine.seal_timeout),
                                " is below --lease=", absl::FormatDuration(options.engine.lease)));
  }
  return absl::OkStatus();
}

std::string Usage() {
  std::string usage =
      "shardmlp-server: owns the MLP weights of a transformer and computes with them.\n"
      "BYTES are 1048576, 512KiB, 256MiB or 4GiB; TIME is 500ms, 30s or 5m.\n\n";
  for (const Flag& flag : Flags()) {
    const std::string value = flag.value.empty() ? "" : absl::StrCat("=", flag.value);
    absl::StrAppendFormat(&usage, "  --%-34s %s\n", absl::StrCat(flag.name, value), flag.help);
  }
  return usage;
}

}  // namespace shardmlp
