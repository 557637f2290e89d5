// A run's trainers, as JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "client/cpp/served_model.h"

namespace shardmlp {

// An array with an object a trainer.
nlohmann::ordered_json TrainersAsJson(const ServedModel& model);

}  // namespace shardmlp
