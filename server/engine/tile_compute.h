// One tile on the device: copy in, compute, copy out.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/mlp.h"
#include "server/engine/parameters.h"
#include "server/engine/tile_buffers.h"
#include "server/metrics.h"

namespace shardmlp {

// Rows of one tile in staging memory, in the dtype of the wire.
struct TileRows {
  size_t layer = 0;    // in ModelSpec::layers
  ConstMatrixView x;   // [R, H]
  ConstMatrixView dy;  // [R, O]; empty in a forward
  MatrixView result;   // y [R, O] or dx [R, H]; empty for a backward without input gradient
  // The stash's device memory. A forward leaves x (dtype of the wire) and [G | U] there; a backward finds x there where
  // `x` is empty, and uses [G | U] up. Empty: none.
  MatrixView kept_x;        // [R, H]
  MatrixView kept_gate_up;  // [R, 2I] or [R, I]
  bool add_gradients = false;
};

// For the device thread. Copies in, computes and copies out on the three streams, so that where the device has them a
// tile is copied in while the one before it is computed. Where staging is the device's own memory and the dtypes agree,
// nothing is copied.
class TileCompute {
 public:
  // `backend`, `model`, `parameters` and `metrics` must outlive this. `depth`: tiles in flight at once.
  static absl::StatusOr<std::unique_ptr<TileCompute>> Create(Backend& backend, const ModelSpec& model,
                                                             Parameters& parameters, Metrics& metrics,
                                                             int64_t tile_rows, int depth);

  // Done when the result is in staging memory. Rows must stay until then.
  absl::StatusOr<std::unique_ptr<Event>> Forward(const TileRows& rows);
  absl::StatusOr<std::unique_ptr<Event>> Backward(const TileRows& rows);

 private:
  TileCompute(Backend& backend, const ModelSpec& model, Parameters& parameters, Metrics& metrics)
      : backend_(backend), model_(model), parameters_(parameters), metrics_(metrics) {}

  TileBuffers& NextBuffers() { return buffers_[next_++ % buffers_.size()]; }
  bool InPlace(const ConstMatrixView& staging, DType dtype) const {
    return backend_.device().unified_memory && staging.dtype == dtype;
  }
  absl::StatusOr<ConstMatrixView> CopyIn(ConstMatrixView from, MatrixView to);
  // x of the tile in the compute dtype; by way of the stash where it is kept.
  absl::StatusOr<ConstMatrixView> CopyInX(const TileRows& rows, MatrixView to);
  absl::Status Follow(Stream later, Stream earlier);
  // Copies `computed` into `result`, unless it was computed in place.
  absl::StatusOr<std::unique_ptr<Event>> CopyOut(ConstMatrixView computed, MatrixView result);

  Backend& backend_;
  const ModelSpec& model_;
  Parameters& parameters_;
  Metrics& metrics_;
  std::vector<TileBuffers> buffers_;
  size_t next_ = 0;
};

}  // namespace shardmlp
