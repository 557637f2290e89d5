// config.json of a Hugging Face model -> what its MLPs are.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/model/family.h"
#include "server/model/model_folder.h"
#include "server/model/model_spec.h"

namespace shardmlp {

// Every layer's MLP, as the config has it. All layers of the families served are alike.
struct ModelConfig {
  const Family* family = nullptr;
  int64_t layer_count = 0;
  MlpConfig mlp;  // its dtype is not the config's to say
};

// `path` is for errors. UNIMPLEMENTED (UNSUPPORTED_MODEL), naming key and value, for what can't be served exactly;
// DATA_LOSS (MODEL_CORRUPT) where a key that is needed is missing or of another type.
absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view text, absl::string_view path);

// Of a Hugging Face folder, whose weights need not be there. NOT_FOUND where there is no such folder.
absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& folder);

// The layers and tensors of `options.layers`, names beginning with `prefix`. INVALID_ARGUMENT, with the model's own
// range, for layers that it does not have.
absl::StatusOr<ModelSpec> MakeModelSpec(const ModelConfig& config, absl::string_view prefix,
                                        const ModelFolderOptions& options);

}  // namespace shardmlp
