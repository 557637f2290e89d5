#include "server/engine/memory_plan.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "kernels/status.h"
#include "server/engine/lane.h"
#include "server/engine/tile_buffers.h"

namespace shardmlp {
namespace {

// A tile below this many rows spends most of its time on reading and writing the gradient sums.
constexpr int64_t kSmallTileRows = 256;

std::string Line(absl::string_view use, int64_t bytes) {
  return absl::StrFormat("  %-16s %12.1f MiB\n", use, static_cast<double>(bytes) / (1 << 20));
}

}  // namespace

std::string MemoryPlan::ToString() const {
  std::string text = "memory plan\n";
  absl::StrAppend(&text, Line("weights", weights_bytes), Line("gradients", gradients_bytes),
                  Line("master weights", master_weights_bytes), Line("optimizer state", optimizer_bytes),
                  Line("workspace", workspace_bytes), Line("staging", staging_bytes), Line("total", total_bytes()));
  absl::StrAppendFormat(&text, "  tiles of %d rows%s\n", tile_row_count,
                        tile_row_count < kSmallTileRows ? " (small: a larger workspace would be faster)" : "");
  return text;
}

DType WidestWireDType(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

absl::StatusOr<MemoryPlan> PlanMemory(const ModelSpec& model, const EngineOptions& options) {
  MemoryPlan plan;
  const int64_t size = SizeOf(model.dtype);
  const int64_t accumulator_size = SizeOf(AccumulatorOf(model.dtype));
  const bool own_masters = model.dtype != AccumulatorOf(model.dtype);
  int64_t smallest_tile = INT64_MAX;
  for (const LayerSpec& layer : model.layers) {
    const int64_t parameters = layer.mlp.parameter_count();
    plan.weights_bytes += parameters * size;
    if (!options.frozen) {
      plan.gradients_bytes += parameters * accumulator_size;
      plan.master_weights_bytes += own_masters ? parameters * accumulator_size : 0;
      plan.optimizer_bytes += 2 * parameters * accumulator_size;
    }
    const int64_t rows =
        options.workspace_bytes == 0 ? kDefaultTileRows : TileBuffers::Rows(layer.mlp, options.workspace_bytes);
    if (rows == 0) {
      return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                   absl::StrFormat("a workspace of %d bytes holds no tile: layer %d needs %d bytes a row",
                                   options.workspace_bytes, layer.layer, TileBuffers::Bytes(layer.mlp, 1)));
    }
    smallest_tile = std::min(smallest_tile, rows);
  }
  // One tile size for all layers keeps lanes and limits simple; layers of one model hardly differ.
  plan.tile_row_count = smallest_tile;
  int64_t lane_bytes = 0;
  for (const LayerSpec& layer : model.layers) {
    plan.workspace_bytes = std::max(plan.workspace_bytes, TileBuffers::Bytes(layer.mlp, smallest_tile));
    lane_bytes = std::max(lane_bytes, LaneBytes(layer.mlp, smallest_tile));
  }
  plan.staging_bytes = options.max_call_count * lane_bytes;
  return plan;
}

absl::Status CheckFits(const MemoryPlan& plan, int64_t available_bytes) {
  if (plan.total_bytes() <= available_bytes) return absl::OkStatus();
  return Error(absl::StatusCode::kResourceExhausted, Reason::kOutOfMemory,
               absl::StrFormat("the memory plan takes %d bytes and %d are available; serve fewer --layers, a smaller "
                               "--dtype, fewer --max-calls or a smaller --workspace-bytes\n%s",
                               plan.total_bytes(), available_bytes, plan.ToString()));
}

}  // namespace shardmlp
