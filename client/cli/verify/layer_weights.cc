#include "client/cli/verify/layer_weights.h"

#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/cli/elements.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

// What a tensor of a Hugging Face file holds, by the end of its name.
struct TensorPart {
  absl::string_view name;
  bool gate;  // gate features first, in the first half where up follows
  bool up;
};

constexpr TensorPart kParts[] = {
    {"gate_proj", true, false},
    {"gate_up_proj", true, true},
    {"Wi", true, true},
    {"up_proj", false, true},
    {"c_fc", false, true},
    {"fc1", false, true},
    {"dense_h_to_4h", false, true},
    {"intermediate.dense", false, true},
    {"down_proj", false, false},
    {"c_proj", false, false},
    {"fc2", false, false},
    {"dense_4h_to_h", false, false},
    {"output.dense", false, false},
    {"Wo", false, false},
};

// Whether the model's files hold [in, out], as Conv1D does.
bool IsTransposed(const ServedModel& model) { return model.model_type == "gpt2"; }

absl::StatusOr<Values> ReadValues(Client& client, const ClientTensor& tensor) {
  std::string bytes(tensor.byte_count(), 0);
  SHARDMLP_RETURN_IF_ERROR(client.ReadTensor(tensor.name, absl::MakeSpan(bytes)).status());
  return DecodeElements(bytes, tensor.dtype);
}

// [in, out] as [out, in].
Values Transpose(const Values& from, int64_t in, int64_t out) {
  Values to(from.size());
  for (int64_t i = 0; i < in; ++i) {
    for (int64_t o = 0; o < out; ++o) to[o * in + i] = from[i * out + o];
  }
  return to;
}

// Puts `values`, [out, in] or [out], where they belong.
void Store(const TensorPart& part, bool bias, Values values, ReferenceMlp& mlp) {
  Values& gate = bias ? mlp.gate_bias : mlp.gate;
  Values& up = bias ? mlp.up_bias : mlp.up;
  if (part.gate && part.up) {
    const auto half = values.begin() + static_cast<int64_t>(values.size()) / 2;
    gate.assign(values.begin(), half);
    up.assign(half, values.end());
  } else if (part.gate) {
    gate = std::move(values);
  } else if (part.up) {
    up = std::move(values);
  } else {
    (bias ? mlp.down_bias : mlp.down) = std::move(values);
  }
}

absl::Status ReadPart(Client& client, const ClientTensor& tensor, ReferenceMlp& mlp) {
  absl::string_view name = tensor.name;
  const bool bias = absl::ConsumeSuffix(&name, ".bias");
  absl::ConsumeSuffix(&name, ".weight");
  for (const TensorPart& part : kParts) {
    if (!absl::EndsWith(name, absl::StrCat(".", part.name))) continue;
    SHARDMLP_ASSIGN_OR_RETURN(Values values, ReadValues(client, tensor));
    const bool turn = !bias && IsTransposed(client.model());
    Store(part, bias, turn ? Transpose(values, tensor.shape[0], tensor.shape[1]) : std::move(values), mlp);
    return absl::OkStatus();
  }
  return Error(absl::StatusCode::kUnimplemented, Reason::kUnsupportedModel,
               absl::StrCat("tensor ", tensor.name, " is not one that verify knows"));
}

absl::Status CheckSize(absl::string_view name, const Values& values, int64_t size) {
  if (static_cast<int64_t>(values.size()) == size) return absl::OkStatus();
  return Error(absl::StatusCode::kInternal, Reason::kInvalidShape,
               absl::StrCat("the server's ", name, " has ", values.size(), " elements, expected ", size));
}

}  // namespace

absl::StatusOr<ReferenceMlp> ReadLayerWeights(Client& client, const ClientLayer& layer) {
  ReferenceMlp mlp;
  mlp.hidden_size = layer.hidden_size;
  mlp.intermediate_size = layer.intermediate_size;
  mlp.output_size = layer.output_size;
  mlp.gated = layer.gated;
  SHARDMLP_ASSIGN_OR_RETURN(mlp.activation, FindActivation(layer.activation));
  if (layer.activation == "clamped_swiglu") {
    mlp.limit = layer.activation_limit;
    mlp.limit_rounding = HalfUnit(layer.activation_limit, client.model().compute_dtype);
  }
  for (const ClientTensor& tensor : client.model().tensors) {
    if (tensor.layer == layer.layer) SHARDMLP_RETURN_IF_ERROR(ReadPart(client, tensor, mlp));
  }
  if (mlp.gate_bias.empty()) mlp.gate_bias.resize(mlp.gated ? layer.intermediate_size : 0);
  if (mlp.up_bias.empty()) mlp.up_bias.resize(layer.intermediate_size);
  if (mlp.down_bias.empty()) mlp.down_bias.resize(layer.output_size);
  const int64_t inner = layer.intermediate_size;
  SHARDMLP_RETURN_IF_ERROR(CheckSize("gate weight", mlp.gate, mlp.gated ? inner * layer.hidden_size : 0));
  SHARDMLP_RETURN_IF_ERROR(CheckSize("up weight", mlp.up, inner * layer.hidden_size));
  SHARDMLP_RETURN_IF_ERROR(CheckSize("down weight", mlp.down, layer.output_size * inner));
  SHARDMLP_RETURN_IF_ERROR(CheckSize("gate bias", mlp.gate_bias, mlp.gated ? inner : 0));
  SHARDMLP_RETURN_IF_ERROR(CheckSize("up bias", mlp.up_bias, inner));
  SHARDMLP_RETURN_IF_ERROR(CheckSize("down bias", mlp.down_bias, layer.output_size));
  return mlp;
}

}  // namespace shardmlp
