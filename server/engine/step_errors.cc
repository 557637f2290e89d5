#include "server/engine/step_errors.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace shardmlp {
namespace {

absl::Status DecisionConflict(const std::string& message) {
  return Error(absl::StatusCode::kFailedPrecondition, Reason::kDecisionConflict, message);
}

}  // namespace

ErrorMetadata PositionMetadata(const StepPosition& position) {
  return {{"step", absl::StrCat(position.step)}, {"attempt", absl::StrCat(position.attempt)}};
}

absl::Status StepAborted(const std::string& message, const StepPosition& position) {
  return Error(absl::StatusCode::kAborted, Reason::kStepAborted, message, PositionMetadata(position));
}

bool Same(const CommitSpec& a, const CommitSpec& b) {
  return a.gradient_scale == b.gradient_scale && a.fresh_optimizer == b.fresh_optimizer && a.groups == b.groups;
}

absl::Status OtherHyperparameters(const CommitSpec& decision, const CommitSpec& spec) {
  std::string difference = absl::StrCat("another division into groups than its ", decision.groups.size());
  if (spec.gradient_scale != decision.gradient_scale) {
    difference = absl::StrCat("gradient_scale ", spec.gradient_scale, " for ", decision.gradient_scale);
  } else if (spec.fresh_optimizer != decision.fresh_optimizer) {
    difference = absl::StrCat("fresh_optimizer ", spec.fresh_optimizer, " for ", decision.fresh_optimizer);
  }
  for (size_t i = 0; i < std::min(spec.groups.size(), decision.groups.size()); ++i) {
    const ParameterGroup& got = spec.groups[i];
    const ParameterGroup& decided = decision.groups[i];
    if (got.tensors != decided.tensors || got.hyperparameters == decided.hyperparameters) continue;
    difference =
        absl::StrCat("group ", i, " as ", Describe(got.hyperparameters), " for ", Describe(decided.hyperparameters));
    break;
  }
  return DecisionConflict(absl::StrCat("another trainer committed step ", decision.step,
                                       " with other hyperparameters; this one has ", difference,
                                       ". Commit with those, or restore a checkpoint on all trainers"));
}

absl::Status CommittedAlready(int64_t step) {
  return DecisionConflict(
      absl::StrCat("step ", step,
                   " was committed, by another trainer or before, and can't be discarded. This trainer's own half is "
                   "missing: commit with the same hyperparameters, or restore a checkpoint on all trainers"));
}

absl::Status OtherStep(int64_t step, const StepPosition& position) {
  return Error(absl::StatusCode::kFailedPrecondition, Reason::kStaleAttempt,
               absl::StrCat("step ", step, " can't be discarded: step ", position.step,
                            " is open, since others went on or a checkpoint was restored; restore one on all trainers"),
               PositionMetadata(position));
}

absl::Status ReplicasMissing(const std::string& why) {
  return Error(absl::StatusCode::kUnavailable, Reason::kReplicaMissing,
               absl::StrCat("the replicas are not all here (", why, "); wait until they are"));
}

}  // namespace shardmlp
