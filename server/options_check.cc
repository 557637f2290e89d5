#include "server/options_check.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/status.h"
#include "proto/client_times.h"
#include "proto/http2.h"
#include "server/engine/memory_plan.h"
#include "server/model/checkpoint.h"
#include "server/model/checkpoint_folder.h"
#include "server/model/model_folder.h"
#include "server/rpc/listen_address.h"
#include "server/rpc/tokens.h"

namespace shardmlp {
namespace {

using absl::string_view;

constexpr int64_t kFramingBytes = 64;  // of a message, beside its rows

// What is found, a sentence each.
class Findings {
 public:
  template <typename... Parts>
  void AddIf(bool wrong, const Parts&... parts) {
    if (wrong) found_.push_back(absl::StrCat(parts...));
  }
  void Add(const absl::Status& status) {
    if (!status.ok()) found_.emplace_back(status.message());
  }
  std::vector<std::string> Take() { return std::move(found_); }

 private:
  std::vector<std::string> found_;
};

struct Time {
  string_view flag;
  absl::Duration value;
};

std::string Name(const Time& time) { return absl::StrCat(time.flag, "=", absl::FormatDuration(time.value)); }

// Whether both can't be listened on.
bool Collide(string_view a, string_view b) {
  if (a == b) return !a.empty() && !absl::EndsWith(a, ":0");
  if (IsUnixSocket(a) || IsUnixSocket(b)) return false;
  const size_t a_colon = a.rfind(':');
  const size_t b_colon = b.rfind(':');
  if (a_colon == a.npos || b_colon == b.npos || a.substr(a_colon) != b.substr(b_colon)) return false;
  const auto is_all = [](string_view host) { return host == "0.0.0.0" || host == "[::]"; };
  return a.substr(a_colon) != ":0" && (is_all(a.substr(0, a_colon)) || is_all(b.substr(0, b_colon)));
}

// Whether strangers could join the replicas, whose weights are everybody's: where others reach the coordinator, or
// where clients have to show who they are and would not have to there.
bool MeetsStrangers(const ServerOptions& o) {
  return o.replicas.size > 1 && o.replicas.tls.ca.empty() && !o.replicas.coordinator.empty() &&
         (!IsLoopback(o.replicas.coordinator) || !o.rpc.tls.ca.empty() || !o.rpc.token_file.empty());
}

void CheckAddresses(const ServerOptions& o, Findings& found) {
  const bool anywhere = o.rpc.secure() || o.rpc.insecure_listen_anywhere;
  for (const std::string& address : o.rpc.listen) found.Add(CheckListenAddress(address, anywhere));
  if (!o.metrics_address.empty()) found.Add(CheckListenAddress(o.metrics_address, anywhere));
  if (!o.rpc.health_listen.empty()) found.Add(CheckListenAddress(o.rpc.health_listen, /*anywhere=*/true));

  std::vector<std::pair<string_view, string_view>> all;
  for (const std::string& address : o.rpc.listen) all.emplace_back("--listen", address);
  all.emplace_back("--metrics-address", o.metrics_address);
  all.emplace_back("--health-listen", o.rpc.health_listen);
  if (o.replicas.rank == 0) all.emplace_back("--coordinator", o.replicas.coordinator);
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = i + 1; j < all.size(); ++j) {
      const auto& [flag, address] = all[i];
      found.AddIf(Collide(address, all[j].second), flag, "=", address, " and ", all[j].first, "=", all[j].second,
                  " are one port");
    }
  }
}

void CheckSecurity(const ServerOptions& o, Findings& found) {
  const TlsFiles& tls = o.rpc.tls;
  found.AddIf(!tls.cert.empty() && tls.key.empty(), "--tls-cert=", tls.cert, " needs --tls-key");
  found.AddIf(tls.cert.empty() && !tls.key.empty(), "--tls-key=", tls.key, " needs --tls-cert");
  found.AddIf(tls.cert.empty() && !tls.ca.empty(), "--tls-client-ca=", tls.ca, " needs --tls-cert and --tls-key");
  const std::string& replica_ca = o.replicas.tls.ca;
  found.AddIf(tls.cert.empty() && !replica_ca.empty(), "--replica-ca=", replica_ca, " needs --tls-cert and --tls-key");
  const bool all_unix = std::all_of(o.rpc.listen.begin(), o.rpc.listen.end(), IsUnixSocket);
  found.AddIf(all_unix && !tls.cert.empty() && replica_ca.empty(), "--tls-cert=", tls.cert,
              " and no --listen but Unix sockets, which take no TLS");
}

void CheckCheckpoints(const ServerOptions& o, Findings& found) {
  found.AddIf(!o.restore.empty() && o.checkpoint_dir.empty(), "--restore=", o.restore, " needs --checkpoint-dir");
  found.AddIf(!o.drain_checkpoint.empty() && (o.checkpoint_dir.empty() || o.engine.frozen),
              "--drain-checkpoint=", o.drain_checkpoint, " needs --checkpoint-dir and no --frozen");
  if (!o.restore.empty()) found.Add(Annotate(CheckCheckpointName(o.restore), "--restore"));
  if (!o.drain_checkpoint.empty()) found.Add(Annotate(CheckCheckpointName(o.drain_checkpoint), "--drain-checkpoint"));
}

void CheckLimits(const ServerOptions& o, Findings& found) {
  for (const auto& [flag, count] :
       {std::pair("--max-calls", o.engine.max_call_count), std::pair("--max-sessions", o.engine.max_session_count)}) {
    found.AddIf(o.engine.ReadersShare(count) == 0, flag, "=", count,
                " leaves readers none, who have half: 2 or more were expected, or --frozen");
  }
  for (const auto& [flag, bytes] :
       {std::pair("--workspace-bytes", o.engine.workspace_bytes), std::pair("--stash-bytes", o.engine.stash_bytes)}) {
    found.AddIf(o.device.memory_bytes > 0 && bytes > o.device.memory_bytes, flag, "=", bytes,
                " is above --memory-bytes=", o.device.memory_bytes);
  }
  found.AddIf(o.device.tf32 && o.device.kind == DeviceKind::kCpu, "--tf32 needs a GPU, got --device=cpu");
}

void CheckReplicas(const ServerOptions& o, Findings& found) {
  const ReplicasOptions& replicas = o.replicas;
  const std::string flag = absl::StrCat("--replicas=", replicas.size);
  found.AddIf(replicas.size == 1 && !replicas.tls.ca.empty(), "--replica-ca needs --replicas above 1");
  found.AddIf(
      replicas.size == 1 && (replicas.rank > 0 || !replicas.coordinator.empty() || replicas.on_loss != OnLoss::kWait),
      "--rank, --coordinator and --on-loss need --replicas above 1");
  if (replicas.size == 1) return;
  found.AddIf(replicas.rank < 0 || replicas.rank >= replicas.size, "--rank=", replicas.rank, " is none of ", flag,
              ", which count from 0");
  found.AddIf(replicas.coordinator.empty(), flag, " needs --coordinator: host:port of rank 0");
  found.AddIf(MeetsStrangers(o) && !o.rpc.insecure_listen_anywhere, "--coordinator=", replicas.coordinator,
              " has no --replica-ca: whoever reaches it could join as a replica and replace all weights, without what "
              "--tls-client-ca and --token-file ask of clients. Give --replica-ca; or say --insecure-listen-anywhere "
              "where the network keeps others out");
  found.AddIf(o.engine.frozen, flag,
              " and --frozen: a frozen server changes nothing; start any number of them without");
  found.AddIf(o.sum_by == SumBy::kNccl && o.device.kind == DeviceKind::kCpu,
              "--sum-by=nccl needs a GPU, got --device=cpu");
  const Time lost = {"--replica-timeout", replicas.loss_timeout};
  const Time heartbeat = {"--replica-heartbeat", replicas.heartbeat};
  const Time seal = {"--seal-timeout", o.engine.seal_timeout};
  const Time sum = {"--sum-timeout", replicas.sum_timeout};
  const Time start = {"--replica-start-timeout", replicas.start_timeout};
  const bool heard_of = lost.value >= 2 * heartbeat.value;
  found.AddIf(!heard_of, Name(lost), " is below two of ", Name(heartbeat));
  // Else these would give up on a replica that is dead before anyone says so.
  for (const Time& time : {seal, sum, start}) {
    found.AddIf(time.value <= lost.value, Name(time), " is not above ", Name(lost));
  }
  if (heard_of && !replicas.coordinator.empty()) found.Add(Annotate(Validate(replicas), "--replicas and its like"));
}

}  // namespace

std::vector<std::string> Contradictions(const ServerOptions& options) {
  Findings found;
  found.AddIf(options.model_path.empty(), "--model is missing: the folder of the model to serve");
  CheckAddresses(options, found);
  CheckSecurity(options, found);
  CheckCheckpoints(options, found);
  CheckLimits(options, found);
  const Time seal = {"--seal-timeout", options.engine.seal_timeout};
  const Time lease = {"--lease", options.engine.lease};
  // Else a seal would give up on a trainer that is dead before its lease says so.
  found.AddIf(seal.value < lease.value, Name(seal), " is below ", Name(lease));
  CheckReplicas(options, found);
  return found.Take();
}

std::vector<std::string> Warnings(const ServerOptions& options) {
  Findings found;
  for (const std::string& address : options.rpc.listen) {
    if (options.rpc.secure() || IsUnixSocket(address) || IsLoopback(address)) continue;
    const string_view lacks = options.rpc.tls.cert.empty() ? "has no TLS: whoever sees the network reads all of it, "
                                                             "tokens too, and can change it"
                                                           : "asks nobody who they are";
    found.AddIf(true, "INSECURE: --listen=", address, " ", lacks,
                "; whoever reaches it can read and change the weights, unless the network keeps them out");
  }
  found.AddIf(options.rpc.allow_drain && !options.rpc.secure() &&
                  !std::all_of(options.rpc.listen.begin(), options.rpc.listen.end(),
                               [](const std::string& address) { return IsUnixSocket(address) || IsLoopback(address); }),
              "INSECURE: --allow-drain, and --listen that others reach: whoever does can end the server");
  const ReplicasOptions& replicas = options.replicas;
  if (replicas.size > 1 && !IsLoopback(replicas.coordinator)) {
    found.AddIf(true,
                "INSECURE: replicas sum gradients and hand over weights in plaintext, and take whoever connects; "
                "keep them on a network of their own");
  }
  found.AddIf(MeetsStrangers(options), "INSECURE: --coordinator=", replicas.coordinator,
              " has no --replica-ca: whoever reaches it can join as a replica and replace all weights");
  const Time seal = {"--seal-timeout", options.engine.seal_timeout};
  const Time stall = {"--stall-timeout", options.rpc.stall_timeout};
  const Time drain = {"--drain-timeout", options.drain_timeout};
  const Time lost = {"--replica-timeout", replicas.loss_timeout};
  const Time lease = {"--lease", options.engine.lease};
  const auto check_client = [&](const Time& time, string_view client, absl::Duration patience) {
    found.AddIf(time.value >= patience, Name(time), " is not below a client's ", client, ", ",
                absl::FormatDuration(patience), " unless it is told otherwise: it gives up first");
  };
  check_client(seal, "seal time-out", kClientSealTimeout);
  check_client(stall, "stall time-out", kClientStallTimeout);
  check_client(drain, "retry budget", kClientRetryBudget);
  if (replicas.size > 1) check_client(lost, "retry budget", kClientRetryBudget);
  const absl::Duration silence = kKeepaliveInterval + kKeepaliveTimeout;
  found.AddIf(lease.value < silence, Name(lease), " is below the ", absl::FormatDuration(silence),
              " in which a client finds out by keepalive that its link is dead: its session is gone by then");
  return found.Take();
}

absl::Status CheckMessages(const ModelSpec& model, const MessageLimits& limits) {
  for (const LayerSpec& layer : model.layers) {
    // Of x and dy, which a backward's shard has both of.
    const int64_t bytes =
        (layer.mlp.hidden_size + layer.mlp.output_size) * static_cast<int64_t>(SizeOf(WidestWireDType(model.dtype)));
    if (bytes + kFramingBytes <= limits.max_message_bytes) continue;
    return Error(absl::StatusCode::kInvalidArgument, Reason::kMessageTooLarge,
                 absl::StrCat("a row of layer ", layer.layer, " takes ", bytes,
                              " bytes of a backward's message, and messages have at most ", limits.max_message_bytes));
  }
  return absl::OkStatus();
}

std::vector<std::string> CheckFiles(const ServerOptions& options) {
  Findings found;
  if (!options.rpc.token_file.empty()) found.Add(Tokens(options.rpc.token_file).Read());
  TlsFiles tls = options.rpc.tls;
  const absl::StatusOr<Validity> validity = ReadTlsFiles(tls);
  found.Add(validity.status());
  if (validity.ok()) found.Add(CheckValid(*validity, tls.cert, absl::Now()));
  found.Add(ReadTlsFiles({.ca = options.replicas.tls.ca}).status());
  if (!options.checkpoint_dir.empty() && CheckCheckpointName(options.drain_checkpoint).ok()) {
    found.Add(Annotate(CheckCanSave(options.checkpoint_dir, options.drain_checkpoint), "--drain-checkpoint"));
  }
  if (options.model_path.empty()) return found.Take();
  const auto folder = ModelFolder::Open(options.model_path, options.model);
  found.Add(folder.status());
  if (folder.ok()) found.Add(CheckMessages((*folder)->spec(), options.rpc.limits));
  return found.Take();
}

}  // namespace shardmlp
