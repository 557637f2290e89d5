// Limits of an engine, in their units.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace shardmlp {

struct EngineOptions {
  bool frozen = false;          // input gradients alone; no gradient or optimizer memory
  int64_t workspace_bytes = 0;  // bounds the tiles in flight; 0: what kDefaultTileRows rows need
  int64_t stash_bytes = 0;      // what forwards may keep for their backward; 0: nothing
  int64_t max_call_count = 8;   // open at once; each has staging of its own
  int64_t max_session_count = 256;
  absl::Duration lease = absl::Seconds(30);        // a session's life without a sign of it
  absl::Duration seal_timeout = absl::Minutes(5);  // how long a seal waits for the other trainers
  // How long a thread that the other replicas wait for may be at one thing before this replica leaves them: at a job of
  // the device; at what takes as long as disks and networks do, a file of a checkpoint or a sum of all gradients.
  absl::Duration hang_timeout = absl::Minutes(1);
  absl::Duration long_timeout = absl::Minutes(30);
  std::function<absl::Time()> clock = absl::Now;  // that these times go by; thread-safe
  std::string restore = {};                       // checkpoint to start from; empty: none
  int64_t first_weights_version = 0;              // of the loaded weights; 0: drawn at random, for no two engines alike

  // Of `count` sessions, calls or bytes of the stash, those that readers may have: the rest is for trainers, whom no
  // reader may shut out. A frozen server's sessions are all alike.
  int64_t ReadersShare(int64_t count) const { return frozen ? count : count / 2; }
};

inline constexpr int64_t kDefaultTileRows = 1024;

// What the options may be at most. The sizes of a plan are computed without overflow up to there.
inline constexpr int64_t kMaxWorkspaceBytes = int64_t{1} << 50;
inline constexpr int64_t kMaxStashBytes = int64_t{1} << 50;
inline constexpr int64_t kMaxCallCount = int64_t{1} << 16;

}  // namespace shardmlp
