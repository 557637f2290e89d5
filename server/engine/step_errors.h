// What a step answers in error.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "kernels/status.h"
#include "server/engine/step_types.h"

namespace shardmlp {

// The open step and attempt, for a client to go on with.
ErrorMetadata PositionMetadata(const StepPosition& position);

// ABORTED (STEP_ABORTED).
absl::Status StepAborted(const std::string& message, const StepPosition& position);

// Whether two commits of a step decide the same.
bool Same(const CommitSpec& a, const CommitSpec& b);
// FAILED_PRECONDITION (DECISION_CONFLICT): `decision` stands; what `spec` says otherwise.
absl::Status OtherHyperparameters(const CommitSpec& decision, const CommitSpec& spec);
// FAILED_PRECONDITION (DECISION_CONFLICT), for whoever discards it.
absl::Status CommittedAlready(int64_t step);
// FAILED_PRECONDITION (STALE_ATTEMPT), for whoever discards a step that is not the open one: it was committed without
// that trainer, or a checkpoint was restored.
absl::Status OtherStep(int64_t step, const StepPosition& position);

// UNAVAILABLE (REPLICA_MISSING).
absl::Status ReplicasMissing(const std::string& why);

}  // namespace shardmlp
