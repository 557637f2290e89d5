#include "server/model/model_folder.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/status.h"
#include "server/model/convert.h"
#include "server/model/json.h"
#include "server/model/model_config.h"
#include "server/model/safetensors.h"
#include "server/model/weight_files.h"

namespace shardmlp {
namespace {

constexpr int64_t kChunkBytes = 4 << 20;

absl::Status Corrupt(absl::string_view message) {
  return Error(absl::StatusCode::kDataLoss, Reason::kModelCorrupt, message);
}

absl::Status Unsupported(absl::string_view message) {
  return Error(absl::StatusCode::kUnimplemented, Reason::kUnsupportedModel, message);
}

std::string At(const WeightFiles::Tensor& tensor, absl::string_view name) {
  return absl::StrCat(tensor.file->path(), ": tensor ", name, " at byte ", tensor.entry->begin);
}

// The family's prefix or none, as the first tensor's name has it.
absl::StatusOr<std::string> FindPrefix(const Family& family, const WeightFiles& files, const std::string& folder) {
  const std::string name = absl::StrCat(family.layers, ".0.", family.linears[0].name, ".weight");
  const std::string prefixed = absl::StrCat(family.prefix, name);
  const bool with = files.file_names().contains(prefixed);
  const bool without = files.file_names().contains(name);
  if (with && without) return Corrupt(absl::StrCat(folder, " has both tensor ", prefixed, " and tensor ", name));
  if (!with && !without) return Corrupt(absl::StrCat(folder, " has neither tensor ", prefixed, " nor tensor ", name));
  return with ? std::string(family.prefix) : std::string();
}

// The index of the layer that `name` is the weight of an MLP's Linear in; -1 where it is none.
int64_t LayerOf(absl::string_view name, absl::string_view prefix, const Family& family) {
  int64_t layer = 0;
  if (!absl::ConsumePrefix(&name, absl::StrCat(prefix, family.layers, "."))) return -1;
  const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(name, absl::MaxSplits('.', 1));
  if (!absl::SimpleAtoi(parts.first, &layer)) return -1;
  const auto is_weight = [&](const FamilyLinear& linear) {
    return parts.second == absl::StrCat(linear.name, ".weight");
  };
  return std::any_of(family.linears.begin(), family.linears.end(), is_weight) ? layer : -1;
}

// The files may have no layer beyond the config's: a part of a model is not the model.
absl::Status CheckLayerCount(const ModelConfig& config, const std::string& prefix, const WeightFiles& files,
                             const std::string& folder) {
  int64_t last = -1;
  for (const auto& [name, file_name] : files.file_names()) last = std::max(last, LayerOf(name, prefix, *config.family));
  if (last < config.layer_count) return absl::OkStatus();
  return Corrupt(absl::StrCat(folder, "/config.json: ", config.family->layer_count_key, " is ", config.layer_count,
                              "; the files have ", last + 1, " layers (the last is ", prefix, config.family->layers,
                              ".", last, ")"));
}

absl::StatusOr<WeightFiles::Tensor> FindChecked(const TensorSpec& spec, WeightFiles& files) {
  SHARDMLP_ASSIGN_OR_RETURN(const WeightFiles::Tensor tensor, files.Find(spec.name));
  if (!tensor.entry->dtype.has_value()) {
    return Unsupported(absl::StrCat(At(tensor, spec.name), " is ", tensor.entry->dtype_name,
                                    "; weights are served from F32, BF16, F16 and F64"));
  }
  if (tensor.entry->shape != spec.shape) {
    return Corrupt(absl::StrCat(At(tensor, spec.name), " is ", ShapeName(tensor.entry->shape), "; ",
                                ShapeName(spec.shape), " was expected from config.json"));
  }
  return tensor;
}

// Whether `name` lies within one of `modules`: "model.layers.0.mlp.gate_proj.bias" does in "model.layers.0.mlp".
bool IsWithin(absl::string_view name, const std::set<absl::string_view>& modules) {
  for (size_t dot = name.find('.'); dot != absl::string_view::npos; dot = name.find('.', dot + 1)) {
    if (modules.contains(name.substr(0, dot))) return true;
  }
  return false;
}

// A served MLP may have no tensor that its family lacks: a bias, a scale, an adapter. Leaving it out would not be
// exact.
absl::Status CheckNothingElse(const ModelSpec& spec, const WeightFiles& files) {
  std::set<absl::string_view> expected;
  std::set<absl::string_view> modules;
  for (const LayerSpec& layer : spec.layers) modules.insert(layer.module);
  for (const TensorSpec& tensor : spec.tensors) {
    expected.insert(tensor.name);
    modules.insert(absl::string_view(tensor.name).substr(0, tensor.name.rfind('.')));
  }
  const auto check = [&](const std::string& name, absl::string_view file_name) {
    if (expected.contains(name) || !IsWithin(name, modules)) return absl::OkStatus();
    return Unsupported(absl::StrCat(file_name, ": tensor ", Describe(name), " is not part of a ", spec.model_type,
                                    " MLP with this config.json"));
  };
  for (const auto& [name, file_name] : files.file_names()) SHARDMLP_RETURN_IF_ERROR(check(name, file_name));
  for (const auto& [file_name, file] : files.open_files()) {
    for (const auto& [name, entry] : file.tensors()) SHARDMLP_RETURN_IF_ERROR(check(name, file_name));
  }
  return absl::OkStatus();
}

// Rows of a tensor from `first_row` on must be finite, also in the dtype that they are served in.
absl::Status CheckFinite(const TensorSpec& spec, const WeightFiles::Tensor& tensor, const std::vector<char>& rows,
                         int64_t first_row, int64_t count, DType served) {
  const DType dtype = *tensor.entry->dtype;
  const int64_t found = FirstNonFinite(rows.data(), dtype, served, count);
  if (found < 0) return absl::OkStatus();
  const int64_t cols = spec.shape.back();
  std::vector<int64_t> index = {found % cols};
  if (spec.shape.size() > 1) index.insert(index.begin(), first_row + found / cols);
  const double element = ElementAt(rows.data(), dtype, found);
  const std::string what = absl::StrCat(At(tensor, spec.name), ": element ", ShapeName(index), " is ", element);
  if (!std::isfinite(element)) return Corrupt(absl::StrCat(what, "; a finite number was expected"));
  return Unsupported(absl::StrCat(what, ", which ", Name(served), " can't hold; serve the model in a wider dtype"));
}

// A file's rows from `first_row` on, `rows` of them at `bytes` in `dtype`, to their place in `to`.
void PlaceRows(const char* bytes, DType dtype, int64_t first_row, int64_t rows, bool transposed, MatrixView to) {
  if (transposed) return ConvertTransposed(bytes, dtype, to.Cols(first_row, rows));
  const MatrixView part = to.Rows(first_row, rows);
  for (int64_t row = 0; row < rows; ++row) {
    ConvertElements(bytes + row * part.cols * SizeOf(dtype), dtype, part.Rows(row, 1).data, part.dtype, part.cols);
  }
}

class SafetensorsFolder final : public ModelFolder {
 public:
  SafetensorsFolder(ModelSpec spec, WeightFiles files, std::map<std::string, WeightFiles::Tensor> tensors)
      : spec_(std::move(spec)), files_(std::move(files)), tensors_(std::move(tensors)) {}

  const ModelSpec& spec() const override { return spec_; }

  absl::Status Read(const TensorSpec& spec, MatrixView to) const override {
    const auto found = tensors_.find(spec.name);
    if (found == tensors_.end()) {
      return Error(absl::StatusCode::kInvalidArgument, Reason::kUnknownTensor,
                   absl::StrCat("tensor ", spec.name, " is not served"));
    }
    const auto& [file, entry] = found->second;
    // A bias is one row.
    const int64_t file_rows = spec.shape.size() == 1 ? 1 : spec.shape[0];
    const int64_t file_cols = spec.shape.back();
    if (to.rows != (spec.transposed ? file_cols : file_rows) || to.cols != (spec.transposed ? file_rows : file_cols)) {
      return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidShape,
                   absl::StrCat("tensor ", spec.name, " is ", ShapeName(spec.shape), " in the file",
                                spec.transposed ? ", transposed" : "", "; got ", to.ToString(), " to read it into"));
    }
    const DType dtype = *entry->dtype;
    const int64_t row_bytes = file_cols * SizeOf(dtype);
    const int64_t chunk_rows = std::min(file_rows, std::max<int64_t>(1, kChunkBytes / row_bytes));
    std::vector<char> chunk(chunk_rows * row_bytes);
    for (int64_t row = 0; row < file_rows; row += chunk_rows) {
      const int64_t rows = std::min(chunk_rows, file_rows - row);
      SHARDMLP_RETURN_IF_ERROR(file->Read(*entry, row * row_bytes, absl::MakeSpan(chunk).first(rows * row_bytes)));
      SHARDMLP_RETURN_IF_ERROR(CheckFinite(spec, found->second, chunk, row, rows * file_cols, spec_.dtype));
      PlaceRows(chunk.data(), dtype, row, rows, spec.transposed, to);
    }
    return absl::OkStatus();
  }

 private:
  ModelSpec spec_;
  WeightFiles files_;
  std::map<std::string, WeightFiles::Tensor> tensors_;  // into files_
};

}  // namespace

absl::StatusOr<std::unique_ptr<ModelFolder>> ModelFolder::Open(const std::string& path,
                                                               const ModelFolderOptions& options) {
  SHARDMLP_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(path));
  SHARDMLP_ASSIGN_OR_RETURN(WeightFiles files, WeightFiles::Open(path));
  SHARDMLP_ASSIGN_OR_RETURN(const std::string prefix, FindPrefix(*config.family, files, path));
  SHARDMLP_RETURN_IF_ERROR(CheckLayerCount(config, prefix, files, path));
  SHARDMLP_ASSIGN_OR_RETURN(ModelSpec spec, MakeModelSpec(config, prefix, options));
  std::map<std::string, WeightFiles::Tensor> tensors;
  for (const TensorSpec& tensor : spec.tensors) {
    SHARDMLP_ASSIGN_OR_RETURN(tensors[tensor.name], FindChecked(tensor, files));
  }
  SHARDMLP_RETURN_IF_ERROR(CheckNothingElse(spec, files));
  return std::make_unique<SafetensorsFolder>(std::move(spec), std::move(files), std::move(tensors));
}

}  // namespace shardmlp
