// Staging memory of calls: a call that is open has a lane to itself, so that no stalled client holds up another.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "server/engine/stash.h"
#include "server/engine/step_types.h"
#include "server/model/model_spec.h"

namespace shardmlp {

// One tile is received while another is computed, and one result is sent while the next is written.
inline constexpr int kLaneDepth = 2;

struct Lane {
  struct Input {
    Buffer x;   // [tile rows, H]
    Buffer dy;  // [tile rows, O]
  };
  std::array<Input, kLaneDepth> inputs;
  std::array<Buffer, kLaneDepth> outputs;  // [tile rows, max(H, O)]
  std::shared_ptr<KeptRows> kept;          // of the call, in the stash; null for none
};

// The buffers of a lane for tiles of up to `rows` rows of any of `layers`, in the widest dtype on the wire.
struct LaneSize {
  LaneSize(const std::vector<LayerSpec>& layers, int64_t rows);
  int64_t bytes() const { return kLaneDepth * (x_bytes + dy_bytes + output_bytes); }

  int64_t x_bytes = 0;
  int64_t dy_bytes = 0;
  int64_t output_bytes = 0;
};

// All lanes there are, allocated once and for all. Thread-safe. Keeps the backend alive, since a lane may be given back
// after the engine is gone.
class LanePool : public std::enable_shared_from_this<LanePool> {
 public:
  // Allocates `count` lanes, of which readers may have `reader_count` at once, or fails as the backend does.
  static absl::StatusOr<std::shared_ptr<LanePool>> Create(std::shared_ptr<Backend> backend,
                                                          const std::vector<LayerSpec>& layers, int64_t tile_rows,
                                                          int64_t count, int64_t reader_count);
  // Use Create.
  LanePool(std::shared_ptr<Backend> backend, std::vector<std::unique_ptr<Lane>> lanes, int64_t reader_count);

  // A lane for a call of a session of `role`, which goes back when its last owner drops it. RESOURCE_EXHAUSTED
  // (OVERLOADED) where all are taken, or all that readers may have. Cheap: it allocates no staging.
  absl::StatusOr<std::shared_ptr<Lane>> Acquire(SessionRole role);
  int64_t lanes_in_use() const;

 private:
  void Release(std::unique_ptr<Lane> lane, SessionRole role);

  const std::shared_ptr<Backend> backend_;
  const int64_t count_;
  const int64_t reader_count_;
  mutable absl::Mutex mutex_;
  std::vector<std::unique_ptr<Lane>> idle_ ABSL_GUARDED_BY(mutex_);
  int64_t readers_ ABSL_GUARDED_BY(mutex_) = 0;  // lanes that they have
};

}  // namespace shardmlp
