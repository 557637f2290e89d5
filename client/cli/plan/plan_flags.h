// The command line of `shardmlpctl plan`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "kernels/matrix.h"

namespace CLI {
class App;
}

namespace shardmlp {

struct PlanFlags {
  std::string model = {};  // a Hugging Face folder; empty: the server at the target, measured

  // Servers that are not there yet, as their own flags say it.
  DType dtype = DType::kF32;  // of weights and arithmetic
  bool frozen = false;
  int64_t workspace_bytes = 0;
  int64_t stash_bytes = 0;
  int64_t max_calls = 8;
  bool gpu = false;            // memory of its own, apart from the host's
  int64_t server_memory = 0;   // of the device; 0: not known
  int64_t trainer_memory = 0;  // that a trainer has for MLPs; 0: not known
  int64_t servers = 1;
  int64_t trainers = 1;
  int64_t sequence = 2048;  // tokens that attend to each other
  std::optional<DType> wire_dtype = {};

  // 0, or infinite: not said.
  double server_tflops = 0;
  double trainer_tflops = 0;
  double link_gbps = 0;
  absl::Duration round_trip = absl::Milliseconds(0.2);

  // Of the measurement.
  int64_t clients = 1;
  absl::Duration duration = absl::Seconds(5);
};

inline constexpr int64_t kDefaultPlanRows = 4096;  // of a call

void AddPlanFlags(CLI::App& app, PlanFlags& flags);
// What --help ends with.
const char* PlanExamples();

}  // namespace shardmlp
