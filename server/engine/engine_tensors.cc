// ServingEngine's work on whole tensors, on the device thread: steps ahead of tiles; reading and checkpoints by turns.
#include <xxhash.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/status.h"
#include "server/engine/parameter_groups.h"
#include "server/engine/serving_engine.h"
#include "server/log.h"

namespace shardmlp {

template <typename T>
void ServingEngine::RunOnDevice(Done<T> done, absl::AnyInvocable<absl::StatusOr<T>()> job) {
  scheduler_->SubmitTensorJob([this, done = std::move(done), job = std::move(job)](absl::Status turn) mutable {
    // What a device that failed still holds may be half of a step.
    if (turn.ok()) turn = usable();
    if (turn.ok()) {
      done(job());
    } else {
      done(std::move(turn));
    }
  });
}

void ServingEngine::Apply(std::shared_ptr<const CommitSpec> decision) {
  scheduler_->SubmitControl([this, decision = std::move(decision)](absl::Status status) {
    if (status.ok()) {
      const absl::Time start = absl::Now();
      // Checked when the commit came in.
      const absl::StatusOr<std::vector<Hyperparameters>> hyperparameters = ResolveGroups(decision->groups, model_);
      status = hyperparameters.status();
      if (status.ok() && !decision->fresh_optimizer) status = parameters_->CheckOptimizer(*hyperparameters);
      if (status.ok()) status = NoteDevice(ApplyOptimizer(*hyperparameters, *decision));
      metrics_.ObserveStepPhase(StepPhase::kApply, absl::Now() - start);
    }
    Outbox outbox;
    absl::MutexLock lock(&mutex_);
    step_.Applied(status, outbox);
    UpdateAdmission(outbox);
  });
}

absl::Status ServingEngine::ApplyOptimizer(absl::Span<const Hyperparameters> hyperparameters,
                                           const CommitSpec& decision) {
  if (decision.fresh_optimizer) SHARDMLP_RETURN_IF_ERROR(parameters_->ResetOptimizer());
  return parameters_->Apply(hyperparameters, decision.gradient_scale);
}

void ServingEngine::ReleaseStash() {
  mutex_.AssertHeld();  // as StepDevice is called
  stash_->ReleaseAll();
}

void ServingEngine::ReadTensor(int64_t tensor, int64_t row_begin, int64_t row_count, Done<TensorRows> done) {
  const int64_t tensors = static_cast<int64_t>(model_.tensors.size());
  if (tensor < 0 || tensor >= tensors) {
    return done(Error(absl::StatusCode::kInvalidArgument, Reason::kUnknownTensor,
                      absl::StrCat("tensor ", tensor, "; expected 0 to ", tensors - 1)));
  }
  const TensorSpec& spec = model_.tensors[tensor];
  const int64_t rows = spec.shape.size() == 1 ? 1 : spec.shape[0];
  if (row_begin < 0 || row_count < 0 || row_begin > rows || row_count > rows - row_begin) {
    return done(Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidRows,
                      absl::StrCat("rows ", row_begin, " + ", row_count, " of '", spec.name, "', which has ", rows)));
  }
  RunOnDevice<TensorRows>(std::move(done), [this, &spec, row_begin, row_count]() -> absl::StatusOr<TensorRows> {
    TensorRows read;
    read.weights_version = weights_version();
    read.bytes.resize(row_count * spec.shape.back() * SizeOf(model_.dtype));
    SHARDMLP_RETURN_IF_ERROR(parameters_->ReadRows(spec, row_begin, row_count, absl::MakeSpan(read.bytes)));
    return read;
  });
}

void ServingEngine::Checksums(Done<std::vector<uint64_t>> done) {
  RunOnDevice<std::vector<uint64_t>>(std::move(done), [this]() -> absl::StatusOr<std::vector<uint64_t>> {
    const int64_t version = weights_version();
    if (checksums_version_ == version) return checksums_;
    std::vector<uint64_t> checksums;
    std::string bytes;
    for (const TensorSpec& spec : model_.tensors) {
      bytes.resize(spec.element_count() * SizeOf(model_.dtype));
      const int64_t rows = spec.shape.size() == 1 ? 1 : spec.shape[0];
      SHARDMLP_RETURN_IF_ERROR(parameters_->ReadRows(spec, 0, rows, absl::MakeSpan(bytes)));
      checksums.push_back(XXH3_64bits(bytes.data(), bytes.size()));
    }
    checksums_ = std::move(checksums);
    checksums_version_ = version;
    return checksums_;
  });
}

absl::Status ServingEngine::CheckCheckpoints() const {
  if (checkpoints_ == nullptr) {
    return Error(absl::StatusCode::kFailedPrecondition, Reason::kCheckpointDisabled,
                 "the server was started without a checkpoint folder (--checkpoint-dir)");
  }
  return absl::OkStatus();
}

void ServingEngine::SaveCheckpoint(const std::string& name, Done<CheckpointInfo> done) {
  if (const absl::Status status = CheckCheckpoints(); !status.ok()) return done(status);
  if (options_.frozen) {
    return done(Error(absl::StatusCode::kFailedPrecondition, Reason::kCheckpointDisabled,
                      "the server is frozen: it has no optimizer state to save"));
  }
  SubmitSave([this, name, done = std::move(done)](absl::Status turn) mutable {
    // What a device that failed still holds may be half of a step.
    if (turn.ok()) turn = usable();
    done(turn.ok() ? Save(name) : absl::StatusOr<CheckpointInfo>(turn));
  });
}

absl::StatusOr<CheckpointInfo> ServingEngine::Save(const std::string& name) {
  const Pulse::Scope files(scheduler_->pulse(), Pulse::At::kFiles);
  CheckpointState state = parameters_->Snapshot(position().step);
  state.generation = replica().generation;
  for (auto* tensors : {&state.weights, &state.optimizer}) {
    for (CheckpointTensor& tensor : *tensors) {
      tensor.read = [this, read = std::move(tensor.read)](absl::Span<char> out) {
        const Pulse::Scope next(scheduler_->pulse(), Pulse::At::kFiles);  // it goes on
        return read(out);
      };
    }
  }
  SHARDMLP_ASSIGN_OR_RETURN(CheckpointInfo saved, checkpoints_->Save(name, state));
  LogInfo("checkpoint saved", {{"name", name}, {"step", saved.step}});
  return saved;
}

void ServingEngine::SubmitSave(Scheduler::ControlJob save) {
  scheduler_->SubmitTensorJob([this, save = std::move(save)](absl::Status turn) mutable {
    {
      absl::MutexLock lock(&mutex_);
      if (turn.ok() && saves_wait_) {
        waiting_saves_.push_back(std::move(save));
        return;
      }
    }
    save(std::move(turn));
  });
}

void ServingEngine::ResumeSaves() {
  std::vector<Scheduler::ControlJob> saves;
  {
    absl::MutexLock lock(&mutex_);
    saves_wait_ = false;
    saves.swap(waiting_saves_);
  }
  for (Scheduler::ControlJob& save : saves) SubmitSave(std::move(save));
}

void ServingEngine::RestoreCheckpoint(const std::string& name, Done<StepPosition> done) {
  if (const absl::Status status = CheckCheckpoints(); !status.ok()) return done(status);
  scheduler_->SubmitTensorJob([this, name, done = std::move(done)](absl::Status turn) mutable {
    if (turn.ok()) turn = health();
    Outbox outbox;
    // Ahead of loading it, so that one which takes its place meanwhile is another.
    const CheckpointEdition edition = EditionOf(name);
    if (turn.ok()) {
      absl::MutexLock lock(&mutex_);
      // Each trainer of a run asks for it, and the first has got it for all.
      const std::optional<StepPosition> restored = step_.AlreadyRestored(edition);
      if (restored.has_value()) return outbox.Add(std::move(done), absl::StatusOr<StepPosition>(*restored));
    }
    // Everything that can be wrong with the checkpoint is found here, before anything is changed.
    const Pulse::Scope files(scheduler_->pulse(), Pulse::At::kFiles);
    absl::StatusOr<std::shared_ptr<Checkpoint>> checkpoint = turn.ok() ? OpenCheckpoint(name) : turn;
    if (!checkpoint.ok()) return outbox.Add(std::move(done), absl::StatusOr<StepPosition>(checkpoint.status()));
    absl::MutexLock lock(&mutex_);
    opened_edition_ = edition;
    opened_ = *std::move(checkpoint);
    step_.Restore(edition, std::move(done), outbox);
  });
}

absl::StatusOr<std::shared_ptr<Checkpoint>> ServingEngine::OpenCheckpoint(const std::string& name) {
  SHARDMLP_ASSIGN_OR_RETURN(std::shared_ptr<Checkpoint> checkpoint, checkpoints_->Load(name));
  SHARDMLP_RETURN_IF_ERROR(parameters_->CheckRestorable(*checkpoint));
  return checkpoint;
}

CheckpointEdition ServingEngine::EditionOf(const std::string& name) const {
  const absl::StatusOr<FileSum> sum = checkpoints_->Edition(name);  // where there is none, Load says why
  return {name, sum.ok() ? absl::StrCat(sum->size, " bytes, ", absl::Hex(sum->xxh3_64)) : ""};
}

absl::StatusOr<int64_t> ServingEngine::RestoreHere(const CheckpointEdition& edition) {
  std::shared_ptr<Checkpoint> checkpoint;
  {
    absl::MutexLock lock(&mutex_);
    if (edition == opened_edition_) checkpoint = std::move(opened_);
  }
  if (checkpoint == nullptr) {
    SHARDMLP_ASSIGN_OR_RETURN(checkpoint, OpenCheckpoint(edition.name));
  }
  // A failure leaves half of it in place, which must not be served.
  SHARDMLP_RETURN_IF_ERROR(NoteDevice(
      Annotate(parameters_->Restore(*checkpoint), absl::StrCat("checkpoint ", edition.name, " in part restored"))));
  LogInfo("checkpoint restored", {{"name", edition.name}, {"step", checkpoint->step()}});
  absl::MutexLock lock(&mutex_);
  checkpoint_generation_ = checkpoint->generation();
  return checkpoint->step();
}

void ServingEngine::ListCheckpoints(Done<std::vector<CheckpointInfo>> done) {
  if (const absl::Status status = CheckCheckpoints(); !status.ok()) return done(status);
  RunOnDevice<std::vector<CheckpointInfo>>(std::move(done), [this] {
    const Pulse::Scope files(scheduler_->pulse(), Pulse::At::kFiles);
    return checkpoints_->List();
  });
}

void ServingEngine::DeleteCheckpoint(const std::string& name, Done<CheckpointInfo> done) {
  if (const absl::Status status = CheckCheckpoints(); !status.ok()) return done(status);
  RunOnDevice<CheckpointInfo>(std::move(done), [this, name] {
    const Pulse::Scope files(scheduler_->pulse(), Pulse::At::kFiles);
    return checkpoints_->Delete(name);
  });
}

}  // namespace shardmlp
