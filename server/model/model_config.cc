#include "server/model/model_config.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/status.h"
#include "server/model/file.h"
#include "server/model/json.h"

namespace shardmlp {
namespace {

using nlohmann::json;

constexpr int64_t kMaxSize = int64_t{1} << 40;  // of H and I: no sum or product with 4 overflows
constexpr int64_t kMaxLayerCount = int64_t{1} << 14;
constexpr int64_t kMaxConfigBytes = 16 << 20;

struct RefusedKey {
  absl::string_view key;
  absl::string_view why;
};

// Keys that stand for arithmetic which an MLP here does not do, where they are set to anything but null, false, zero,
// empty, or ones.
constexpr RefusedKey kRefusedKeys[] = {
    {"quantization_config", "quantized weights are not served"},
    {"compression_config", "compressed weights are not served"},
    {"mlp_multipliers", "multipliers inside the MLP are not served"},
    {"swiglu_alpha", "a scale inside the activation is not served"},
    {"swiglu_limit", "clamped activations are not served"},
    {"activation_sparsity_pattern", "activation sparsity is not served"},
    {"mlp_dropout", "dropout ahead of the down projection is not served"},
    {"activation_dropout", "dropout ahead of the down projection is not served"},
};

absl::Status Unsupported(absl::string_view path, absl::string_view what) {
  return Error(absl::StatusCode::kUnimplemented, Reason::kUnsupportedModel, absl::StrCat(path, ": ", what));
}

absl::Status Corrupt(absl::string_view path, absl::string_view what) {
  return Error(absl::StatusCode::kDataLoss, Reason::kModelCorrupt, absl::StrCat(path, ": ", what));
}

bool IsZero(const json& value) {
  if (value.is_number()) return value.get<double>() == 0;
  if (value.is_array()) return std::all_of(value.begin(), value.end(), IsZero);
  return value.is_null() || value == json(false) || value == json::object();
}

bool HasNoEffect(absl::string_view key, const json& value) {
  if (key != "mlp_multipliers" || !value.is_array()) return IsZero(value);
  return std::all_of(value.begin(), value.end(), [](const json& factor) { return factor == json(1); });
}

// The config's keys, with errors that name them.
class Keys {
 public:
  Keys(const json& config, absl::string_view path) : config_(config), path_(path) {}

  absl::StatusOr<int64_t> Size(absl::string_view key, int64_t max) const {
    const json* value = FindValue(config_, key);
    if (value == nullptr) return Corrupt(path_, absl::StrCat(key, " is missing"));
    const std::optional<int64_t> size = AsCount(*value);
    if (!size || *size < 1 || *size > max) {
      return Corrupt(path_, absl::StrCat(key, " is ", Describe(*value), "; 1 to ", max, " was expected"));
    }
    return *size;
  }
  absl::StatusOr<std::string> Text(absl::string_view key, absl::string_view fallback) const {
    const json* value = FindValue(config_, key);
    if (value == nullptr) return std::string(fallback);
    if (!value->is_string())
      return Corrupt(path_, absl::StrCat(key, " is ", Describe(*value), "; a string was expected"));
    return value->get_ref<const std::string&>();
  }
  absl::StatusOr<bool> Flag(absl::string_view key, bool fallback) const {
    const json* value = FindValue(config_, key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean())
      return Corrupt(path_, absl::StrCat(key, " is ", Describe(*value), "; a bool was expected"));
    return value->get<bool>();
  }
  bool Has(absl::string_view key) const { return FindValue(config_, key) != nullptr; }

 private:
  const json& config_;
  absl::string_view path_;
};

absl::StatusOr<const Family*> FamilyOf(const Keys& keys, absl::string_view path) {
  SHARDMLP_ASSIGN_OR_RETURN(const std::string type, keys.Text("model_type", ""));
  if (type.empty()) return Corrupt(path, "model_type is missing");
  if (const Family* family = FindFamily(type); family != nullptr) return family;
  if (const absl::string_view why = WhyRefused(type); !why.empty()) {
    return Unsupported(path, absl::StrCat("model_type ", Describe(type), " is not served: ", why));
  }
  const std::string served = absl::StrJoin(
      Families(), ", ", [](std::string* out, const Family& family) { absl::StrAppend(out, family.model_type); });
  return Unsupported(path, absl::StrCat("model_type ", Describe(type), " is not served; these are: ", served));
}

absl::StatusOr<Activation> ActivationOf(const Family& family, const Keys& keys, absl::string_view path) {
  SHARDMLP_ASSIGN_OR_RETURN(const std::string value, keys.Text(family.activation_key, family.default_activation));
  const absl::StatusOr<ActivationKind> kind = ActivationFromConfig(value == "gelu" ? family.gelu_means : value);
  if (!kind.ok()) {
    return Unsupported(path, absl::StrCat(family.activation_key, ": ", kind.status().message()));
  }
  return Activation{.kind = *kind, .gated = family.gated};
}

absl::StatusOr<MlpConfig> MlpOf(const Family& family, const Keys& keys, absl::string_view path) {
  MlpConfig mlp;
  SHARDMLP_ASSIGN_OR_RETURN(mlp.hidden_size, keys.Size(family.hidden_size_key, kMaxSize));
  mlp.output_size = mlp.hidden_size;
  if (family.default_intermediate_factor != 0 && !keys.Has(family.intermediate_size_key)) {
    mlp.intermediate_size = family.default_intermediate_factor * mlp.hidden_size;
  } else {
    SHARDMLP_ASSIGN_OR_RETURN(mlp.intermediate_size, keys.Size(family.intermediate_size_key, kMaxSize));
  }
  SHARDMLP_ASSIGN_OR_RETURN(mlp.activation, ActivationOf(family, keys, path));
  bool bias = family.bias;
  if (!family.bias_key.empty()) {
    SHARDMLP_ASSIGN_OR_RETURN(bias, keys.Flag(family.bias_key, family.bias));
  }
  mlp.gate_up_bias = mlp.down_bias = bias;
  return mlp;
}

// Weight and, where there is one, bias of a Linear.
void AppendTensors(const Family& family, const FamilyLinear& linear, absl::string_view layer_name,
                   const LayerSpec& layer, std::vector<TensorSpec>& tensors) {
  const MlpConfig& mlp = layer.mlp;
  const bool down = linear.part == LinearPart::kDown;
  const int64_t in = down ? mlp.intermediate_size : mlp.hidden_size;
  TensorSpec tensor;
  tensor.layer = layer.layer;
  tensor.output_begin = linear.part == LinearPart::kUp && family.gated ? mlp.intermediate_size : 0;
  tensor.output_count = down                                 ? mlp.output_size
                        : linear.part == LinearPart::kGateUp ? mlp.gate_up_size()
                                                             : mlp.intermediate_size;

  TensorSpec weight = tensor;
  weight.name = absl::StrCat(layer_name, ".", linear.name, ".weight");
  weight.slot = down ? TensorSlot::kDown : TensorSlot::kGateUp;
  weight.transposed = family.transposed;
  weight.shape = {tensor.output_count, in};
  if (weight.transposed) std::swap(weight.shape[0], weight.shape[1]);
  tensors.push_back(std::move(weight));

  if (!(down ? mlp.down_bias : mlp.gate_up_bias)) return;
  tensor.name = absl::StrCat(layer_name, ".", linear.name, ".bias");
  tensor.slot = down ? TensorSlot::kDownBias : TensorSlot::kGateUpBias;
  tensor.shape = {tensor.output_count};
  tensors.push_back(std::move(tensor));
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view text, absl::string_view path) {
  SHARDMLP_ASSIGN_OR_RETURN(const json document, ParseJsonObject(text, path, Reason::kModelCorrupt));
  const Keys keys(document, path);
  ModelConfig config;
  SHARDMLP_ASSIGN_OR_RETURN(config.family, FamilyOf(keys, path));
  for (const RefusedKey& refused : kRefusedKeys) {
    const json* value = FindValue(document, refused.key);
    if (value != nullptr && !HasNoEffect(refused.key, *value)) {
      return Unsupported(path, absl::StrCat(refused.key, " is ", Describe(*value), ": ", refused.why));
    }
  }
  SHARDMLP_ASSIGN_OR_RETURN(config.layer_count, keys.Size(config.family->layer_count_key, kMaxLayerCount));
  SHARDMLP_ASSIGN_OR_RETURN(config.mlp, MlpOf(*config.family, keys, path));
  return config;
}

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    return Error(absl::StatusCode::kNotFound, Reason::kInvalidArgument, absl::StrCat(folder, " is not a folder"));
  }
  const std::string path = absl::StrCat(folder, "/config.json");
  SHARDMLP_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, kMaxConfigBytes, Reason::kModelCorrupt));
  return ParseModelConfig(text, path);
}

absl::StatusOr<ModelSpec> MakeModelSpec(const ModelConfig& config, absl::string_view prefix,
                                        const ModelFolderOptions& options) {
  const int last_layer = static_cast<int>(config.layer_count) - 1;
  const auto [first, last] = options.layers.value_or(std::pair(0, last_layer));
  if (first < 0 || last < first || last > last_layer) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kUnknownLayer,
                 absl::StrCat("layers ", first, "-", last, " were asked for; the model has 0-", last_layer));
  }
  const Family& family = *config.family;
  ModelSpec spec;
  spec.model_type = std::string(family.model_type);
  spec.dtype = options.dtype;
  for (int i = first; i <= last; ++i) {
    const std::string layer_name = absl::StrCat(prefix, family.layers, ".", i);
    LayerSpec layer{.layer = i, .module = absl::StrCat(layer_name, ".", family.module), .mlp = config.mlp};
    layer.mlp.dtype = options.dtype;
    for (const FamilyLinear& linear : family.linears) AppendTensors(family, linear, layer_name, layer, spec.tensors);
    spec.layers.push_back(std::move(layer));
  }
  return spec;
}

}  // namespace shardmlp
