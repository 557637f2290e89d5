// Device memory of one layer's four tensors: weights, or what an optimizer has for each of them.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/mlp.h"
#include "kernels/status.h"

namespace shardmlp {

// In one buffer, in one dtype. For the device thread.
class LayerTensors {
 public:
  // Elements of the buffer. Each tensor begins at a multiple of kElements, so that of every dtype the buffer takes just
  // its bytes of what is reserved.
  static int64_t ElementCount(const MlpConfig& mlp) {
    int64_t count = 0;
    for (const Shape& shape : ShapesOf(mlp)) count += Padded(shape);
    return count;
  }
  static absl::StatusOr<LayerTensors> Allocate(Backend& backend, const MlpConfig& mlp, DType dtype) {
    LayerTensors tensors;
    SHARDMLP_ASSIGN_OR_RETURN(tensors.buffer, backend.Allocate(Memory::kDevice, ElementCount(mlp) * SizeOf(dtype)));
    char* next = static_cast<char*>(tensors.buffer.data());
    for (const Shape& shape : ShapesOf(mlp)) {
      if (shape.rows > 0) tensors.views.*shape.view = MatrixView(next, shape.rows, shape.cols, dtype);
      next += Padded(shape) * SizeOf(dtype);
    }
    return tensors;
  }

  // Those of the four that the layer has; none where nothing is allocated.
  std::vector<MatrixView> matrices() const {
    std::vector<MatrixView> matrices;
    for (const MatrixView& view : {views.gate_up, views.gate_up_bias, views.down, views.down_bias}) {
      if (!view.empty()) matrices.push_back(view);
    }
    return matrices;
  }

  Buffer buffer;
  MlpTensors views;  // absent ones empty

 private:
  struct Shape {
    MatrixView MlpTensors::*view;
    int64_t rows;
    int64_t cols;
  };
  static constexpr int64_t kElements = kBufferAlignment / SizeOf(DType::kBF16);  // the smallest
  static int64_t Padded(const Shape& shape) {
    return (shape.rows * shape.cols + kElements - 1) / kElements * kElements;
  }
  static std::array<Shape, 4> ShapesOf(const MlpConfig& mlp) {
    return {{{&MlpTensors::gate_up, mlp.gate_up_size(), mlp.hidden_size},
             {&MlpTensors::gate_up_bias, mlp.gate_up_bias ? 1 : 0, mlp.gate_up_size()},
             {&MlpTensors::down, mlp.output_size, mlp.intermediate_size},
             {&MlpTensors::down_bias, mlp.down_bias ? 1 : 0, mlp.output_size}}};
  }
};

}  // namespace shardmlp
