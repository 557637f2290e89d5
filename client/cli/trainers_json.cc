#include "client/cli/trainers_json.h"

#include <nlohmann/json.hpp>

namespace shardmlp {

nlohmann::ordered_json TrainersAsJson(const ServedModel& model) {
  nlohmann::ordered_json trainers = nlohmann::ordered_json::array();
  for (const ClientTrainer& trainer : model.trainers) {
    trainers.push_back({{"run_id", trainer.run_id},
                        {"trainer_rank", trainer.trainer_rank},
                        {"trainer_count", trainer.trainer_count},
                        {"sealed", trainer.sealed}});
  }
  return trainers;
}

}  // namespace shardmlp
