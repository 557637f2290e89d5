// What a server does: the dashboard's panels, over one window.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "client/cli/top/window.h"

namespace shardmlp {

// How often something happens, and how long it takes; NaN where it did not happen.
struct Durations {
  double per_second = 0;
  double p50_seconds = 0;
  double p99_seconds = 0;
};

// By a label's value: "forward", "train", "committed".
using ByValue = std::map<std::string, double>;

// Rates are a second. A ratio is NaN where there was nothing to divide by.
struct Activity {
  double seconds = 0;  // that rates and times are over

  int64_t step = 0;
  int64_t attempt = 0;
  ByValue attempts;             // that ended, by outcome
  ByValue phase_p90_seconds;    // of a step, by phase
  double non_finite_steps = 0;  // a second

  ByValue rows;  // by pass
  double repeated_rows = 0;
  ByValue payload_bytes;  // by direction
  int64_t open_calls = 0;
  ByValue sessions;  // by role, now

  int64_t queued_tiles = 0;
  ByValue tile_rows;      // rows a tile, by pass
  double busy_ratio = 0;  // of the device's time

  ByValue flops;  // by kind
  double recomputed_ratio = 0;

  ByValue planned_bytes;  // by use
  double resident_bytes = 0;
  double bound_bytes = 0;
  double stash_bytes = 0;
  double stash_full_ratio = 0;
  double stash_found_ratio = 0;  // of the tickets that backwards named

  std::map<std::string, std::map<std::string, Durations>> stages;  // by pass and stage
  std::map<std::string, Durations> rpcs;                           // by method, those that were called

  double failed_ratio = 0;  // of rpcs, other than by clients that went away
  ByValue failures;         // by reason, those that there were

  int64_t replicas = 0;  // that there are to be
  int64_t replica_members = 0;
  int64_t replica_generation = 0;
  int64_t replica_generations_lost = 0;
  double synced_bytes = 0;
};

// The stages of a tile's way, in its order.
inline constexpr const char* kStages[] = {"receive", "queue", "copy_in", "compute", "copy_out", "send"};
inline constexpr const char* kPasses[] = {"forward", "backward"};

Activity ActivityIn(const Window& window);

}  // namespace shardmlp
