#include <algorithm>

#include "kernels/mlp.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kRowMultiple = 64;

int64_t RoundUp(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t GateUpBytes(const MlpConfig& config, int64_t rows) {
  return RoundUp(rows * config.gate_up_size() * SizeOf(config.dtype));
}

}  // namespace

int64_t MlpWorkspace::Bytes(const MlpConfig& config, int64_t rows) {
  return GateUpBytes(config, rows) + RoundUp(rows * config.intermediate_size * SizeOf(config.dtype));
}

int64_t MlpWorkspace::Rows(const MlpConfig& config, int64_t bytes) {
  const int64_t row_bytes = (config.gate_up_size() + config.intermediate_size) * SizeOf(config.dtype);
  int64_t rows = bytes / std::max<int64_t>(row_bytes, 1);
  while (rows > 0 && Bytes(config, rows) > bytes) --rows;
  return rows < kRowMultiple ? rows : rows / kRowMultiple * kRowMultiple;
}

absl::StatusOr<MlpWorkspace> MlpWorkspace::Allocate(Backend& backend, int64_t bytes) {
  MlpWorkspace workspace;
  SHARDMLP_ASSIGN_OR_RETURN(workspace.buffer_, backend.Allocate(Memory::kDevice, bytes));
  return workspace;
}

int64_t MlpWorkspace::bytes() const { return buffer_.bytes(); }

MatrixView MlpWorkspace::GateUp(const MlpConfig& config, int64_t rows) const {
  return buffer_.View(rows, config.gate_up_size(), config.dtype);
}

MatrixView MlpWorkspace::Inner(const MlpConfig& config, int64_t rows) const {
  auto* data = static_cast<std::byte*>(buffer_.data());
  if (data != nullptr) data += GateUpBytes(config, rows);
  return {data, rows, config.intermediate_size, config.dtype};
}

}  // namespace shardmlp
