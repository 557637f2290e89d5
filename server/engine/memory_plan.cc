#include "server/engine/memory_plan.h"

#include <limits>

#include "absl/strings/str_format.h"
#include "kernels/status.h"
#include "server/engine/lane.h"
#include "server/engine/layer_tensors.h"
#include "server/engine/ledger.h"
#include "server/engine/tile_buffers.h"

namespace shardmlp {
namespace {

// A tile below this many rows spends most of its time on reading and writing the gradient sums.
constexpr int64_t kSmallTileRows = 256;

std::string Line(absl::string_view use, int64_t bytes) {
  return absl::StrFormat("  %-16s %12.1f MiB\n", use, static_cast<double>(bytes) / (1 << 20));
}

int64_t Sum(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}

int64_t Product(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<int64_t>::max() : product;
}

absl::Status CheckRange(absl::string_view what, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
               absl::StrFormat("%s: got %d, expected %d to %d", what, value, min, max));
}

}  // namespace

int64_t MemoryPlan::device_bytes() const {
  return Sum(Sum(Sum(weights_bytes, gradients_bytes), Sum(master_weights_bytes, optimizer_bytes)),
             Sum(workspace_bytes, stash_bytes));
}

int64_t MemoryPlan::host_bytes() const { return Sum(staging_bytes, ledger_bytes); }

int64_t MemoryPlan::total_bytes() const { return Sum(device_bytes(), host_bytes()); }

std::string MemoryPlan::ToString() const {
  std::string text = "memory plan\n";
  absl::StrAppend(&text, Line("weights", weights_bytes), Line("gradients", gradients_bytes),
                  Line("master weights", master_weights_bytes), Line("optimizer state", optimizer_bytes),
                  Line("workspace", workspace_bytes), Line("staging", staging_bytes), Line("ledger", ledger_bytes),
                  Line("stash", stash_bytes), Line("total", total_bytes()));
  absl::StrAppendFormat(&text, "  tiles of %d rows%s\n", tile_row_count,
                        tile_row_count < kSmallTileRows ? " (small: a larger workspace would be faster)" : "");
  return text;
}

DType WidestWireDType(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

int TilesInFlight(const DeviceInfo& device) { return device.unified_memory ? 1 : kLaneDepth; }

absl::StatusOr<MemoryPlan> PlanMemory(const ModelSpec& model, const EngineOptions& options, const DeviceInfo& device) {
  SHARDMLP_RETURN_IF_ERROR(CheckRange("workspace_bytes", options.workspace_bytes, 0, kMaxWorkspaceBytes));
  SHARDMLP_RETURN_IF_ERROR(CheckRange("stash_bytes", options.stash_bytes, 0, kMaxStashBytes));
  SHARDMLP_RETURN_IF_ERROR(CheckRange("max_call_count", options.max_call_count, 1, kMaxCallCount));
  MemoryPlan plan;
  const int64_t size = SizeOf(model.dtype);
  const int64_t accumulator_size = SizeOf(AccumulatorOf(model.dtype));
  const bool own_masters = model.dtype != AccumulatorOf(model.dtype);
  for (const LayerSpec& layer : model.layers) {
    const int64_t elements = LayerTensors::ElementCount(layer.mlp);
    const int64_t sums = Product(elements, accumulator_size);
    plan.weights_bytes = Sum(plan.weights_bytes, Product(elements, size));
    if (options.frozen) continue;
    plan.gradients_bytes = Sum(plan.gradients_bytes, sums);
    if (own_masters) plan.master_weights_bytes = Sum(plan.master_weights_bytes, sums);
    plan.optimizer_bytes = Sum(plan.optimizer_bytes, Product(2, sums));
  }
  // One tile size for all layers keeps lanes and limits simple; layers of one model hardly differ.
  const int tiles = TilesInFlight(device);
  plan.tile_row_count = options.workspace_bytes == 0 ? kDefaultTileRows
                                                     : TileBuffers::Rows(model.layers, options.workspace_bytes / tiles);
  if (plan.tile_row_count == 0) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 absl::StrFormat("a workspace of %d bytes holds no tile: one row takes %d bytes",
                                 options.workspace_bytes, tiles * TileBuffers::Bytes(model.layers, 1)));
  }
  plan.workspace_bytes = tiles * TileBuffers::ReservedBytes(model.layers, plan.tile_row_count);
  if (!device.unified_memory) plan.workspace_bytes = Sum(plan.workspace_bytes, kBounceBytes);
  plan.staging_bytes = Product(options.max_call_count, LaneSize(model.layers, plan.tile_row_count).bytes());
  plan.stash_bytes = BufferBytes(options.stash_bytes);
  plan.ledger_bytes = options.frozen ? 0 : Ledger::kMaxBytes;
  return plan;
}

absl::Status CheckFits(const MemoryPlan& plan, const DeviceInfo& device) {
  const auto check = [&plan](int64_t bytes, absl::string_view where, int64_t available_bytes) {
    if (bytes <= available_bytes) return absl::OkStatus();
    return Error(absl::StatusCode::kResourceExhausted, Reason::kOutOfMemory,
                 absl::StrFormat("the memory plan takes %d bytes%s and %d are available; serve fewer --layers, a "
                                 "smaller --dtype, fewer --max-calls, a smaller --workspace-bytes or --stash-bytes\n%s",
                                 bytes, where, available_bytes, plan.ToString()));
  };
  if (device.unified_memory) return check(plan.total_bytes(), "", device.memory_bytes);
  SHARDMLP_RETURN_IF_ERROR(
      check(plan.device_bytes(), absl::StrFormat(" of %s's memory", device.name), device.memory_bytes));
  return check(plan.host_bytes(), " of host memory", device.host_bytes);
}

int64_t SpareHostBytes(const MemoryPlan& plan, const DeviceInfo& device) {
  return device.host_bytes - (device.unified_memory ? plan.total_bytes() : plan.host_bytes());
}

}  // namespace shardmlp
