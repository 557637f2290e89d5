#include "server/model/family.h"

#include <algorithm>

namespace shardmlp {
namespace {

constexpr FamilyLinear kGateUpDown[] = {
    {"mlp.gate_proj", LinearPart::kGate}, {"mlp.up_proj", LinearPart::kUp}, {"mlp.down_proj", LinearPart::kDown}};
constexpr FamilyLinear kFusedGateUpDown[] = {{"mlp.gate_up_proj", LinearPart::kGateUp},
                                             {"mlp.down_proj", LinearPart::kDown}};
constexpr FamilyLinear kUpDown[] = {{"mlp.up_proj", LinearPart::kUp}, {"mlp.down_proj", LinearPart::kDown}};
constexpr FamilyLinear kWiWo[] = {{"mlp.Wi", LinearPart::kGateUp}, {"mlp.Wo", LinearPart::kDown}};
constexpr FamilyLinear kFc12[] = {{"mlp.fc1", LinearPart::kUp}, {"mlp.fc2", LinearPart::kDown}};
constexpr FamilyLinear kDense[] = {{"mlp.dense_h_to_4h", LinearPart::kUp}, {"mlp.dense_4h_to_h", LinearPart::kDown}};
constexpr FamilyLinear kOpt[] = {{"fc1", LinearPart::kUp}, {"fc2", LinearPart::kDown}};
constexpr FamilyLinear kBert[] = {{"intermediate.dense", LinearPart::kUp}, {"output.dense", LinearPart::kDown}};
constexpr FamilyLinear kFcProj[] = {{"mlp.c_fc", LinearPart::kUp}, {"mlp.c_proj", LinearPart::kDown}};

constexpr Family kFamilies[] = {
    {.model_type = "llama", .linears = kGateUpDown, .bias_key = "mlp_bias"},
    {.model_type = "mistral", .linears = kGateUpDown},
    {.model_type = "qwen2", .linears = kGateUpDown},
    {.model_type = "qwen3", .linears = kGateUpDown},
    {.model_type = "olmo2", .linears = kGateUpDown},
    {.model_type = "cohere", .linears = kGateUpDown},
    {.model_type = "granite", .linears = kGateUpDown, .bias_key = "mlp_bias"},
    {.model_type = "gemma",
     .linears = kGateUpDown,
     .default_activation = "gelu_pytorch_tanh",
     .gelu_means = "gelu_pytorch_tanh"},
    {.model_type = "gemma2",
     .linears = kGateUpDown,
     .activation_key = "hidden_activation",
     .default_activation = "gelu_pytorch_tanh"},
    {.model_type = "gemma3_text",
     .linears = kGateUpDown,
     .activation_key = "hidden_activation",
     .default_activation = "gelu_pytorch_tanh"},
    {.model_type = "phi3", .linears = kFusedGateUpDown},
    {.model_type = "glm4", .linears = kFusedGateUpDown},
    {.model_type = "gpt2",
     .prefix = "transformer.",
     .layers = "h",
     .linears = kFcProj,
     .gated = false,
     .transposed = true,
     .layer_count_key = "n_layer",
     .hidden_size_key = "n_embd",
     .intermediate_size_key = "n_inner",
     .default_intermediate_factor = 4,
     .activation_key = "activation_function",
     .default_activation = "gelu_new",
     .bias = true},
    {.model_type = "nemotron",
     .linears = kUpDown,
     .gated = false,
     .default_activation = "relu2",
     .bias_key = "mlp_bias"},
    {.model_type = "gpt_neox",
     .prefix = "gpt_neox.",
     .linears = kDense,
     .gated = false,
     .default_activation = "gelu",
     .bias = true},
    {.model_type = "falcon",
     .prefix = "transformer.",
     .layers = "h",
     .linears = kDense,
     .gated = false,
     .intermediate_size_key = "ffn_hidden_size",
     .default_intermediate_factor = 4,
     .activation_key = "activation",
     .default_activation = "gelu",
     .bias_key = "bias"},
    {.model_type = "starcoder2",
     .linears = kFcProj,
     .gated = false,
     .default_activation = "gelu_pytorch_tanh",
     .bias_key = "use_bias",
     .bias = true},
    {.model_type = "phi", .linears = kFc12, .gated = false, .default_activation = "gelu_new", .bias = true},
    {.model_type = "opt",
     .layers = "decoder.layers",
     .module = "fc1",
     .linears = kOpt,
     .gated = false,
     .intermediate_size_key = "ffn_dim",
     .activation_key = "activation_function",
     .default_activation = "relu",
     .bias_key = "enable_bias",
     .bias = true},
    {.model_type = "bert",
     .prefix = "bert.",
     .layers = "encoder.layer",
     .module = "intermediate",
     .linears = kBert,
     .gated = false,
     .default_activation = "gelu",
     .bias = true},
    {.model_type = "modernbert",
     .linears = kWiWo,
     .activation_key = "hidden_activation",
     .default_activation = "gelu",
     .bias_key = "mlp_bias"},
};

struct Refusal {
  absl::string_view model_type;
  absl::string_view why;
};

constexpr Refusal kRefusals[] = {
    {"falcon_h1", "its mlp_multipliers scale gate and output inside the MLP"},
    {"gemma3", "it is the multimodal wrapper; its text model alone, gemma3_text, is served"},
    {"gemma3n", "its activation sparsity depends on the whole row"},
    {"gemma3n_text", "its activation sparsity depends on the whole row"},
    {"apertus", "its activation, xielu, has parameters that are learned"},
    {"bloom", "its MLP adds the residual itself"},
};

}  // namespace

absl::Span<const Family> Families() { return kFamilies; }

const Family* FindFamily(absl::string_view model_type) {
  const auto found = std::find_if(std::begin(kFamilies), std::end(kFamilies),
                                  [model_type](const Family& family) { return family.model_type == model_type; });
  return found == std::end(kFamilies) ? nullptr : found;
}

absl::string_view WhyRefused(absl::string_view model_type) {
  for (const Refusal& refusal : kRefusals) {
    if (refusal.model_type == model_type) return refusal.why;
  }
  return "";
}

}  // namespace shardmlp
