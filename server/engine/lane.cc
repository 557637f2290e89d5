#include "server/engine/lane.h"

#include <algorithm>
#include <utility>

#include "kernels/status.h"
#include "server/engine/memory_plan.h"

namespace shardmlp {

LaneSize::LaneSize(const std::vector<LayerSpec>& layers, int64_t rows) {
  for (const LayerSpec& layer : layers) {
    const int64_t size = rows * SizeOf(WidestWireDType(layer.mlp.dtype));
    x_bytes = std::max(x_bytes, layer.mlp.hidden_size * size);
    dy_bytes = std::max(dy_bytes, layer.mlp.output_size * size);
  }
  output_bytes = std::max(x_bytes, dy_bytes);
}

LanePool::LanePool(std::shared_ptr<Backend> backend, const std::vector<LayerSpec>& layers, int64_t tile_rows,
                   int64_t max_lanes)
    : backend_(std::move(backend)), size_(layers, tile_rows), max_lanes_(max_lanes) {}

absl::StatusOr<std::shared_ptr<Lane>> LanePool::Acquire() {
  std::unique_ptr<Lane> lane;
  {
    absl::MutexLock lock(&mutex_);
    if (in_use_ == max_lanes_) {
      return Error(absl::StatusCode::kResourceExhausted, Reason::kOverloaded,
                   absl::StrCat("all ", max_lanes_, " calls that may be open at once are open; try again later"));
    }
    ++in_use_;
    if (!idle_.empty()) {
      lane = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (lane == nullptr) {
    absl::StatusOr<std::unique_ptr<Lane>> made = Make();
    if (!made.ok()) {
      absl::MutexLock lock(&mutex_);
      --in_use_;
      return made.status();
    }
    lane = *std::move(made);
  }
  return std::shared_ptr<Lane>(
      lane.release(), [pool = shared_from_this()](Lane* returned) { pool->Release(std::unique_ptr<Lane>(returned)); });
}

int64_t LanePool::lanes_in_use() const {
  absl::MutexLock lock(&mutex_);
  return in_use_;
}

absl::StatusOr<std::unique_ptr<Lane>> LanePool::Make() const {
  auto lane = std::make_unique<Lane>();
  for (Lane::Input& input : lane->inputs) {
    SHARDMLP_ASSIGN_OR_RETURN(input.x, backend_->Allocate(Memory::kStaging, size_.x_bytes));
    SHARDMLP_ASSIGN_OR_RETURN(input.dy, backend_->Allocate(Memory::kStaging, size_.dy_bytes));
  }
  for (Buffer& output : lane->outputs) {
    SHARDMLP_ASSIGN_OR_RETURN(output, backend_->Allocate(Memory::kStaging, size_.output_bytes));
  }
  return lane;
}

void LanePool::Release(std::unique_ptr<Lane> lane) {
  absl::MutexLock lock(&mutex_);
  --in_use_;
  idle_.push_back(std::move(lane));
}

}  // namespace shardmlp
