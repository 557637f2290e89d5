// Where a server's memory goes, computed before any of it is allocated.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "server/engine/engine_options.h"
#include "server/model/model_spec.h"

namespace shardmlp {

// What replicas exchange through, a part at a time, where their network takes other memory than what they exchange lies
// in. Of the device it is in the plan.
inline constexpr int64_t kBounceBytes = int64_t{16} << 20;

// Of the device's memory a buffer takes multiples of 256 bytes (BufferBytes), which are counted.
struct MemoryPlan {
  int64_t weights_bytes = 0;
  int64_t gradients_bytes = 0;
  int64_t master_weights_bytes = 0;  // 0 where the weights are their own masters (f32, f64)
  int64_t optimizer_bytes = 0;
  int64_t workspace_bytes = 0;  // the tiles in flight, and kBounceBytes where the device has memory of its own
  int64_t staging_bytes = 0;    // host memory: a lane for each call that may be open
  int64_t ledger_bytes = 0;     // host memory: of the tiles that one step may count
  int64_t stash_bytes = 0;      // device memory: of what forwards keep for their backward
  int64_t tile_row_count = 0;

  // Sums, as every product above, stay at the largest int64 where they would go beyond it.
  int64_t device_bytes() const;
  int64_t host_bytes() const;
  int64_t total_bytes() const;
  // A table for people, a line each.
  std::string ToString() const;
};

// Tiles that are worked on at once: one is copied in while another is computed, where that takes copying.
int TilesInFlight(const DeviceInfo& device);

// INVALID_ARGUMENT where the workspace holds no tile of one row, or the workspace or the calls are out of range.
absl::StatusOr<MemoryPlan> PlanMemory(const ModelSpec& model, const EngineOptions& options, const DeviceInfo& device);

// RESOURCE_EXHAUSTED (OUT_OF_MEMORY), with the plan, where it takes more than the device, or the host beside it, has.
absl::Status CheckFits(const MemoryPlan& plan, const DeviceInfo& device);

// Host memory that the plan leaves; below 0 where it does not fit.
int64_t SpareHostBytes(const MemoryPlan& plan, const DeviceInfo& device);

// Widest element on the wire that a server computing in `dtype` takes.
DType WidestWireDType(DType dtype);

}  // namespace shardmlp
