// What a bench measured, as JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "client/cli/bench/bench.h"

namespace shardmlp {

nlohmann::ordered_json BenchAsJson(const BenchReport& report);

}  // namespace shardmlp
