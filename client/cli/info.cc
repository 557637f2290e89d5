#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "client/cli/commands.h"
#include "client/cli/trainers_json.h"
#include "client/cli/units.h"

namespace shardmlp {
namespace {

struct MemoryUse {
  absl::string_view name;  // as the server's memory plan has it
  absl::string_view key;   // as the protocol has it
  int64_t bytes;
};

std::vector<MemoryUse> MemoryUses(const ClientMemoryPlan& memory) {
  return {{"weights", "weights_bytes", memory.weights_bytes},
          {"gradients", "gradients_bytes", memory.gradients_bytes},
          {"master weights", "master_weights_bytes", memory.master_weights_bytes},
          {"optimizer state", "optimizer_bytes", memory.optimizer_bytes},
          {"workspace", "workspace_bytes", memory.workspace_bytes},
          {"staging", "staging_bytes", memory.staging_bytes},
          {"ledger", "ledger_bytes", memory.ledger_bytes},
          {"stash", "stash_bytes", memory.stash_bytes}};
}

}  // namespace

void PrintInfo(const ServedModel& model, std::ostream& out) {
  out << absl::StreamFormat("model     %s, computed in %s%s\n", model.model_type, Name(model.compute_dtype),
                            model.frozen ? ", frozen" : "");
  out << absl::StreamFormat("step      %d, attempt %d, weights version %d\n", model.position.step,
                            model.position.attempt, model.position.weights_version);
  out << absl::StreamFormat("limits    messages of %s, shards of %s, tiles of %d rows, %d calls at once\n",
                            Bytes(model.max_message_bytes), Bytes(model.preferred_shard_bytes), model.tile_row_count,
                            model.max_call_count);
  if (model.replica.replica_count > 1) {
    out << absl::StreamFormat("replica   %d of %d, %d there now, generation %d\n", model.replica.rank,
                              model.replica.replica_count, model.replica.member_count, model.replica.generation);
  }
  const auto use_of = [](std::string* text, const MemoryUse& use) {
    absl::StrAppend(text, use.name, " ", Bytes(use.bytes));
  };
  out << "memory    " << absl::StrJoin(MemoryUses(model.memory), ", ", use_of);
  out << "\ntrainers  " << (model.trainers.empty() ? "none" : "") << "\n";
  for (const ClientTrainer& trainer : model.trainers) {
    out << absl::StreamFormat("  run '%s' rank %d of %d%s\n", trainer.run_id, trainer.trainer_rank,
                              trainer.trainer_count, trainer.sealed ? ", sealed" : "");
  }
  out << absl::StreamFormat("\n%6s  %-36s %8s %13s %8s  %s\n", "layer", "module", "hidden", "intermediate", "output",
                            "activation");
  for (const ClientLayer& layer : model.layers) {
    out << absl::StreamFormat("%6d  %-36s %8d %13d %8d  %s%s\n", layer.layer, layer.module, layer.hidden_size,
                              layer.intermediate_size, layer.output_size, layer.activation,
                              layer.gated ? ", gated" : "");
  }
}

void PrintInfoAsJson(const ServedModel& model, std::ostream& out) {
  nlohmann::ordered_json json = {
      {"model_type", model.model_type},
      {"compute_dtype", std::string(Name(model.compute_dtype))},
      {"frozen", model.frozen},
      {"position",
       {{"step", model.position.step},
        {"attempt", model.position.attempt},
        {"weights_version", model.position.weights_version}}},
      {"limits",
       {{"max_message_bytes", model.max_message_bytes},
        {"preferred_shard_bytes", model.preferred_shard_bytes},
        {"tile_row_count", model.tile_row_count},
        {"max_call_count", model.max_call_count}}},
  };
  json["replica"] = {{"rank", model.replica.rank},
                     {"replica_count", model.replica.replica_count},
                     {"member_count", model.replica.member_count},
                     {"generation", model.replica.generation},
                     {"member_ranks", model.replica.member_ranks}};
  for (const MemoryUse& use : MemoryUses(model.memory)) json["memory"][std::string(use.key)] = use.bytes;
  json["trainers"] = TrainersAsJson(model);
  json["layers"] = nlohmann::json::array();
  for (const ClientLayer& layer : model.layers) {
    json["layers"].push_back({{"layer", layer.layer},
                              {"module", layer.module},
                              {"hidden_size", layer.hidden_size},
                              {"intermediate_size", layer.intermediate_size},
                              {"output_size", layer.output_size},
                              {"activation", layer.activation},
                              {"gated", layer.gated}});
  }
  json["tensors"] = nlohmann::json::array();
  for (const ClientTensor& tensor : model.tensors) {
    json["tensors"].push_back({{"name", tensor.name},
                               {"layer", tensor.layer},
                               {"shape", tensor.shape},
                               {"dtype", std::string(Name(tensor.dtype))}});
  }
  out << json.dump(2) << "\n";
}

}  // namespace shardmlp
