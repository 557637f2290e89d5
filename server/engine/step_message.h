// What replicas tell each other about steps: the messages that they agree on, each proposed by one of them and
// delivered to all in one order, and what goes before the tensors of a state. Both travel as JSON, which keeps every
// double.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/step_types.h"
#include "server/metrics.h"
#include "server/model/model_spec.h"

namespace shardmlp {

// What a replica says of its own trainers. Takes the place of what it said before.
struct TrainerReport {
  int64_t step = 0;
  int64_t attempt = 0;
  std::string run_id;             // empty, as the rest, where no trainer is connected
  int trainer_count = 0;          // of the run, over all replicas
  std::map<int, bool> sealed;     // by the rank of each trainer that is connected
  std::map<int, int64_t> opened;  // by its rank too: the generation in which it came
  bool in_progress = false;       // rows were added, or a trainer sealed
  LayerRows rows;                 // that its trainers sent
  std::string non_finite_origin;
  bool committed = false;  // a step, in a session that is open
};

// A replica has the sums of all replicas.
struct SumReport {
  int64_t step = 0;
  int64_t attempt = 0;
  std::vector<double> tensor_sums_of_squares;  // ModelSpec::tensors' order
};

struct AttemptEnd {
  int64_t step = 0;
  int64_t attempt = 0;
  StepOutcome outcome = StepOutcome::kAborted;
  std::string reason;
};

// All go on from a checkpoint that the proposer has.
struct RestoreOrder {
  CheckpointEdition checkpoint;
  int64_t weights_version = 0;  // when it was asked for
};

// A replica has come to what all of them do together next, and is ready for it.
struct Arrival {};

using StepMessage = std::variant<TrainerReport, SumReport, AttemptEnd, CommitSpec, RestoreOrder, Arrival>;

std::string Serialize(const StepMessage& message);
// INTERNAL for what Serialize did not make.
absl::StatusOr<StepMessage> ParseStepMessage(absl::string_view text);

// The step committed last, for repeats of its seal and commit.
struct CommittedStep {
  CommitSpec decision;
  SealResult sealed;
  StepPosition position;  // that it led to
};

// A replica's state, but for its tensors.
struct StateHeader {
  std::string failure;  // empty; else why there is no state to go on from
  StepPosition position;
  std::optional<CommittedStep> committed;
  std::vector<UpdateHistory> updates;  // ModelSpec::tensors' order
};

std::string Serialize(const StateHeader& header);
absl::StatusOr<StateHeader> ParseStateHeader(absl::string_view text);

}  // namespace shardmlp
