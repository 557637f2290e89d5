// The safetensors files of a model folder, as one set of named tensors: model.safetensors, or the shards that
// model.safetensors.index.json lists.
#pragma once

#include <map>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "server/model/safetensors.h"

namespace shardmlp {

class WeightFiles {
 public:
  // A tensor and the file that holds it, valid as long as the WeightFiles.
  struct Tensor {
    const SafetensorsFile* file = nullptr;
    const SafetensorsEntry* entry = nullptr;
  };

  // Opens no shard yet. NOT_FOUND where the folder has neither file, UNIMPLEMENTED where it has weights of another
  // format, DATA_LOSS (MODEL_CORRUPT) for an index that is none or names a file outside the folder.
  static absl::StatusOr<WeightFiles> Open(const std::string& folder);

  // Tensor name -> file name.
  const std::map<std::string, std::string>& file_names() const { return file_names_; }
  // Opens the file that holds `name` where it is not open. DATA_LOSS (MODEL_CORRUPT) where none does. Not thread-safe.
  absl::StatusOr<Tensor> Find(const std::string& name);
  // Those opened so far.
  const std::map<std::string, SafetensorsFile>& open_files() const { return open_files_; }

 private:
  explicit WeightFiles(std::string folder) : folder_(std::move(folder)) {}
  absl::Status OpenFile(const std::string& file_name);
  absl::Status ReadIndex(const std::string& path);

  std::string folder_;
  std::map<std::string, std::string> file_names_;
  std::map<std::string, SafetensorsFile> open_files_;  // by file name
};

}  // namespace shardmlp
