#include "server/model/weight_files.h"

#include <filesystem>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "server/model/file.h"
#include "server/model/json.h"

namespace shardmlp {
namespace {

constexpr absl::string_view kSingleName = "model.safetensors";
constexpr absl::string_view kIndexName = "model.safetensors.index.json";
constexpr int64_t kMaxIndexBytes = 100'000'000;

absl::Status Corrupt(absl::string_view message) {
  return Error(absl::StatusCode::kDataLoss, Reason::kModelCorrupt, message);
}

bool Exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

// A file of the folder itself: no path, nothing hidden.
bool IsShardName(absl::string_view name) {
  return absl::EndsWith(name, ".safetensors") && !absl::StartsWith(name, ".") && !absl::StrContains(name, '/') &&
         !absl::StrContains(name, '\0');
}

}  // namespace

absl::StatusOr<WeightFiles> WeightFiles::Open(const std::string& folder) {
  WeightFiles files(folder);
  const std::string index_path = absl::StrCat(folder, "/", kIndexName);
  if (Exists(absl::StrCat(folder, "/", kSingleName))) {
    SHARDMLP_RETURN_IF_ERROR(files.OpenFile(std::string(kSingleName)));
    for (const auto& [name, entry] : files.open_files_.begin()->second.tensors())
      files.file_names_[name] = std::string(kSingleName);
  } else if (Exists(index_path)) {
    SHARDMLP_RETURN_IF_ERROR(files.ReadIndex(index_path));
  } else if (Exists(absl::StrCat(folder, "/pytorch_model.bin")) ||
             Exists(absl::StrCat(folder, "/pytorch_model.bin.index.json"))) {
    return Error(absl::StatusCode::kUnimplemented, Reason::kUnsupportedModel,
                 absl::StrCat(folder, ": pytorch_model.bin is not served; save the model as safetensors"));
  } else {
    return Error(absl::StatusCode::kNotFound, Reason::kModelCorrupt,
                 absl::StrCat(folder, " has neither ", kSingleName, " nor ", kIndexName));
  }
  return files;
}

absl::Status WeightFiles::ReadIndex(const std::string& path) {
  SHARDMLP_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, kMaxIndexBytes, Reason::kModelCorrupt));
  SHARDMLP_ASSIGN_OR_RETURN(const nlohmann::json index, ParseJsonObject(text, path, Reason::kModelCorrupt));
  const nlohmann::json* map = FindValue(index, "weight_map");
  if (map == nullptr || !map->is_object()) return Corrupt(absl::StrCat(path, " has no weight_map"));
  for (const auto& [name, file] : map->items()) {
    if (!file.is_string() || !IsShardName(file.get_ref<const std::string&>())) {
      return Corrupt(absl::StrCat(path, ": tensor ", Describe(name), " is in ", Describe(file),
                                  "; the name of a .safetensors file in the same folder was expected"));
    }
    file_names_[name] = file.get<std::string>();
  }
  return absl::OkStatus();
}

absl::Status WeightFiles::OpenFile(const std::string& file_name) {
  absl::StatusOr<File> file = File::OpenForReading(absl::StrCat(folder_, "/", file_name), Reason::kModelCorrupt);
  if (absl::IsNotFound(file.status())) {
    return Corrupt(absl::StrCat(folder_, "/", kIndexName, " lists ", file_name, ", which is missing"));
  }
  if (!file.ok()) return file.status();
  SHARDMLP_ASSIGN_OR_RETURN(SafetensorsFile tensors, SafetensorsFile::Open(*std::move(file), Reason::kModelCorrupt));
  open_files_.emplace(file_name, std::move(tensors));
  return absl::OkStatus();
}

absl::StatusOr<WeightFiles::Tensor> WeightFiles::Find(const std::string& name) {
  const auto named = file_names_.find(name);
  if (named == file_names_.end()) return Corrupt(absl::StrCat(folder_, ": tensor ", Describe(name), " is missing"));
  const std::string& file_name = named->second;
  if (!open_files_.contains(file_name)) SHARDMLP_RETURN_IF_ERROR(OpenFile(file_name));
  const SafetensorsFile& file = open_files_.at(file_name);
  const auto entry = file.tensors().find(name);
  if (entry == file.tensors().end()) {
    return Corrupt(absl::StrCat(file.path(), ": tensor ", Describe(name), " is missing, which the index says is here"));
  }
  return Tensor{.file = &file, .entry = &entry->second};
}

}  // namespace shardmlp
