#include "server/options.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <climits>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/status.h"
#include "server/options_check.h"
#include "server/sync/replica_rank.h"

namespace shardmlp {
namespace {

using absl::string_view;

// A shorter time ends while a message is on its way; a longer one is none.
constexpr absl::Duration kMinTime = absl::Milliseconds(100);
constexpr absl::Duration kMinLease = absl::Seconds(1);
constexpr absl::Duration kMaxTime = absl::Hours(24);
constexpr absl::Duration kMinHeartbeat = absl::Milliseconds(10);
constexpr int kMaxThreads = 4096;
constexpr int kMaxReplicas = 1024;
constexpr int kNoRank = -1;
constexpr int kRankOfPod = -2;
constexpr int64_t kMaxSessions = 1 << 16;

absl::Status Invalid(string_view message) {
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, message);
}

// "0-15", or "3" alone: first and last, inclusive. False for anything else.
bool ParseLayers(string_view text, std::optional<std::pair<int, int>>& layers) {
  const std::vector<string_view> ends = absl::StrSplit(text, '-');
  int first = 0;
  int last = 0;
  if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &first) || !absl::SimpleAtoi(ends.back(), &last) ||
      first < 0 || last < first) {
    return false;
  }
  layers = {first, last};
  return true;
}

// "auto", "cpu", "cuda" or "cuda:1". False for anything else.
bool ParseDevice(string_view text, DeviceOptions& device) {
  device.gpu = 0;
  if (absl::ConsumePrefix(&text, "cuda:")) {
    device.kind = DeviceKind::kCuda;
    return absl::SimpleAtoi(text, &device.gpu) && device.gpu >= 0;
  }
  if (text != "auto" && text != "cpu" && text != "cuda") return false;
  device.kind = text == "auto" ? DeviceKind::kAuto : text == "cpu" ? DeviceKind::kCpu : DeviceKind::kCuda;
  return true;
}

// "pod" or a number. False for anything else.
bool ParseRank(string_view text, int& rank) {
  if (text == "pod") {
    rank = kRankOfPod;
    return true;
  }
  return absl::SimpleAtoi(text, &rank) && rank >= 0 && rank < kMaxReplicas;
}

// The flags of a command line, which fill `options` while CLI11 parses it. CLI11 throws what it finds wrong.
class Flags {
 public:
  explicit Flags(ServerOptions& options)
      : app_("Owns the MLP weights of a transformer and computes with them.", "shardmlp-server") {
    app_.set_help_flag("--help", "Print this.");
    app_.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    app_.footer("BYTES are 1048576, 512KiB, 256MiB or 4GiB; TIME is 500ms, 30s or 5m.");
    AddModel(options);
    AddService(options);
    AddSecurity(options);
    AddResources(options);
    AddReplicas(options.replicas);
    AddChoice("--sum-by", options.sum_by, {{"auto", SumBy::kAuto}, {"gloo", SumBy::kGloo}, {"nccl", SumBy::kNccl}},
              "How replicas sum gradients: gloo, nccl (each on a GPU of its own), or nccl on GPUs where it is found "
              "(default: auto).");
    AddTimes(options);
    AddLog(options.log);
    AddSwitch("--check-config", options.check_config,
              "Check the flags against each other, and the files that they name, say what is wrong, and end.");
  }

  CLI::App& app() { return app_; }

 private:
  // Flags by what their values are. `value` stands for one in Usage.
  template <typename Field>
  CLI::Option* Add(const char* name, const char* value, Field& field, const char* help) {
    return app_.add_option(name, field, help)->type_name(value);
  }
  // `parse` fills the field, or says false where the text is not as `expected`.
  template <typename Field, typename Parse>
  void AddParsed(const char* name, const char* value, Field& field, Parse parse, const std::string& expected,
                 const char* help) {
    const auto set = [=, &field](const std::string& text) {
      if (!parse(text, field)) {
        throw CLI::ValidationError(name, absl::StrCat("got \"", text, "\", expected ", expected));
      }
    };
    app_.add_option_function<std::string>(name, set, help)->type_name(value);
  }
  // Nothing is no file: it would mean none, where one was asked for.
  void AddFile(const char* name, std::string& field, const char* help) {
    const auto parse = [](const std::string& text, std::string& path) {
      path = text;
      return !text.empty();
    };
    AddParsed(name, "FILE", field, parse, "a file", help);
  }
  template <typename Field>
  void AddChoice(const char* name, Field& field, const std::map<std::string, Field>& choices, const char* help) {
    const auto set = [=, &field](const std::string& text) { field = choices.at(text); };
    const auto name_of = [](std::string* out, const auto& choice) { out->append(choice.first); };
    app_.add_option_function<std::string>(name, set, help)
        ->type_name(absl::StrJoin(choices, "|", name_of))
        ->check(CLI::IsMember(choices).description(""));
  }
  void AddSwitch(const char* name, bool& field, const char* help) {
    app_.add_flag(name, field, help)->check(CLI::IsMember({"true", "false"}).description(""));
  }
  void AddBytes(const char* name, int64_t& field, int64_t min, int64_t max, const char* help) {
    Add(name, "BYTES", field, help)
        ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true).description(""))
        ->check(CLI::Range(min, max).description(""));
  }
  template <typename Field>
  void AddCount(const char* name, Field& field, Field max, const char* help) {
    Add(name, "N", field, help)->check(CLI::Range(Field{1}, max).description(""));
  }
  void AddTime(const char* name, absl::Duration& field, absl::Duration min, const char* help) {
    const auto parse = [min](string_view text, absl::Duration& time) {
      return absl::ParseDuration(text, &time) && time >= min && time <= kMaxTime;
    };
    AddParsed(name, "TIME", field, parse,
              absl::StrCat("a time of ", absl::FormatDuration(min), " to ", absl::ToInt64Hours(kMaxTime),
                           "h, such as 30s or 5m"),
              help);
  }

  void AddModel(ServerOptions& o) {
    Add("--model", "FOLDER", o.model_path, "Hugging Face folder: config.json and safetensors. Required.");
    AddParsed("--layers", "0-15", o.model.layers, ParseLayers, "the first and the last layer, such as 0-15",
              "Layers to serve, first and last (default: all).");
    AddChoice("--dtype", o.model.dtype, {{"f32", DType::kF32}, {"bf16", DType::kBF16}, {"f64", DType::kF64}},
              "Element type of weights and arithmetic (default: f32).");
    AddSwitch("--frozen", o.engine.frozen, "Input gradients alone: no gradient or optimizer memory.");
    Add("--checkpoint-dir", "FOLDER", o.checkpoint_dir,
        "Where checkpoints are kept; made where it is missing (default: none).");
    Add("--drain-checkpoint", "NAME", o.drain_checkpoint,
        "Checkpoint to save, in place of an earlier one, once SIGTERM has drained the server (default: none).");
    Add("--restore", "NAME", o.restore,
        "Checkpoint to start from; \"latest\" takes the latest, if there is one, and refuses one that is damaged.");
  }

  void AddService(ServerOptions& o) {
    Add("--listen", "ADDRESS", o.rpc.listen,
        "host:port or unix:/path, or several with commas; may be repeated; port 0 takes a free one (default: "
        "127.0.0.1:50051).")
        ->delimiter(',')
        ->allow_extra_args(false)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    Add("--metrics-address", "ADDRESS", o.metrics_address,
        "Where Prometheus reads /metrics; empty for nowhere (default: 127.0.0.1:9464).");
    Add("--health-listen", "ADDRESS", o.rpc.health_listen,
        "host:port of gRPC health alone, in plaintext and on a thread of its own, for probes that know no TLS "
        "(default: none).");
  }

  void AddSecurity(ServerOptions& o) {
    AddFile("--tls-cert", o.rpc.tls.cert,
            "PEM: the server's certificate, and those between it and its CA. With it, every address but Unix sockets "
            "is TLS. This and the files below are read again when they change.");
    AddFile("--tls-key", o.rpc.tls.key, "PEM: the certificate's key.");
    AddFile("--tls-client-ca", o.rpc.tls.ca, "PEM: clients need a certificate of one of these CAs.");
    AddFile("--token-file", o.rpc.token_file,
            "A token a line: each rpc but health needs one of them, as \"authorization: Bearer TOKEN\".");
    AddSwitch("--allow-drain", o.rpc.allow_drain,
              "Let any client have the server drain and end (shardmlpctl drain), not those with a token or certificate "
              "alone.");
    AddSwitch(
        "--insecure-listen-anywhere", o.rpc.insecure_listen_anywhere,
        "Allow addresses that are not loopback where TLS, or both --tls-client-ca and --token-file, are missing, and "
        "replicas that meet without --replica-ca there, or past --tls-client-ca and --token-file.");
  }

  void AddResources(ServerOptions& o) {
    AddParsed("--device", "auto|cpu|cuda|cuda:N", o.device, ParseDevice, "auto, cpu, cuda, or cuda:N for GPU N",
              "What computes (default: auto, a GPU where there is one).");
    AddSwitch("--tf32", o.device.tf32, "On a GPU, f32 products on TF32 tensor cores: faster, and 10 bits of operands.");
    AddBytes("--workspace-bytes", o.engine.workspace_bytes, 1, kMaxWorkspaceBytes,
             "Memory of a tile, which sets its rows (default: what 1024 rows need).");
    AddBytes("--stash-bytes", o.engine.stash_bytes, 0, kMaxStashBytes,
             "Memory in which forwards leave their input for the backward, which then need not send it (default: 0).");
    AddBytes("--memory-bytes", o.device.memory_bytes, 1, std::numeric_limits<int64_t>::max(),
             "The device's memory that the plan may take (default: what the machine, its cgroup, or the GPU has).");
    AddCount("--max-calls", o.engine.max_call_count, kMaxCallCount,
             "Calls that may be open at once; each has its own staging; half are kept for trainers; 1 only where "
             "frozen (default: 8).");
    AddCount("--max-sessions", o.engine.max_session_count, kMaxSessions,
             "Sessions that may be open at once; half are kept for trainers; 1 only where frozen (default: 256).");
    AddCount("--threads", o.device.threads, kMaxThreads,
             "Threads that compute (default: as many as the process may run on).");
  }

  void AddReplicas(ReplicasOptions& o) {
    AddCount("--replicas", o.size, kMaxReplicas,
             "Servers of the same layers that are one to a run: each trainer has one of them (default: 1).");
    AddParsed("--rank", "N|pod", o.rank, ParseRank,
              absl::StrCat("0 to ", kMaxReplicas - 1, ", or \"pod\" in one of a StatefulSet's"),
              "This server's among them, from 0; \"pod\" takes the number at the end of the host's name, as a "
              "StatefulSet's pods have it.");
    Add("--coordinator", "ADDRESS", o.coordinator, "host:port where rank 0 listens for the others; the same on all.");
    AddFile("--replica-ca", o.tls.ca,
            "PEM: CAs of the replicas' own certificates, --tls-cert: they meet over TLS, and need one. Sums are "
            "plaintext.");
    AddChoice("--on-loss", o.on_loss, {{"wait", OnLoss::kWait}, {"continue", OnLoss::kContinue}},
              "After a loss, go on once all are there again, or with those that are left (rank 0's counts; default: "
              "wait).");
    Add("--sync-host", "HOST", o.sync_host,
        "Where the others connect to this one for sums (default: the address that leads to the coordinator).");
    AddTime("--replica-start-timeout", o.start_timeout, kMinTime,
            "How long the start waits for all of them (default: 10m).");
    AddTime("--replica-timeout", o.loss_timeout, kMinTime,
            "How long one may be silent before it is lost (default: 5s).");
    AddTime("--replica-heartbeat", o.heartbeat, kMinHeartbeat, "How often each is heard of at least (default: 1s).");
    AddTime("--sum-timeout", o.sum_timeout, kMinTime,
            "How long a sum waits for one of them that is not lost (default: 60s).");
  }

  void AddTimes(ServerOptions& o) {
    AddTime("--lease", o.engine.lease, kMinLease, "How long a session lives without a sign of it (default: 30s).");
    AddTime("--seal-timeout", o.engine.seal_timeout, kMinTime,
            "How long a seal waits for the other trainers (default: 5m).");
    AddTime("--stall-timeout", o.rpc.stall_timeout, kMinTime,
            "How long a call waits for a client that neither sends nor reads (default: 60s).");
    AddTime("--drain-timeout", o.drain_timeout, kMinTime,
            "How long open calls may go on after SIGTERM (default: 25s).");
  }

  void AddLog(LogOptions& log) {
    AddChoice("--log-level", log.level,
              {{"debug", LogLevel::kDebug},
               {"info", LogLevel::kInfo},
               {"warning", LogLevel::kWarning},
               {"error", LogLevel::kError}},
              "What is logged: this and worse (default: info).");
    AddChoice("--log-format", log.format, {{"text", LogFormat::kText}, {"json", LogFormat::kJson}},
              "A line an event on stderr (default: text).");
  }

  CLI::App app_;
};

// As CLI11's parse wants them: last first. It would take the next argument for the value of "--name=".
std::vector<std::string> LastFirst(absl::Span<const char* const> arguments) {
  std::vector<std::string> reversed;
  for (auto argument = arguments.rbegin(); argument != arguments.rend(); ++argument) {
    string_view text = *argument;
    if (absl::StartsWith(text, "--") && absl::ConsumeSuffix(&text, "=")) reversed.emplace_back();
    reversed.emplace_back(text);
  }
  return reversed;
}

std::string HostName() {
  char name[HOST_NAME_MAX + 1] = {};
  return gethostname(name, HOST_NAME_MAX) == 0 ? name : "";
}

// Fills in a pod's rank, and the certificate, which is the server's own; the server watches all of its files.
absl::Status CompleteReplicas(ServerOptions& options) {
  ReplicasOptions& replicas = options.replicas;
  replicas.tls.cert = options.rpc.tls.cert;
  replicas.tls.key = options.rpc.tls.key;
  options.rpc.replica_ca = replicas.tls.ca;
  if (replicas.rank == kRankOfPod) {
    const absl::StatusOr<int> rank = RankFromPodName(HostName());
    if (!rank.ok()) return Annotate(rank.status(), "--rank=pod");
    replicas.rank = *rank;
  }
  if (replicas.rank != kNoRank) return absl::OkStatus();
  if (replicas.size > 1) {
    return Invalid(absl::StrCat("--replicas=", replicas.size, " needs --rank: 0 to ", replicas.size - 1, ", or pod"));
  }
  replicas.rank = 0;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ServerOptions> ParseOptions(absl::Span<const char* const> arguments) {
  ServerOptions options;
  options.replicas.rank = kNoRank;
  Flags flags(options);
  try {
    flags.app().parse(LastFirst(arguments));
  } catch (const CLI::ParseError& error) {
    return Invalid(absl::StrCat(error.what(), "; --help lists all flags"));
  }
  SHARDMLP_RETURN_IF_ERROR(CompleteReplicas(options));
  if (!options.check_config) SHARDMLP_RETURN_IF_ERROR(Validate(options));
  return options;
}

absl::Status Validate(const ServerOptions& options) {
  const std::vector<std::string> contradictions = Contradictions(options);
  if (contradictions.empty()) return absl::OkStatus();
  return Invalid(absl::StrJoin(contradictions, "; "));
}

std::string Usage() {
  ServerOptions options;
  return Flags(options).app().help();
}

}  // namespace shardmlp
