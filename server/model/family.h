// The model families that can be served, one row each: what their MLPs' tensors and config keys are called.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace shardmlp {

// Which output features of a layer a Linear holds.
enum class LinearPart { kGate, kUp, kGateUp, kDown };  // kGateUp: gate rows first; kUp alone where ungated

struct FamilyLinear {
  absl::string_view name;  // within the layer: "mlp.gate_proj"
  LinearPart part;
};

// A row of the table. A tensor's name is <prefix><layers>.<index>.<linear>.weight, or .bias.
struct Family {
  absl::string_view model_type;
  absl::string_view prefix = "model.";  // files of a base model lack it
  absl::string_view layers = "layers";
  absl::string_view module = "mlp";  // within the layer: the MLP, or where it has no module of its own, its first
  absl::Span<const FamilyLinear> linears;
  bool gated = true;
  bool transposed = false;  // Conv1D: files hold [in, out]

  absl::string_view layer_count_key = "num_hidden_layers";
  absl::string_view hidden_size_key = "hidden_size";
  absl::string_view intermediate_size_key = "intermediate_size";
  int64_t default_intermediate_factor = 0;  // of the hidden size, where that key is missing; 0: it must be there
  absl::string_view activation_key = "hidden_act";
  absl::string_view default_activation = "silu";
  absl::string_view gelu_means = "gelu";  // what the activation "gelu" stands for
  absl::string_view bias_key = "";        // empty where biases don't depend on the config
  bool bias = false;                      // whether there are biases, where `bias_key` is empty or missing
};

// Every family that can be served.
absl::Span<const Family> Families();
// Null where the type is not among them.
const Family* FindFamily(absl::string_view model_type);
// Why a model type can't be served exactly; empty where that is not known.
absl::string_view WhyRefused(absl::string_view model_type);

}  // namespace shardmlp
