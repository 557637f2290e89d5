// The vocabulary of sessions and steps below the wire. proto/shardmlp/v1/training.proto is the specification.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "kernels/optimizer.h"

namespace shardmlp {

struct StepPosition {
  int64_t step = 0;
  int64_t attempt = 0;
  int64_t weights_version = 0;
  friend bool operator==(const StepPosition&, const StepPosition&) = default;
};

// Whether both, which have a step and an attempt, are of the same attempt.
template <typename Message, typename Attempt>
bool IsOf(const Message& message, const Attempt& attempt) {
  return message.step == attempt.step && message.attempt == attempt.attempt;
}

enum class SessionRole { kTrain, kRead };

struct SessionSpec {
  std::string run_id;
  SessionRole role = SessionRole::kTrain;
  int trainer_count = 1;
  int trainer_rank = 0;
  int64_t opening_id = 0;  // the client's, kept across retries; 0: none
};

struct SessionGrant {
  int64_t session_id = 0;
  absl::Duration lease;
  StepPosition position;
  bool run_under_way = false;  // others of the run have committed in their sessions
};

struct TrainerStatus {
  SessionSpec spec;
  bool sealed = false;
};

// A checkpoint by its name, and what it is whose name may be another's later.
struct CheckpointEdition {
  std::string name;
  std::string edition;
  friend bool operator==(const CheckpointEdition&, const CheckpointEdition&) = default;
};

using LayerRows = std::map<int, int64_t>;  // layer index -> rows

struct SealSpec {
  int64_t session_id = 0;
  int64_t step = 0;
  int64_t attempt = 0;
  LayerRows rows;  // that the session sent with weight gradients; a layer left out counts as 0
};

struct SealResult {
  std::vector<double> tensor_sums_of_squares;  // ModelSpec::tensors' order
  bool finite = true;
  std::string non_finite_origin;
  LayerRows rows;  // of all trainers
};

struct ParameterGroup {
  std::vector<std::string> tensors;
  Hyperparameters hyperparameters;
  friend bool operator==(const ParameterGroup&, const ParameterGroup&) = default;
};

struct CommitSpec {
  int64_t session_id = 0;
  int64_t step = 0;
  int64_t attempt = 0;
  std::vector<ParameterGroup> groups;  // every tensor of the model exactly once
  double gradient_scale = 1;
  bool fresh_optimizer = false;  // zeroes the optimizer state first
};

struct DiscardSpec {
  int64_t session_id = 0;
  int64_t step = 0;
  int64_t attempt = 0;
  std::string reason;
};

}  // namespace shardmlp
