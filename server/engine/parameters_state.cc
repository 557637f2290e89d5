// Parameters as others see them: tensors as the file has them, checkpoints, and the state that replicas have in common.
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "server/engine/parameters.h"

namespace shardmlp {
namespace {

// to [cols, rows] = from [rows, cols], transposed, in blocks that stay in the cache.
void Transpose(const char* from, int64_t rows, int64_t cols, int64_t element_bytes, char* to) {
  constexpr int64_t kBlock = 64;
  for (int64_t row_block = 0; row_block < rows; row_block += kBlock) {
    for (int64_t col_block = 0; col_block < cols; col_block += kBlock) {
      for (int64_t row = row_block; row < std::min(rows, row_block + kBlock); ++row) {
        for (int64_t col = col_block; col < std::min(cols, col_block + kBlock); ++col) {
          std::memcpy(to + (col * rows + row) * element_bytes, from + (row * cols + col) * element_bytes,
                      element_bytes);
        }
      }
    }
  }
}

// The file's [rows, cols]; a one-dimensional tensor is one row.
int64_t FileRows(const TensorSpec& tensor) { return tensor.shape.size() == 1 ? 1 : tensor.shape[0]; }
int64_t FileCols(const TensorSpec& tensor) { return tensor.shape.back(); }

}  // namespace

absl::Status Parameters::ReadRows(const TensorSpec& tensor, int64_t row_begin, int64_t row_count, absl::Span<char> to) {
  return ReadView(tensor, ViewOf(tensor, LayerOf(tensor).weights.views), row_begin, row_count, to);
}

absl::Status Parameters::ReadView(const TensorSpec& tensor, ConstMatrixView view, int64_t row_begin, int64_t row_count,
                                  absl::Span<char> to) {
  const ConstMatrixView part = tensor.transposed ? view.Cols(row_begin, row_count) : view.Rows(row_begin, row_count);
  if (part.empty()) return absl::OkStatus();
  SHARDMLP_ASSIGN_OR_RETURN(const Buffer host, backend_.Allocate(Memory::kStaging, part.byte_count()));
  SHARDMLP_RETURN_IF_ERROR(backend_.Copy(Stream::kCompute, part, host.View(part.rows, part.cols, part.dtype)));
  SHARDMLP_RETURN_IF_ERROR(Drain());
  const char* data = static_cast<const char*>(host.data());
  if (tensor.transposed) {
    Transpose(data, part.rows, part.cols, SizeOf(part.dtype), to.data());
  } else {
    std::memcpy(to.data(), data, to.size());
  }
  return absl::OkStatus();
}

absl::Status Parameters::WriteView(const TensorSpec& tensor, MatrixView view, absl::Span<const char> from) {
  SHARDMLP_ASSIGN_OR_RETURN(const Buffer host, backend_.Allocate(Memory::kStaging, view.byte_count()));
  char* data = static_cast<char*>(host.data());
  if (tensor.transposed) {
    Transpose(from.data(), FileRows(tensor), FileCols(tensor), SizeOf(view.dtype), data);
  } else {
    std::memcpy(data, from.data(), from.size());
  }
  SHARDMLP_RETURN_IF_ERROR(backend_.Copy(Stream::kCompute, host.View(view.rows, view.cols, view.dtype), view));
  return Drain();
}

CheckpointTensor Parameters::Saved(const TensorSpec& tensor, const std::string& suffix, const MlpTensors& tensors) {
  const MatrixView view = ViewOf(tensor, tensors);
  return {tensor.name + suffix, view.dtype, tensor.shape,
          [this, &tensor, view](absl::Span<char> out) { return ReadView(tensor, view, 0, FileRows(tensor), out); }};
}

CheckpointState Parameters::Snapshot(int64_t step) {
  CheckpointState state;
  state.step = step;
  state.updates = updates_;
  for (const TensorSpec& tensor : model_.tensors) {
    const Layer& layer = LayerOf(tensor);
    state.weights.push_back(Saved(tensor, "", layer.weights.views));
    if (layer.master.buffer.data() != nullptr) state.optimizer.push_back(Saved(tensor, ".master", layer.master.views));
    state.optimizer.push_back(Saved(tensor, ".moment1", layer.moment1.views));
    state.optimizer.push_back(Saved(tensor, ".moment2", layer.moment2.views));
  }
  return state;
}

std::vector<Parameters::Restored> Parameters::RestoredTensors() {
  std::vector<Restored> restored;
  for (const TensorSpec& tensor : model_.tensors) {
    Layer& layer = LayerOf(tensor);
    const auto add = [&](absl::string_view suffix, const MlpTensors& tensors) {
      restored.push_back({&tensor, absl::StrCat(tensor.name, suffix), ViewOf(tensor, tensors)});
    };
    add("", layer.weights.views);
    if (frozen_) continue;
    if (layer.master.buffer.data() != nullptr) add(".master", layer.master.views);
    add(".moment1", layer.moment1.views);
    add(".moment2", layer.moment2.views);
  }
  return restored;
}

absl::Status Parameters::CheckRestorable(const Checkpoint& checkpoint) {
  for (const Restored& restored : RestoredTensors()) {
    SHARDMLP_RETURN_IF_ERROR(checkpoint.Check(restored.name, restored.view.dtype, restored.view.byte_count()));
  }
  return absl::OkStatus();
}

absl::Status Parameters::Restore(const Checkpoint& checkpoint) {
  for (const Restored& restored : RestoredTensors()) {
    std::vector<char> bytes(restored.view.byte_count());
    SHARDMLP_RETURN_IF_ERROR(checkpoint.Read(restored.name, restored.view.dtype, absl::MakeSpan(bytes)));
    SHARDMLP_RETURN_IF_ERROR(WriteView(*restored.tensor, restored.view, bytes));
  }
  updates_ = checkpoint.updates();
  return absl::OkStatus();
}

std::vector<MatrixView> Parameters::state() const {
  std::vector<MatrixView> state;
  for (const Layer& layer : layers_) {
    for (const MatrixView& matrix : StateOf(layer)) state.push_back(matrix);
  }
  return state;
}

std::vector<MatrixView> Parameters::StateOf(const Layer& layer) {
  std::vector<MatrixView> state;
  for (const LayerTensors* tensors : {&layer.weights, &layer.master, &layer.moment1, &layer.moment2}) {
    for (const MatrixView& matrix : tensors->matrices()) state.push_back(matrix);
  }
  return state;
}

absl::StatusOr<uint64_t> Parameters::LayerChecksum(size_t layer, bool with_optimizer) {
  uint64_t checksum = 0;
  for (const MatrixView& matrix : with_optimizer ? StateOf(layers_[layer]) : layers_[layer].weights.matrices()) {
    ConstMatrixView host = matrix;
    Buffer copy;
    if (!backend_.device().unified_memory) {
      SHARDMLP_ASSIGN_OR_RETURN(copy, backend_.Allocate(Memory::kStaging, matrix.byte_count()));
      SHARDMLP_RETURN_IF_ERROR(
          backend_.Copy(Stream::kCompute, matrix, copy.View(matrix.rows, matrix.cols, matrix.dtype)));
      SHARDMLP_RETURN_IF_ERROR(Drain());
      host = copy.View(matrix.rows, matrix.cols, matrix.dtype);
    }
    checksum = XXH3_64bits_withSeed(host.data, host.byte_count(), checksum);
  }
  return checksum;
}

}  // namespace shardmlp
