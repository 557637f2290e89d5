// manifest.json of a checkpoint: what it holds, and the checksums of its files and of itself.
//
//   {
//     "checksum": "<XXH3-64 of this file without this line's value>",
//     "dtype": "bf16",
//     "files": {"optimizer.safetensors": {"size": 4096, "xxh3_64": "0123456789abcdef"}, "weights.safetensors": ...},
//     "format_version": 2,
//     "generation": 7,
//     "model_type": "llama",
//     "saved_unix_nanos": 1700000000000000000,
//     "step": 20,
//     "tensors": [{"dtype": "bf16", "name": "...", "optimizer": "adamw", "shape": [4, 2], "update_count": 20}, ...]
//   }
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/model/checksum.h"
#include "server/model/model_spec.h"

namespace shardmlp {

struct ManifestTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  UpdateHistory updates;
};

struct Manifest {
  int64_t saved_unix_nanos = 0;
  int64_t step = 0;
  int64_t generation = 0;  // CheckpointState::generation; not written where it is 0
  std::string model_type;
  std::string dtype;                     // that the model was served in
  std::map<std::string, FileSum> files;  // by file name
  std::vector<ManifestTensor> tensors;   // the weights, in ModelSpec::tensors' order
};

std::string ManifestText(const Manifest& manifest);

// DATA_LOSS (CHECKPOINT_CORRUPT), naming `path`, for any text but one that ManifestText gave; FAILED_PRECONDITION
// (CHECKPOINT_MISMATCH) for one of another format version.
absl::StatusOr<Manifest> ParseManifest(absl::string_view text, absl::string_view path);

// FAILED_PRECONDITION (CHECKPOINT_MISMATCH), naming the first difference, unless it is of `model`.
absl::Status CheckModel(const Manifest& manifest, const ModelSpec& model, absl::string_view path);

}  // namespace shardmlp
