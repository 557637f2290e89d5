#include "server/engine/tile_compute.h"

#include "absl/time/clock.h"
#include "kernels/mlp_flops.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

// Observes a stage when it goes out of scope.
class StageTimer {
 public:
  StageTimer(Metrics& metrics, Pass pass, Stage stage) : metrics_(metrics), pass_(pass), stage_(stage) {}
  ~StageTimer() { metrics_.ObserveStage(pass_, stage_, absl::Now() - start_); }

 private:
  Metrics& metrics_;
  const Pass pass_;
  const Stage stage_;
  const absl::Time start_ = absl::Now();
};

}  // namespace

absl::StatusOr<std::unique_ptr<TileCompute>> TileCompute::Create(Backend& backend, const ModelSpec& model,
                                                                 Parameters& parameters, Metrics& metrics,
                                                                 int64_t tile_rows, int depth) {
  std::unique_ptr<TileCompute> compute(new TileCompute(backend, model, parameters, metrics));
  for (int i = 0; i < depth; ++i) {
    SHARDMLP_ASSIGN_OR_RETURN(TileBuffers buffers, TileBuffers::Allocate(backend, model.layers, tile_rows));
    compute->buffers_.push_back(std::move(buffers));
  }
  return compute;
}

absl::StatusOr<ConstMatrixView> TileCompute::CopyIn(ConstMatrixView from, MatrixView to) {
  if (InPlace(from, to.dtype)) return from;
  SHARDMLP_RETURN_IF_ERROR(backend_.Copy(Stream::kCopyIn, from, to));
  return ConstMatrixView(to);
}

absl::StatusOr<ConstMatrixView> TileCompute::CopyInX(const TileRows& rows, MatrixView to) {
  if (rows.kept_x.empty()) return CopyIn(rows.x, to);
  if (!rows.x.empty()) SHARDMLP_RETURN_IF_ERROR(backend_.Copy(Stream::kCopyIn, rows.x, rows.kept_x));
  if (rows.kept_x.dtype == to.dtype) return ConstMatrixView(rows.kept_x);
  SHARDMLP_RETURN_IF_ERROR(backend_.Copy(Stream::kCopyIn, rows.kept_x, to));
  return ConstMatrixView(to);
}

absl::Status TileCompute::Follow(Stream later, Stream earlier) {
  SHARDMLP_ASSIGN_OR_RETURN(const std::unique_ptr<Event> event, backend_.Record(earlier));
  return backend_.Wait(later, *event);
}

absl::StatusOr<std::unique_ptr<Event>> TileCompute::CopyOut(ConstMatrixView computed, MatrixView result) {
  if (!result.empty() && computed.data != result.data) {
    SHARDMLP_RETURN_IF_ERROR(Follow(Stream::kCopyOut, Stream::kCompute));
    SHARDMLP_RETURN_IF_ERROR(backend_.Copy(Stream::kCopyOut, computed, result));
    return backend_.Record(Stream::kCopyOut);
  }
  return backend_.Record(Stream::kCompute);
}

absl::StatusOr<std::unique_ptr<Event>> TileCompute::Forward(const TileRows& rows) {
  const MlpConfig& mlp = model_.layers[rows.layer].mlp;
  TileBuffers& buffers = NextBuffers();
  ConstMatrixView x;
  {
    const StageTimer timer(metrics_, Pass::kForward, Stage::kCopyIn);
    SHARDMLP_ASSIGN_OR_RETURN(x, CopyInX(rows, buffers.X(mlp, rows.x.rows)));
    SHARDMLP_RETURN_IF_ERROR(Follow(Stream::kCompute, Stream::kCopyIn));
  }
  const MatrixView y =
      InPlace(rows.result, mlp.dtype) ? rows.result : buffers.Result(mlp, rows.x.rows, mlp.output_size);
  {
    const StageTimer timer(metrics_, Pass::kForward, Stage::kCompute);
    SHARDMLP_RETURN_IF_ERROR(
        MlpForwardTile(backend_, mlp, parameters_.weights(rows.layer), buffers.workspace, x, y, rows.kept_gate_up));
  }
  metrics_.AddFlops(static_cast<double>(x.rows) * MlpFlops(mlp).forward(), 0);
  const StageTimer timer(metrics_, Pass::kForward, Stage::kCopyOut);
  return CopyOut(y, rows.result);
}

absl::StatusOr<std::unique_ptr<Event>> TileCompute::Backward(const TileRows& rows) {
  const MlpConfig& mlp = model_.layers[rows.layer].mlp;
  TileBuffers& buffers = NextBuffers();
  const int64_t row_count = rows.dy.rows;
  ConstMatrixView x;
  ConstMatrixView dy;
  {
    const StageTimer timer(metrics_, Pass::kBackward, Stage::kCopyIn);
    SHARDMLP_ASSIGN_OR_RETURN(x, CopyInX(rows, buffers.X(mlp, row_count)));
    SHARDMLP_ASSIGN_OR_RETURN(dy, CopyIn(rows.dy, buffers.Dy(mlp, row_count)));
    SHARDMLP_RETURN_IF_ERROR(Follow(Stream::kCompute, Stream::kCopyIn));
  }
  MatrixView dx;
  if (!rows.result.empty()) {
    dx = InPlace(rows.result, mlp.dtype) ? rows.result : buffers.Result(mlp, row_count, mlp.hidden_size);
  }
  {
    const StageTimer timer(metrics_, Pass::kBackward, Stage::kCompute);
    SHARDMLP_RETURN_IF_ERROR(MlpBackwardTile(backend_, mlp, parameters_.weights(rows.layer), buffers.workspace, x, dy,
                                             dx, rows.add_gradients ? parameters_.gradients(rows.layer) : nullptr,
                                             rows.kept_gate_up));
  }
  const MlpFlops flops(mlp);
  const auto tokens = static_cast<double>(row_count);
  metrics_.AddFlops(tokens * flops.Backward(/*input_gradient=*/!dx.empty(), rows.add_gradients),
                    rows.kept_gate_up.empty() ? tokens * flops.recompute() : 0);
  const StageTimer timer(metrics_, Pass::kBackward, Stage::kCopyOut);
  return CopyOut(dx, rows.result);
}

}  // namespace shardmlp
