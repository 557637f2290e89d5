// A small model, and checkpoints of it whose every tensor is filled with a value that says which save it is from.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/model/checkpoint.h"
#include "server/model/model_config.h"

namespace shardmlp {

// A llama of two layers, H 4, I 6.
inline ModelSpec SmallModel(DType dtype = DType::kF32) {
  const auto config = ParseModelConfig(
      R"({"model_type": "llama", "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2})", "config.json");
  return *MakeModelSpec(*config, "model.", {.layers = std::nullopt, .dtype = dtype});
}

inline CheckpointTensor Filled(std::string name, DType dtype, std::vector<int64_t> shape, char fill) {
  return {std::move(name), dtype, std::move(shape), [fill](absl::Span<char> out) {
            std::fill(out.begin(), out.end(), fill);
            return absl::OkStatus();
          }};
}

// Step `step`: weights of bytes `step`, moments of bytes `step` + 1, tensor i updated `step` + i times.
inline CheckpointState StateOf(const ModelSpec& model, char step) {
  CheckpointState state;
  state.step = step;
  for (const TensorSpec& tensor : model.tensors) {
    state.updates.push_back({step + static_cast<int64_t>(state.updates.size()), "adamw"});
    state.weights.push_back(Filled(tensor.name, model.dtype, tensor.shape, step));
    state.optimizer.push_back(Filled(tensor.name + ".moment1", DType::kF32, tensor.shape, step + 1));
  }
  return state;
}

// OK if `checkpoint` is, to the byte, the one that StateOf(model, its step) gives.
inline absl::Status CheckWhole(const Checkpoint& checkpoint, const ModelSpec& model) {
  const char step = static_cast<char>(checkpoint.step());
  const CheckpointState expected = StateOf(model, step);
  if (checkpoint.updates() != expected.updates) return absl::InternalError("other update histories");
  for (const auto* tensors : {&expected.weights, &expected.optimizer}) {
    for (const CheckpointTensor& tensor : *tensors) {
      std::vector<char> wanted(tensor.shape[0] * tensor.shape[1] * SizeOf(tensor.dtype));
      std::vector<char> read(wanted.size());
      if (!tensor.read(absl::MakeSpan(wanted)).ok()) return absl::InternalError("unreadable state");
      const absl::Status status = checkpoint.Read(tensor.name, tensor.dtype, absl::MakeSpan(read));
      if (!status.ok()) return status;
      if (read != wanted) return absl::InternalError(tensor.name + " differs");
    }
  }
  return absl::OkStatus();
}

// The step of checkpoint `name` if it is whole.
inline absl::StatusOr<int64_t> WholeStep(const CheckpointStore& store, const std::string& name,
                                         const ModelSpec& model) {
  const auto checkpoint = store.Load(name);
  if (!checkpoint.ok()) return checkpoint.status();
  const absl::Status whole = CheckWhole(**checkpoint, model);
  if (!whole.ok()) return whole;
  return (*checkpoint)->step();
}

}  // namespace shardmlp
