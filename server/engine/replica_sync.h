// What a generation of replicas computes together: sums of gradients, and a state that all go on from.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "server/engine/parameters.h"
#include "server/engine/step_message.h"
#include "server/model/model_spec.h"
#include "server/sync/replicas.h"

namespace shardmlp {

// For the engine's sync thread. Every method is a collective: each replica of the generation calls the same ones in the
// same order. All fail where the generation is lost.
class ReplicaSync {
 public:
  // Does work on the device thread, and waits for it; or at once, where the device thread is held.
  using OnDevice = std::function<absl::Status(const std::function<absl::Status()>& work)>;

  // All but `on_device` must outlive this.
  ReplicaSync(Backend& backend, const ModelSpec& model, Parameters& parameters, const Generation& generation,
              OnDevice on_device);

  int size() const { return generation_.group->size(); }
  // Whether gradients are summed where they lie, rather than through a copy of a part at a time.
  bool sums_in_place() const;

  // Whether every replica wants the sums of `position`'s gradients. DATA_LOSS (REPLICA_DRIFT), naming what differs and
  // the ranks, where they are not at the same position with the same weights.
  absl::StatusOr<bool> CheckAlike(const StepPosition& position, bool wanted);
  // Whether replicas that just started all are at `step` with the same weights, masters, moments and update histories.
  absl::StatusOr<bool> StartedAlike(int64_t step);

  // Returns once all have called it.
  absl::Status Meet() { return Exchange({0}).status(); }

  // Gradients = their sums over all replicas. Where not in place, only as long as `wanted`, which is called on the
  // device thread.
  absl::Status SumGradients(const std::function<bool()>& wanted);

  // The header that replica number `root` of the generation has.
  absl::StatusOr<StateHeader> ShareHeader(int root, const StateHeader& header);
  // Weights, masters and moments = those of replica number `root`.
  absl::Status ShareTensors(int root);

 private:
  using Collective = std::function<absl::Status(absl::Span<const MatrixView>)>;

  // One row a replica.
  absl::StatusOr<std::vector<std::vector<double>>> Exchange(const std::vector<double>& row);
  // Two numbers a layer.
  absl::Status AppendChecksums(std::vector<double>& row, bool with_optimizer);
  // Gives `matrices`, which lie on the device or are staging, to a collective; through `bounce_` where it takes them
  // elsewhere.
  absl::Status Run(
      const std::vector<MatrixView>& matrices, Memory memory, const Collective& collective,
      const std::function<bool()>& wanted = [] { return true; });
  absl::Status CopyOnDevice(ConstMatrixView from, MatrixView to);
  // "rank 1", "ranks 0 and 2", ..., by the values in a column; empty where all are the same.
  std::string Differences(const std::vector<std::vector<double>>& rows, size_t column, size_t columns) const;

  Backend& backend_;
  const ModelSpec& model_;
  Parameters& parameters_;
  const Generation& generation_;
  const OnDevice on_device_;
  Buffer bounce_;
};

}  // namespace shardmlp
