// Which rows have been added to the open attempt's gradient sums, so that each is added once.
//
// A contribution is (session, call, row range, hash of dy). A call's tiles are added in ascending row order, so what
// has been added of a call is always its first so many rows, and a try of the call that is sent again meets either a
// tile that is marked, and must be the same, or the very next one.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/step_types.h"

namespace shardmlp {

struct Contribution {
  int64_t session_id = 0;
  int64_t call_id = 0;
  int layer = 0;
  int64_t call_row_count = 0;
  int64_t row_begin = 0;  // of the tile
  int64_t row_count = 0;
  uint64_t dy_hash = 0;  // of the tile's dy as it came over the wire
};

enum class LedgerVerdict {
  kAdd,     // not seen: Mark it, and add it to the sums
  kRepeat,  // added before: answer it, and touch no sum
};

// Holds one attempt. Thread-compatible; the device thread checks and marks, under the engine's lock.
class Ledger {
 public:
  // Memory that one attempt may take, over all sessions: half a million calls of one tile, or more with fewer calls.
  static constexpr int64_t kMaxBytes = int64_t{128} << 20;

  // FAILED_PRECONDITION (CONTRIBUTION_CONFLICT) where the call id was used for something else; RESOURCE_EXHAUSTED
  // (OVERLOADED) above kMaxBytes.
  absl::StatusOr<LedgerVerdict> Check(const Contribution& contribution) const;
  // After kAdd.
  void Mark(const Contribution& contribution);

  // Rows marked for a session, by layer.
  LayerRows RowsOf(int64_t session_id) const;
  bool empty() const { return calls_.empty(); }
  // No less than what is allocated.
  int64_t bytes() const { return bytes_; }
  // The attempt is over.
  void Clear();

 private:
  struct Tile {
    int64_t row_end = 0;
    uint64_t dy_hash = 0;
  };
  struct CallEntry {
    int layer = 0;
    int64_t row_count = 0;
    std::vector<Tile> tiles;  // in row order, without gap from row 0
  };
  using CallKey = std::pair<int64_t, int64_t>;  // session, call

  absl::flat_hash_map<CallKey, CallEntry> calls_;
  absl::flat_hash_map<int64_t, LayerRows> rows_;
  int64_t bytes_ = 0;
};

}  // namespace shardmlp
