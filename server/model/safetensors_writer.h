// Writes safetensors files, one tensor in memory at a time.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/model/checkpoint.h"
#include "server/model/checksum.h"

namespace shardmlp {

// Of its elements. INVALID_ARGUMENT for a negative size, and for more than there can be.
absl::StatusOr<int64_t> ByteCountOf(const CheckpointTensor& tensor);

// Writes and syncs a new file at `path`, which must not exist. Each tensor is read once, wider dtypes first, so that
// every tensor is aligned to its elements; equal tensors give equal files. INVALID_ARGUMENT for a name that stands
// twice or a negative size; otherwise fails as the reads and the file system do, leaving what was written.
absl::StatusOr<FileSum> WriteSafetensors(const std::string& path, absl::Span<const CheckpointTensor> tensors);

}  // namespace shardmlp
