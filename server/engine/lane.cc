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

absl::StatusOr<std::shared_ptr<LanePool>> LanePool::Create(std::shared_ptr<Backend> backend,
                                                           const std::vector<LayerSpec>& layers, int64_t tile_rows,
                                                           int64_t count, int64_t reader_count) {
  const LaneSize size(layers, tile_rows);
  std::vector<std::unique_ptr<Lane>> lanes;
  while (static_cast<int64_t>(lanes.size()) < count) {
    Lane& lane = *lanes.emplace_back(std::make_unique<Lane>());
    for (Lane::Input& input : lane.inputs) {
      SHARDMLP_ASSIGN_OR_RETURN(input.x, backend->Allocate(Memory::kStaging, size.x_bytes));
      SHARDMLP_ASSIGN_OR_RETURN(input.dy, backend->Allocate(Memory::kStaging, size.dy_bytes));
    }
    for (Buffer& output : lane.outputs) {
      SHARDMLP_ASSIGN_OR_RETURN(output, backend->Allocate(Memory::kStaging, size.output_bytes));
    }
  }
  return std::make_shared<LanePool>(std::move(backend), std::move(lanes), reader_count);
}

LanePool::LanePool(std::shared_ptr<Backend> backend, std::vector<std::unique_ptr<Lane>> lanes, int64_t reader_count)
    : backend_(std::move(backend)),
      count_(static_cast<int64_t>(lanes.size())),
      reader_count_(reader_count),
      idle_(std::move(lanes)) {}

absl::StatusOr<std::shared_ptr<Lane>> LanePool::Acquire(SessionRole role) {
  absl::MutexLock lock(&mutex_);
  if (idle_.empty()) {
    return Error(absl::StatusCode::kResourceExhausted, Reason::kOverloaded,
                 absl::StrCat("all ", count_, " calls that may be open at once are open; try again later"));
  }
  if (role == SessionRole::kRead) {
    if (readers_ == reader_count_) {
      return Error(absl::StatusCode::kResourceExhausted, Reason::kOverloaded,
                   absl::StrCat("all ", reader_count_, " calls that readers may have open at once are open, of ",
                                count_, " in all; try again later"));
    }
    ++readers_;
  }
  std::unique_ptr<Lane> lane = std::move(idle_.back());
  idle_.pop_back();
  return std::shared_ptr<Lane>(lane.release(), [pool = shared_from_this(), role](Lane* returned) {
    pool->Release(std::unique_ptr<Lane>(returned), role);
  });
}

int64_t LanePool::lanes_in_use() const {
  absl::MutexLock lock(&mutex_);
  return count_ - static_cast<int64_t>(idle_.size());
}

void LanePool::Release(std::unique_ptr<Lane> lane, SessionRole role) {
  lane->kept = nullptr;
  absl::MutexLock lock(&mutex_);
  if (role == SessionRole::kRead) --readers_;
  idle_.push_back(std::move(lane));
}

}  // namespace shardmlp
