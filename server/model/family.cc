#include "server/model/family.h"

#include <algorithm>

namespace shardmlp {
namespace {

constexpr FamilyLinear kGateUpDown[] = {
    {"mlp.gate_proj", LinearPart::kGate}, {"mlp.up_proj", LinearPart::kUp}, {"mlp.down_proj", LinearPart::kDown}};
constexpr FamilyLinear kFusedGateUpDown[] = {{"mlp.gate_up_proj", LinearPart::kGateUp},
                                             {"mlp.down_proj", LinearPart::kDown}};
constexpr FamilyLinear kUpDown[] = {{"mlp.up_proj", LinearPart::kUp}, {"mlp.down_proj", LinearPart::kDown}};
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
    {.model_type = "phi3", .linears = kFusedGateUpDown},
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
};

struct Refusal {
  absl::string_view model_type;
  absl::string_view why;
};

constexpr Refusal kRefusals[] = {
    {"falcon_h1", "its mlp_multipliers scale gate and output inside the MLP"},
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
