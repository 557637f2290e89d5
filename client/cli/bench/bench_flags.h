// The command line of `shardmlpctl bench`.
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

struct BenchFlags {
  int64_t clients = 1;
  int64_t connections = 1;     // of each client
  std::optional<DType> dtype;  // on the wire; absent: what the server computes in
  bool forward_only = false;
  bool train = false;                              // weight gradients too
  double rate = 0;                                 // calls a second; 0: a closed loop
  int64_t calls = 0;                               // 0: as many as the duration has
  absl::Duration duration = absl::ZeroDuration();  // zero: BenchDuration()
  absl::Duration warmup = absl::Seconds(1);
  absl::Duration retry = absl::ZeroDuration();  // a call that fails is sent again for so long
  int64_t shard_bytes = 0;                      // 0: as the server prefers
  std::string plot;                             // a PNG; empty: none
};

inline constexpr int64_t kDefaultBenchRows = 1024;  // of a call

// What `flags` mean: a duration that is not said is 10 s, or without end where there is a number of calls.
absl::Duration BenchDuration(const BenchFlags& flags);

void AddBenchFlags(CLI::App& app, BenchFlags& flags);
// What --help ends with.
const char* BenchExamples();

}  // namespace shardmlp
