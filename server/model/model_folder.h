// A Hugging Face model folder: config.json and safetensors files, one or sharded through their index.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/model_spec.h"

namespace shardmlp {

struct ModelFolderOptions {
  std::optional<std::pair<int, int>> layers;  // first and last index, inclusive; absent: all
  DType dtype = DType::kF32;                  // to serve in
};

// Open files of one folder. Thread-safe; reads do not change it.
class ModelFolder {
 public:
  virtual ~ModelFolder() = default;

  // UNIMPLEMENTED (UNSUPPORTED_MODEL), naming the key, for a model that can't be served exactly; DATA_LOSS
  // (MODEL_CORRUPT), naming file and offset, for files that are torn or contradict the config.
  static absl::StatusOr<std::unique_ptr<ModelFolder>> Open(const std::string& path, const ModelFolderOptions& options);

  virtual const ModelSpec& spec() const = 0;
  // Reads a tensor of spec() into host memory in storage orientation (ViewOf's shape), converting to `to.dtype`. Names
  // file, tensor and element where one is NaN or infinite (MODEL_CORRUPT), or is so in spec().dtype
  // (UNSUPPORTED_MODEL).
  virtual absl::Status Read(const TensorSpec& tensor, MatrixView to) const = 0;
};

}  // namespace shardmlp
