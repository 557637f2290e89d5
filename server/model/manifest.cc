#include "server/model/manifest.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "server/model/json.h"
#include "server/model/safetensors.h"

namespace shardmlp {
namespace {

using nlohmann::json;

constexpr int64_t kFormatVersion = 2;
constexpr char kChecksumKey[] = "checksum";

absl::Status Corrupt(absl::string_view path, absl::string_view what) {
  return Error(absl::StatusCode::kDataLoss, Reason::kCheckpointCorrupt, absl::StrCat(path, " ", what));
}

absl::Status Mismatch(absl::string_view path, absl::string_view what) {
  return Error(absl::StatusCode::kFailedPrecondition, Reason::kCheckpointMismatch, absl::StrCat(path, ": ", what));
}

std::string Text(const json& document) { return document.dump(2, ' ', false, json::error_handler_t::replace) + "\n"; }

// `document` as text, with its own checksum in it.
std::string Seal(json document) {
  document[kChecksumKey] = "";
  Checksum checksum;
  checksum.Add(Text(document));
  document[kChecksumKey] = ToHex(checksum.sum().xxh3_64);
  return Text(document);
}

// Reads fields, remembering whether all were there and of their type.
class Fields {
 public:
  explicit Fields(const json& object) : object_(object) {}

  int64_t Count(const char* key) {
    const json* value = FindValue(object_, key);
    const std::optional<int64_t> count = value == nullptr ? std::nullopt : AsCount(*value);
    ok_ = ok_ && count.has_value();
    return count.value_or(0);
  }
  std::string String(const char* key) {
    const json* value = FindValue(object_, key);
    const bool found = value != nullptr && value->is_string();
    ok_ = ok_ && found;
    return found ? value->get<std::string>() : "";
  }
  // Empty where it is missing.
  const json& Container(const char* key, json::value_t type) {
    static const json kEmpty;
    const json* value = FindValue(object_, key);
    const bool found = value != nullptr && value->type() == type;
    ok_ = ok_ && found;
    return found ? *value : kEmpty;
  }
  bool ok() const { return ok_; }

 private:
  const json& object_;
  bool ok_ = true;
};

bool ReadTensor(const json& value, ManifestTensor& tensor) {
  if (!value.is_object()) return false;
  Fields fields(value);
  tensor.name = fields.String("name");
  tensor.dtype = fields.String("dtype");
  tensor.updates = {.count = fields.Count("update_count"), .optimizer = fields.String("optimizer")};
  for (const json& size : fields.Container("shape", json::value_t::array)) {
    const std::optional<int64_t> count = AsCount(size);
    if (!count) return false;
    tensor.shape.push_back(*count);
  }
  return fields.ok();
}

bool ReadSum(const json& value, FileSum& sum) {
  if (!value.is_object()) return false;
  Fields fields(value);
  sum.size = fields.Count("size");
  return absl::SimpleHexAtoi(fields.String("xxh3_64"), &sum.xxh3_64) && fields.ok();
}

bool ReadManifest(const json& document, Manifest& manifest) {
  Fields fields(document);
  manifest.saved_unix_nanos = fields.Count("saved_unix_nanos");
  manifest.step = fields.Count("step");
  if (document.contains("generation")) manifest.generation = fields.Count("generation");
  manifest.model_type = fields.String("model_type");
  manifest.dtype = fields.String("dtype");
  for (const auto& [name, sum] : fields.Container("files", json::value_t::object).items()) {
    if (!ReadSum(sum, manifest.files[name])) return false;
  }
  for (const json& tensor : fields.Container("tensors", json::value_t::array)) {
    if (!ReadTensor(tensor, manifest.tensors.emplace_back())) return false;
  }
  return fields.ok();
}

}  // namespace

std::string ManifestText(const Manifest& manifest) {
  json document = {{"format_version", kFormatVersion},
                   {"saved_unix_nanos", manifest.saved_unix_nanos},
                   {"step", manifest.step},
                   {"model_type", manifest.model_type},
                   {"dtype", manifest.dtype},
                   {"files", json::object()},
                   {"tensors", json::array()}};
  if (manifest.generation > 0) document["generation"] = manifest.generation;
  for (const auto& [name, sum] : manifest.files) {
    document["files"][name] = {{"size", sum.size}, {"xxh3_64", ToHex(sum.xxh3_64)}};
  }
  for (const ManifestTensor& tensor : manifest.tensors) {
    document["tensors"].push_back({{"name", tensor.name},
                                   {"dtype", tensor.dtype},
                                   {"shape", tensor.shape},
                                   {"optimizer", tensor.updates.optimizer},
                                   {"update_count", tensor.updates.count}});
  }
  return Seal(std::move(document));
}

absl::StatusOr<Manifest> ParseManifest(absl::string_view text, absl::string_view path) {
  SHARDMLP_ASSIGN_OR_RETURN(const json document, ParseJsonObject(text, path, Reason::kCheckpointCorrupt));
  if (Seal(document) != text) return Corrupt(path, "was altered: its checksum is not that of its content");
  if (const json* version = FindValue(document, "format_version"); version == nullptr || *version != kFormatVersion) {
    return Mismatch(path, absl::StrCat("format_version is ", version == nullptr ? "missing" : Describe(*version), "; ",
                                       kFormatVersion, " was expected"));
  }
  Manifest manifest;
  if (!ReadManifest(document, manifest)) return Corrupt(path, "lacks a field, or has one of another type");
  return manifest;
}

absl::Status CheckModel(const Manifest& manifest, const ModelSpec& model, absl::string_view path) {
  if (manifest.model_type != model.model_type) {
    return Mismatch(path,
                    absl::StrCat("model_type is ", manifest.model_type, "; the model served is a ", model.model_type));
  }
  if (manifest.dtype != Name(model.dtype)) {
    return Mismatch(path, absl::StrCat("dtype is ", manifest.dtype, "; the model is served in ", Name(model.dtype)));
  }
  for (size_t i = 0; i < std::max(manifest.tensors.size(), model.tensors.size()); ++i) {
    if (i >= manifest.tensors.size()) return Mismatch(path, absl::StrCat("lacks tensor ", model.tensors[i].name));
    const ManifestTensor& saved = manifest.tensors[i];
    if (i >= model.tensors.size()) return Mismatch(path, absl::StrCat("tensor ", saved.name, " is not served"));
    const TensorSpec& served = model.tensors[i];
    if (saved.name != served.name || saved.shape != served.shape) {
      return Mismatch(path, absl::StrCat("tensor ", i, " is ", saved.name, " ", ShapeName(saved.shape),
                                         "; the model has ", served.name, " ", ShapeName(served.shape)));
    }
  }
  return absl::OkStatus();
}

}  // namespace shardmlp
