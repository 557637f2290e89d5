// What rpc talks to: sessions, calls, steps, tensors and checkpoints of one model on one device.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/engine/call.h"
#include "server/engine/engine_options.h"
#include "server/engine/memory_plan.h"
#include "server/engine/step_types.h"
#include "server/metrics.h"
#include "server/model/checkpoint.h"
#include "server/model/model_folder.h"
#include "server/sync/replicas.h"

namespace shardmlp {

struct EngineLimits {
  int64_t tile_row_count = 0;
  int64_t max_call_count = 0;
};

// A server's place among its replicas.
struct ReplicaPlace {
  int rank = 0;
  int count = 1;
  int member_count = 1;    // that are there now; 0 between two generations
  int64_t generation = 0;  // of them; 0: none yet
  std::vector<int> member_ranks = {0};
};

// Rows of a tensor in the file's own orientation.
struct TensorRows {
  std::string bytes;  // [row_count, columns] row-major in the model's dtype
  int64_t weights_version = 0;
};

template <typename T>
using Done = absl::AnyInvocable<void(absl::StatusOr<T>)>;

// Thread-safe. No method blocks on the device: long work answers through `done`, which is called exactly once, from the
// engine's own threads or before the method returns, without a lock held, and must not block.
class Engine {
 public:
  virtual ~Engine() = default;

  // Allocates, loads the weights from `folder` or EngineOptions::restore, starts the device thread, and waits for the
  // other replicas: until all have the state of the most advanced, or why they don't get together. RESOURCE_EXHAUSTED
  // (OUT_OF_MEMORY), with the plan's numbers, where the plan does not fit the device. `checkpoints` may be null;
  // `metrics` must outlive the engine. The engine owns the backend; its methods run on the engine's device thread
  // alone, or on the sync thread while that holds the other.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options, std::unique_ptr<Backend> backend,
                                                        const ModelFolder& folder, std::unique_ptr<Replicas> replicas,
                                                        std::unique_ptr<CheckpointStore> checkpoints, Metrics& metrics);

  virtual const ModelSpec& model() const = 0;
  virtual bool frozen() const = 0;
  virtual EngineLimits limits() const = 0;
  virtual MemoryPlan memory_plan() const = 0;
  virtual ReplicaPlace replica() const = 0;
  virtual StepPosition position() const = 0;
  virtual std::vector<TrainerStatus> trainers() const = 0;

  virtual absl::StatusOr<SessionGrant> OpenSession(const SessionSpec& spec) = 0;
  virtual absl::StatusOr<StepPosition> RenewSession(int64_t session_id) = 0;
  virtual absl::Status CloseSession(int64_t session_id) = 0;

  // `sink` must live until its OnFinished or until Call::Cancel returned. It may be called before these return.
  virtual absl::StatusOr<std::shared_ptr<Call>> StartForward(const ForwardSpec& spec, CallSink& sink) = 0;
  virtual absl::StatusOr<std::shared_ptr<Call>> StartBackward(const BackwardSpec& spec, CallSink& sink) = 0;

  virtual void SealStep(const SealSpec& spec, Done<SealResult> done) = 0;
  virtual void CommitStep(const CommitSpec& spec, Done<StepPosition> done) = 0;
  virtual void DiscardStep(const DiscardSpec& spec, Done<StepPosition> done) = 0;

  // Rows [row_begin, row_begin + row_count) of model().tensors[tensor] as the file has it; a one-dimensional tensor is
  // one row.
  virtual void ReadTensor(int64_t tensor, int64_t row_begin, int64_t row_count, Done<TensorRows> done) = 0;
  // XXH3-64 of each tensor's bytes, in ModelSpec::tensors' order.
  virtual void Checksums(Done<std::vector<uint64_t>> done) = 0;

  // FAILED_PRECONDITION (CHECKPOINT_DISABLED) where there is no folder for them. A frozen engine restores the weights
  // alone, and saves none.
  virtual void SaveCheckpoint(const std::string& name, Done<CheckpointInfo> done) = 0;
  virtual void RestoreCheckpoint(const std::string& name, Done<StepPosition> done) = 0;
  virtual void ListCheckpoints(Done<std::vector<CheckpointInfo>> done) = 0;
  virtual void DeleteCheckpoint(const std::string& name, Done<CheckpointInfo> done) = 0;

  // Refuses new sessions and calls from now on (UNAVAILABLE, DRAINING); open ones go on.
  virtual void StartDraining() = 0;
  // After StartDraining: waits until the trainers of a sealed step have decided on it and heard the end, hands back one
  // that is not sealed by all (ABORTED), and refuses seals (UNAVAILABLE, DRAINING). Whatever a trainer here was told
  // is then in a checkpoint that is saved. False where that is not so at `deadline`.
  virtual bool SettleStep(absl::Time deadline) = 0;
  // Calls that are open.
  virtual int64_t open_call_count() const = 0;
  // Ends every call and waiting seal with UNAVAILABLE, and stops the device thread. The destructor does so too.
  virtual void Shutdown() = 0;
  // OK while the device works; else what broke it. Never blocks.
  virtual absl::Status health() const = 0;
};

}  // namespace shardmlp
