#include "server/engine/serving_engine.h"

#include <algorithm>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/status.h"
#include "server/engine/parameter_groups.h"
#include "server/log.h"

namespace shardmlp {
namespace {

std::vector<std::string> TensorNames(const ModelSpec& model) {
  std::vector<std::string> names;
  for (const TensorSpec& tensor : model.tensors) names.push_back(tensor.name);
  return names;
}

// Below 2^53 however many steps follow, so that programs which read numbers as doubles get it whole.
int64_t FirstWeightsVersion(const EngineOptions& options) {
  if (options.first_weights_version != 0) return options.first_weights_version;
  absl::BitGen random;
  return absl::Uniform<int64_t>(random, 1, int64_t{1} << 52);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options, std::unique_ptr<Backend> backend,
                                                       const ModelFolder& folder, std::unique_ptr<Replicas> replicas,
                                                       std::unique_ptr<CheckpointStore> checkpoints, Metrics& metrics) {
  if (!backend->Computes(folder.spec().dtype)) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidDType,
                 absl::StrCat(backend->device().name, " does not compute in ", Name(folder.spec().dtype)));
  }
  SHARDMLP_ASSIGN_OR_RETURN(const MemoryPlan plan, PlanMemory(folder.spec(), options, backend->device()));
  SHARDMLP_RETURN_IF_ERROR(CheckFits(plan, backend->device()));
  auto engine = std::make_unique<ServingEngine>(options, folder.spec(), plan, std::move(backend), std::move(replicas),
                                                std::move(checkpoints), metrics);
  SHARDMLP_RETURN_IF_ERROR(engine->Start(folder));
  return engine;
}

ServingEngine::ServingEngine(const EngineOptions& options, const ModelSpec& model, const MemoryPlan& plan,
                             std::shared_ptr<Backend> backend, std::unique_ptr<Replicas> replicas,
                             std::unique_ptr<CheckpointStore> checkpoints, Metrics& metrics)
    : options_(options),
      model_(model),
      plan_(plan),
      backend_(std::move(backend)),
      replicas_(std::move(replicas)),
      checkpoints_(std::move(checkpoints)),
      metrics_(metrics),
      sessions_(
          {options.max_session_count, options.lease, options.frozen, options.ReadersShare(options.max_session_count)}),
      step_(*this, *this, metrics, TensorNames(model), options.seal_timeout, FirstWeightsVersion(options),
            replicas_->rank()) {}

ServingEngine::~ServingEngine() { Shutdown(); }

absl::Status ServingEngine::Start(const ModelFolder& folder) {
  const int depth = TilesInFlight(backend_->device());
  SHARDMLP_RETURN_IF_ERROR(Annotate(backend_->Reserve(plan_.device_bytes()), "the memory plan does not fit"));
  SHARDMLP_ASSIGN_OR_RETURN(parameters_, Parameters::Create(*backend_, model_, options_.frozen, folder));
  SHARDMLP_ASSIGN_OR_RETURN(
      compute_, TileCompute::Create(*backend_, model_, *parameters_, metrics_, plan_.tile_row_count, depth));
  SHARDMLP_ASSIGN_OR_RETURN(lanes_,
                            LanePool::Create(backend_, model_.layers, plan_.tile_row_count, options_.max_call_count,
                                             options_.ReadersShare(options_.max_call_count)));
  SHARDMLP_ASSIGN_OR_RETURN(std::shared_ptr<StashMemory> memory,
                            StashMemory::Create(backend_, plan_.stash_bytes, options_.ReadersShare(plan_.stash_bytes)));
  {
    absl::MutexLock lock(&mutex_);
    stash_ = std::make_unique<Stash>(std::move(memory), metrics_);
  }
  metrics_.SetPlannedBytes(MemoryUse::kWeights, plan_.weights_bytes);
  metrics_.SetPlannedBytes(MemoryUse::kGradients, plan_.gradients_bytes);
  metrics_.SetPlannedBytes(MemoryUse::kMasterWeights, plan_.master_weights_bytes);
  metrics_.SetPlannedBytes(MemoryUse::kOptimizer, plan_.optimizer_bytes);
  metrics_.SetPlannedBytes(MemoryUse::kWorkspace, plan_.workspace_bytes);
  metrics_.SetPlannedBytes(MemoryUse::kStaging, plan_.staging_bytes);
  metrics_.SetPlannedBytes(MemoryUse::kLedger, plan_.ledger_bytes);
  metrics_.SetPlannedBytes(MemoryUse::kStash, plan_.stash_bytes);
  metrics_.SetReplicaCount(replicas_->size());
  scheduler_ = std::make_unique<Scheduler>(depth);
  sync_ = std::make_unique<JobThread>();
  if (!options_.restore.empty()) {
    SHARDMLP_RETURN_IF_ERROR(
        Annotate(StartFromCheckpoint(), absl::StrCat("can't start from checkpoint ", options_.restore)));
  }
  watch_ = std::thread([this] { WatchTime(); });
  JoinReplicas();
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(this, &ServingEngine::formed_or_failed));
  return health_;
}

absl::Status ServingEngine::StartFromCheckpoint() {
  SHARDMLP_RETURN_IF_ERROR(CheckCheckpoints());
  const CheckpointEdition edition = EditionOf(options_.restore);
  SHARDMLP_ASSIGN_OR_RETURN(const int64_t step, RestoreHere(edition));
  Outbox outbox;
  absl::MutexLock lock(&mutex_);
  step_.Restored(edition, step, outbox);
  return absl::OkStatus();
}

StepPosition ServingEngine::position() const {
  absl::MutexLock lock(&mutex_);
  return step_.position();
}

std::vector<TrainerStatus> ServingEngine::trainers() const {
  absl::MutexLock lock(&mutex_);
  return step_.trainers();
}

void ServingEngine::UpdateSessionMetrics() {
  metrics_.SetSessions(sessions_.Count(SessionRole::kTrain), sessions_.Count(SessionRole::kRead));
}

absl::StatusOr<SessionGrant> ServingEngine::OpenSession(const SessionSpec& spec) {
  Outbox outbox;
  absl::MutexLock lock(&mutex_);
  if (draining_) return ShuttingDown();
  const bool trains = spec.role == SessionRole::kTrain && !options_.frozen;
  if (trains) SHARDMLP_RETURN_IF_ERROR(step_.CheckTrainer(spec));
  SHARDMLP_ASSIGN_OR_RETURN(const int64_t session_id, sessions_.Open(spec, options_.clock()));
  if (trains) step_.AddTrainer(session_id, spec, outbox);
  UpdateSessionMetrics();
  outbox.Do([spec, session_id] {
    LogInfo("session opened", {{"session", session_id},
                               {"role", spec.role == SessionRole::kTrain ? "train" : "read"},
                               {"run", spec.run_id},
                               {"trainer", spec.trainer_rank},
                               {"trainers", spec.trainer_count}});
  });
  const bool run_under_way = spec.role == SessionRole::kTrain && step_.RunUnderWay(session_id);
  return SessionGrant{session_id, options_.lease, step_.position(), run_under_way};
}

absl::StatusOr<StepPosition> ServingEngine::RenewSession(int64_t session_id) {
  absl::MutexLock lock(&mutex_);
  SHARDMLP_RETURN_IF_ERROR(sessions_.Find(session_id, options_.clock()).status());
  return step_.position();
}

absl::Status ServingEngine::CloseSession(int64_t session_id) {
  Outbox outbox;
  absl::MutexLock lock(&mutex_);
  if (sessions_.Close(session_id)) {
    step_.RemoveTrainer(session_id, /*lost=*/false, outbox);
    outbox.Do([session_id] { LogInfo("session closed", {{"session", session_id}}); });
  }
  stash_->ReleaseSession(session_id);
  UpdateSessionMetrics();
  return absl::OkStatus();
}

absl::Status ServingEngine::CheckStepCaller(int64_t session_id) {
  if (stopping_) return ShuttingDown();
  SHARDMLP_RETURN_IF_ERROR(Usable());
  return sessions_.Find(session_id, options_.clock()).status();
}

void ServingEngine::SealStep(const SealSpec& spec, Done<SealResult> done) {
  Outbox outbox;
  absl::MutexLock lock(&mutex_);
  const absl::Status status = settling_ ? ShuttingDown() : CheckStepCaller(spec.session_id);
  if (!status.ok()) return outbox.Add(std::move(done), absl::StatusOr<SealResult>(status));
  step_.Seal(spec, options_.clock(), std::move(done), outbox);
}

void ServingEngine::CommitStep(const CommitSpec& spec, Done<StepPosition> done) {
  Outbox outbox;
  absl::Status status = ResolveGroups(spec.groups, model_).status();
  if (status.ok() && !(spec.gradient_scale > 0 && spec.gradient_scale <= std::numeric_limits<double>::max())) {
    status = Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                   absl::StrCat("gradient_scale is ", spec.gradient_scale, "; expected a finite number above 0"));
  }
  absl::MutexLock lock(&mutex_);
  if (status.ok()) status = CheckStepCaller(spec.session_id);
  if (!status.ok()) return outbox.Add(std::move(done), absl::StatusOr<StepPosition>(status));
  step_.Commit(spec, std::move(done), outbox);
}

void ServingEngine::DiscardStep(const DiscardSpec& spec, Done<StepPosition> done) {
  Outbox outbox;
  absl::MutexLock lock(&mutex_);
  const absl::Status status = CheckStepCaller(spec.session_id);
  if (!status.ok()) return outbox.Add(std::move(done), absl::StatusOr<StepPosition>(status));
  step_.Discard(spec, std::move(done), outbox);
}

void ServingEngine::StartDraining() {
  absl::MutexLock lock(&mutex_);
  draining_ = true;
}

bool ServingEngine::SettleStep(absl::Time deadline) {
  {
    Outbox outbox;
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithDeadline(absl::Condition(this, &ServingEngine::decided), deadline);
    settling_ = true;
    step_.HandBack("the server is shutting down", outbox);
  }
  absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithDeadline(absl::Condition(this, &ServingEngine::settled), deadline);
}

int64_t ServingEngine::open_call_count() const {
  absl::MutexLock lock(&mutex_);
  return open_calls_;
}

absl::Status ServingEngine::health() const {
  absl::MutexLock lock(&mutex_);
  return health_;
}

absl::Status ServingEngine::usable() const {
  absl::MutexLock lock(&mutex_);
  return Usable();
}

void ServingEngine::Shutdown() {
  std::vector<std::weak_ptr<TileCall>> calls;
  {
    Outbox outbox;
    absl::MutexLock lock(&mutex_);
    draining_ = true;
    stopping_ = true;
    calls.swap(calls_);
    step_.Stop(ShuttingDown(), outbox);
  }
  if (watch_.joinable()) watch_.join();
  StopReplicas();
  if (scheduler_ != nullptr) scheduler_->Stop();
  for (const std::weak_ptr<TileCall>& weak : calls) {
    if (const std::shared_ptr<TileCall> call = weak.lock()) call->Fail(ShuttingDown());
  }
  // A call that another thread is ending or cancelling has yet to say so.
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(this, &ServingEngine::no_open_calls));
}

}  // namespace shardmlp
