#include "server/server.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "kernels/status.h"
#include "server/log.h"
#include "server/model/checkpoint.h"
#include "server/options_check.h"
#include "server/rpc/listen_address.h"
#include "server/sync/nccl_group.h"
#include "server/sync/rendezvous/replicas_options.h"

namespace shardmlp {
namespace {

constexpr absl::Duration kHealthInterval = absl::Seconds(1);
constexpr absl::Duration kShutdownGrace = absl::Seconds(2);  // for statuses to reach clients
// Of messages under way, where the plan leaves less: some 20 MiB for each of many rpcs.
constexpr int64_t kLeastMessageBytes = int64_t{1} << 30;
constexpr absl::string_view kLatest = "latest";

absl::Status ShuttingDown() {
  return Error(absl::StatusCode::kUnavailable, Reason::kDraining, "the server is shutting down");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options, std::ostream& out) {
  for (const std::string& warning : Warnings(options)) LogWarning("options", {{"warning", warning}});
  auto server = std::make_unique<Server>(options);
  SHARDMLP_RETURN_IF_ERROR(server->Listen(out));
  SHARDMLP_RETURN_IF_ERROR(server->Load(out));
  server->rpc_->Serve(*server->engine_);
  out << "serving on " << absl::StrJoin(server->rpc_->addresses(), ", ") << std::endl;
  return server;
}

Server::~Server() { Shutdown(); }

absl::Status Server::Listen(std::ostream& out) {
  SHARDMLP_ASSIGN_OR_RETURN(rpc_, RpcServer::Listen(options_.rpc, metrics_));
  if (!rpc_->health_address().empty()) out << "health on " << rpc_->health_address() << std::endl;
  if (options_.metrics_address.empty()) return absl::OkStatus();
  SHARDMLP_ASSIGN_OR_RETURN(const int port, metrics_.Expose(options_.metrics_address));
  out << "metrics on http://" << WithBoundPort(options_.metrics_address, port) << "/metrics" << std::endl;
  return absl::OkStatus();
}

absl::Status Server::Load(std::ostream& out) {
  SHARDMLP_ASSIGN_OR_RETURN(const auto folder, ModelFolder::Open(options_.model_path, options_.model));
  SHARDMLP_RETURN_IF_ERROR(CheckMessages(folder->spec(), options_.rpc.limits));
  SHARDMLP_ASSIGN_OR_RETURN(auto backend, OpenDevice(options_.device));
  SHARDMLP_ASSIGN_OR_RETURN(const MemoryPlan plan, PlanMemory(folder->spec(), options_.engine, backend->device()));
  out << backend->device().name << "\n" << plan.ToString() << std::flush;
  const int64_t spare_bytes = SpareHostBytes(plan, backend->device());
  const int64_t message_bytes = std::max(spare_bytes, kLeastMessageBytes);
  rpc_->BoundMessages(message_bytes);
  metrics_.SetMemoryBound(backend->device().host_bytes - spare_bytes + message_bytes);
  EngineOptions engine = options_.engine;
  engine.hang_timeout = options_.replicas.sum_timeout;
  std::unique_ptr<CheckpointStore> checkpoints;
  if (!options_.checkpoint_dir.empty()) {
    SHARDMLP_ASSIGN_OR_RETURN(checkpoints, CheckpointStore::Open(options_.checkpoint_dir, folder->spec()));
    if (!options_.drain_checkpoint.empty()) {
      SHARDMLP_RETURN_IF_ERROR(
          Annotate(CheckCanSave(options_.checkpoint_dir, options_.drain_checkpoint), "--drain-checkpoint"));
    }
    engine.restore = options_.restore;
    if (engine.restore == kLatest) {
      SHARDMLP_ASSIGN_OR_RETURN(engine.restore, checkpoints->Latest());
    }
  }
  SHARDMLP_ASSIGN_OR_RETURN(const ReplicasOptions replica, ReplicasOf(folder->spec()));
  SHARDMLP_ASSIGN_OR_RETURN(std::unique_ptr<Replicas> replicas, MakeReplicas(replica));
  SHARDMLP_ASSIGN_OR_RETURN(engine_, Engine::Create(engine, std::move(backend), *folder, std::move(replicas),
                                                    std::move(checkpoints), metrics_));
  if (!engine.restore.empty()) {
    out << "restored checkpoint " << engine.restore << ", step " << engine_->position().step << std::endl;
  }
  return absl::OkStatus();
}

absl::StatusOr<ReplicasOptions> Server::ReplicasOf(const ModelSpec& model) const {
  ReplicasOptions replicas = options_.replicas;
  int64_t elements = 0;
  for (const TensorSpec& tensor : model.tensors) elements += tensor.element_count();
  const MlpConfig& mlp = model.layers.front().mlp;
  replicas.model = absl::StrCat(model.model_type, ", ", model.tensors.size(), " tensors of ", elements,
                                " elements, the first MLP ", mlp.hidden_size, " to ", mlp.intermediate_size, " to ",
                                mlp.output_size, " by ", Name(mlp.activation.kind));
  replicas.layers = absl::StrCat(model.layers.front().layer, "-", model.layers.back().layer);
  replicas.dtype = std::string(Name(model.dtype));
  replicas.log = [](absl::string_view line) { LogWarning("replicas", {{"said", std::string(line)}}); };
  if (replicas.size == 1 || options_.sum_by == SumBy::kGloo) return replicas;
  if (!IsGpu(options_.device)) {
    if (options_.sum_by == SumBy::kAuto) return replicas;
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 "--sum-by=nccl needs a GPU, and there is none");
  }
  absl::StatusOr<Transport> nccl = NcclTransport(
      {.device = options_.device.gpu, .connect_timeout = replicas.connect_timeout, .timeout = replicas.sum_timeout});
  if (nccl.ok()) {
    replicas.transport = *std::move(nccl);
  } else if (options_.sum_by == SumBy::kNccl) {
    return nccl.status();
  } else {
    LogWarning("gradients go through host memory and Gloo", {{"why", std::string(nccl.status().message())}});
  }
  return replicas;
}

absl::Status Server::Run(const absl::Notification& stop) {
  absl::Status files;  // as they were found last
  while (!stop.WaitForNotificationWithTimeout(kHealthInterval) && !rpc_->drain_request().asked()) {
    if (const absl::Status found = rpc_->Refresh(); found != std::exchange(files, found)) {
      if (found.ok()) {
        LogInfo("certificates and tokens are in order again");
      } else {
        LogWarning("certificates or tokens are not in order", {{"why", std::string(found.message())}});
      }
    }
    if (absl::Status health = engine_->health(); !health.ok()) {
      rpc_->SetHealth(false);
      return health;
    }
  }
  return Drain();
}

absl::Status Server::Drain() {
  const absl::Time deadline = absl::Now() + options_.drain_timeout;
  rpc_->SetHealth(false);
  engine_->StartDraining();
  LogInfo("draining", {{"open_streams", rpc_->open_stream_count()},
                       {"asked_by", rpc_->drain_request().asked() ? "client" : "signal"}});
  DrainSummary summary;
  if (summary.cut_off = !rpc_->AwaitIdle(deadline); summary.cut_off) {
    LogWarning("cancelling what is open",
               {{"open_streams", rpc_->open_stream_count()}, {"after", absl::FormatDuration(options_.drain_timeout)}});
    rpc_->EndStreams(ShuttingDown());
  }
  summary.step_undecided = !engine_->SettleStep(deadline);
  if (summary.step_undecided) LogWarning("leaving a step whose trainers have not decided on it");
  const absl::StatusOr<std::optional<CheckpointInfo>> saved = SaveDrained();
  summary.checkpoint = saved.value_or(std::nullopt);
  summary.position = engine_->position();
  rpc_->drain_request().End(saved.ok() ? absl::StatusOr<DrainSummary>(summary) : saved.status());
  Shutdown();
  return saved.status();
}

absl::StatusOr<std::optional<CheckpointInfo>> Server::SaveDrained() {
  if (options_.drain_checkpoint.empty()) return std::nullopt;
  absl::StatusOr<CheckpointInfo> saved;
  absl::Notification done;
  engine_->SaveCheckpoint(options_.drain_checkpoint, [&](absl::StatusOr<CheckpointInfo> result) {
    saved = std::move(result);
    done.Notify();
  });
  done.WaitForNotification();
  if (!saved.ok()) return Annotate(saved.status(), "the drained server could not be saved");
  return *std::move(saved);
}

void Server::Shutdown() {
  if (engine_ != nullptr) engine_->Shutdown();
  if (rpc_ != nullptr) {
    rpc_->Shutdown(ShuttingDown(), absl::Now() + kShutdownGrace);
  }
  rpc_.reset();
}

}  // namespace shardmlp
