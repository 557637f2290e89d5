#include "client/cli/plan/planned_model.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "client/cli/plan/plan.h"
#include "kernels/status.h"
#include "server/engine/engine_options.h"
#include "server/model/file.h"
#include "server/model/model_config.h"

namespace shardmlp {
namespace {

constexpr int64_t kMaxConfigBytes = 16 << 20;

// The first of the keys that is there, which families call differently.
double NumberOf(const nlohmann::json& config, std::initializer_list<const char*> keys, double fallback) {
  for (const char* key : keys) {
    if (const auto found = config.find(key); found != config.end() && found->is_number()) return found->get<double>();
  }
  return fallback;
}

// 6 FLOP a parameter, and causal scores over half of the sequence: two products forward, twice that backward.
absl::StatusOr<double> OwnFlops(const PlanFlags& flags, const ModelConfig& model) {
  const std::string path = absl::StrCat(flags.model, "/config.json");
  SHARDMLP_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, kMaxConfigBytes, Reason::kModelCorrupt));
  const nlohmann::json config = nlohmann::json::parse(text, /*cb=*/nullptr, /*allow_exceptions=*/false);
  const auto hidden = static_cast<double>(model.mlp.hidden_size);
  const double heads = std::max(NumberOf(config, {"num_attention_heads", "n_head"}, 1), 1.0);
  const double width = heads * NumberOf(config, {"head_dim"}, hidden / heads);
  const double key_width = width / heads * NumberOf(config, {"num_key_value_heads"}, heads);
  const double projections = hidden * (2 * width + 2 * key_width);
  const double scores = 2 * static_cast<double>(flags.sequence) * width;
  const double head = hidden * NumberOf(config, {"vocab_size"}, 0);
  return static_cast<double>(model.layer_count) * (6 * projections + 3 * scores) + 6 * head;
}

ClientLayer ToClientLayer(const LayerSpec& layer) {
  return {.layer = layer.layer,
          .module = layer.module,
          .hidden_size = layer.mlp.hidden_size,
          .intermediate_size = layer.mlp.intermediate_size,
          .output_size = layer.mlp.output_size,
          .activation = std::string(Name(layer.mlp.activation.kind)),
          .gated = layer.mlp.activation.gated};
}

absl::StatusOr<MemoryPlan> PlanServer(const PlanFlags& flags, const ModelConfig& config, int first, int last,
                                      const DeviceInfo& device) {
  SHARDMLP_ASSIGN_OR_RETURN(const ModelSpec spec, MakeModelSpec(config, config.family->prefix,
                                                                {.layers = {{first, last}}, .dtype = flags.dtype}));
  return PlanMemory(spec,
                    {.frozen = flags.frozen,
                     .workspace_bytes = flags.workspace_bytes,
                     .stash_bytes = flags.stash_bytes,
                     .max_call_count = flags.max_calls},
                    device);
}

// All layers are alike, so that the server with the most needs the most.
absl::StatusOr<std::optional<int64_t>> LeastServers(const PlanFlags& flags, const ModelConfig& config,
                                                    const DeviceInfo& device) {
  int64_t too_few = 0;
  int64_t enough = config.layer_count + 1;  // or none
  while (enough - too_few > 1) {
    const int64_t count = (too_few + enough) / 2;
    const auto most = static_cast<int>((config.layer_count + count - 1) / count);
    SHARDMLP_ASSIGN_OR_RETURN(const MemoryPlan plan, PlanServer(flags, config, 0, most - 1, device));
    (CheckFits(plan, device).ok() ? enough : too_few) = count;
  }
  return enough > config.layer_count ? std::nullopt : std::optional<int64_t>(enough);
}

}  // namespace

absl::StatusOr<PlannedModel> PlanModel(const PlanFlags& flags) {
  SHARDMLP_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(flags.model));
  SHARDMLP_ASSIGN_OR_RETURN(const ModelSpec spec,
                            MakeModelSpec(config, config.family->prefix, {.layers = {}, .dtype = flags.dtype}));
  if (flags.servers > config.layer_count) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 absl::StrCat("--servers is ", flags.servers, ", and the model has ", config.layer_count, " layers"));
  }
  constexpr int64_t kAnyMemory = std::numeric_limits<int64_t>::max();
  DeviceInfo device{
      .name = "the server", .memory_bytes = kAnyMemory, .unified_memory = !flags.gpu, .host_bytes = kAnyMemory};
  if (flags.server_memory > 0) device.memory_bytes = flags.server_memory;

  PlannedModel planned{.model_type = spec.model_type, .servers = {}, .memory = {}};
  SHARDMLP_ASSIGN_OR_RETURN(planned.own_flops, OwnFlops(flags, config));
  std::vector<ClientLayer> layers;
  for (const LayerSpec& layer : spec.layers) layers.push_back(ToClientLayer(layer));
  planned.servers = SpreadLayers(layers, flags.servers);
  for (const std::vector<ClientLayer>& server : planned.servers) {
    SHARDMLP_ASSIGN_OR_RETURN(planned.memory.emplace_back(),
                              PlanServer(flags, config, server.front().layer, server.back().layer, device));
    planned.fits = planned.fits && CheckFits(planned.memory.back(), device).ok();
  }
  SHARDMLP_ASSIGN_OR_RETURN(planned.least_servers, LeastServers(flags, config, device));
  return planned;
}

}  // namespace shardmlp
