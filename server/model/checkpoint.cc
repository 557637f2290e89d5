#include "server/model/checkpoint.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <optional>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/status.h"
#include "server/model/checkpoint_folder.h"
#include "server/model/checksum.h"
#include "server/model/file.h"
#include "server/model/manifest.h"
#include "server/model/safetensors.h"
#include "server/model/safetensors_writer.h"

namespace shardmlp {
namespace {

namespace fs = std::filesystem;

constexpr char kWeightsName[] = "weights.safetensors";
constexpr char kOptimizerName[] = "optimizer.safetensors";
constexpr char kManifestName[] = "manifest.json";
constexpr int64_t kMaxManifestBytes = 100'000'000;

absl::Status Corrupt(absl::string_view message) {
  return Error(absl::StatusCode::kDataLoss, Reason::kCheckpointCorrupt, message);
}

absl::Status Unknown(absl::string_view path, absl::string_view name) {
  return Error(absl::StatusCode::kNotFound, Reason::kUnknownCheckpoint,
               absl::StrCat("there is no checkpoint ", name, " in ", path));
}

absl::Status NoCheckpoint(absl::string_view target, absl::string_view what) {
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
               absl::StrCat(target, " is no checkpoint; it is not ", what));
}

bool IsFolder(const std::string& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

bool Exists(const std::string& path) {
  std::error_code error;
  return fs::exists(fs::symlink_status(path, error));
}

// Whether something other than a checkpoint has the name; it is not ours to replace.
bool IsForeign(const std::string& path) {
  return IsFolder(path) ? !Exists(absl::StrCat(path, "/", kManifestName)) : Exists(path);
}

// NOT_FOUND for a file that is missing becomes the loss that it is.
absl::Status MissingIsLoss(const absl::Status& status, const std::string& path) {
  return absl::IsNotFound(status) ? Corrupt(absl::StrCat(path, " is missing")) : status;
}

absl::StatusOr<Manifest> ReadManifest(const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/", kManifestName);
  const absl::StatusOr<std::string> text = ReadTextFile(path, kMaxManifestBytes, Reason::kCheckpointCorrupt);
  if (!text.ok()) return MissingIsLoss(text.status(), path);
  return ParseManifest(*text, path);
}

int64_t ByteCount(const Manifest& manifest) {
  int64_t byte_count = 0;
  for (const auto& [name, sum] : manifest.files) byte_count += sum.size;
  return byte_count;
}

// Opens a file of a checkpoint if it is, to the byte, the one that was written.
absl::StatusOr<SafetensorsFile> OpenVerified(const Manifest& manifest, const std::string& folder,
                                             const std::string& name) {
  const std::string path = absl::StrCat(folder, "/", name);
  const auto expected = manifest.files.find(name);
  if (expected == manifest.files.end()) return Corrupt(absl::StrCat(folder, "/", kManifestName, " lacks ", name));
  absl::StatusOr<File> file = File::OpenForReading(path, Reason::kCheckpointCorrupt);
  if (!file.ok()) return MissingIsLoss(file.status(), path);
  if (file->size() != expected->second.size) {
    return Corrupt(absl::StrCat(path, " has ", file->size(), " bytes; ", expected->second.size, " were written"));
  }
  SHARDMLP_ASSIGN_OR_RETURN(const FileSum sum, SumOf(*file));
  if (sum != expected->second) {
    return Corrupt(absl::StrCat(path, " has the checksum ", ToHex(sum.xxh3_64), "; ", ToHex(expected->second.xxh3_64),
                                " was written"));
  }
  return SafetensorsFile::Open(*std::move(file), Reason::kCheckpointCorrupt);
}

class VerifiedCheckpoint final : public Checkpoint {
 public:
  VerifiedCheckpoint(const Manifest& manifest, FileDescriptor share, std::array<SafetensorsFile, 2> files)
      : step_(manifest.step), generation_(manifest.generation), share_(std::move(share)), files_(std::move(files)) {
    for (const ManifestTensor& tensor : manifest.tensors) updates_.push_back(tensor.updates);
  }

  int64_t step() const override { return step_; }
  int64_t generation() const override { return generation_; }
  const std::vector<UpdateHistory>& updates() const override { return updates_; }
  bool Has(const std::string& tensor_name) const override {
    return std::any_of(files_.begin(), files_.end(),
                       [&](const SafetensorsFile& file) { return file.tensors().contains(tensor_name); });
  }

  absl::Status Check(const std::string& tensor_name, DType dtype, int64_t byte_count) const override {
    return Find(tensor_name, dtype, byte_count).status();
  }

  absl::Status Read(const std::string& tensor_name, DType dtype, absl::Span<char> out) const override {
    SHARDMLP_ASSIGN_OR_RETURN(const Place place, Find(tensor_name, dtype, static_cast<int64_t>(out.size())));
    return place.file->Read(*place.entry, 0, out);
  }

 private:
  struct Place {
    const SafetensorsFile* file;
    const SafetensorsEntry* entry;
  };
  absl::StatusOr<Place> Find(const std::string& tensor_name, DType dtype, int64_t byte_count) const {
    for (const SafetensorsFile& file : files_) {
      const auto found = file.tensors().find(tensor_name);
      if (found == file.tensors().end()) continue;
      const SafetensorsEntry& entry = found->second;
      if (entry.dtype == dtype && entry.byte_count == byte_count) return Place{&file, &entry};
      return Error(
          absl::StatusCode::kFailedPrecondition, Reason::kCheckpointMismatch,
          absl::StrCat(file.path(), ": tensor ", tensor_name, " is ", entry.dtype_name, " in ", entry.byte_count,
                       " bytes; ", SafetensorsName(dtype), " in ", byte_count, " was expected"));
    }
    return Error(absl::StatusCode::kFailedPrecondition, Reason::kCheckpointMismatch,
                 absl::StrCat(files_[0].path(), " and ", files_[1].path(), " lack tensor ", tensor_name));
  }

  int64_t step_;
  int64_t generation_;
  std::vector<UpdateHistory> updates_;
  FileDescriptor share_;
  std::array<SafetensorsFile, 2> files_;  // weights, optimizer
};

// The weights must be the model's, tensor by tensor.
absl::StatusOr<Manifest> ManifestOf(const CheckpointState& state, const ModelSpec& model) {
  if (state.updates.size() != state.weights.size()) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 absl::StrCat(state.updates.size(), " update histories for ", state.weights.size(), " weights"));
  }
  const auto negative = [](const UpdateHistory& updates) { return updates.count < 0; };
  if (state.step < 0 || state.generation < 0 || std::any_of(state.updates.begin(), state.updates.end(), negative)) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 "a step, generation or update count is below 0");
  }
  Manifest manifest{.saved_unix_nanos = absl::GetCurrentTimeNanos(),
                    .step = state.step,
                    .generation = state.generation,
                    .model_type = model.model_type,
                    .dtype = std::string(Name(model.dtype)),
                    .files = {},
                    .tensors = {}};
  for (size_t i = 0; i < state.weights.size(); ++i) {
    const CheckpointTensor& tensor = state.weights[i];
    manifest.tensors.push_back({.name = tensor.name,
                                .dtype = std::string(Name(tensor.dtype)),
                                .shape = tensor.shape,
                                .updates = state.updates[i]});
  }
  SHARDMLP_RETURN_IF_ERROR(CheckModel(manifest, model, "checkpoint to be saved"));
  return manifest;
}

// Writes the three files into `folder`, synced.
absl::Status WriteFiles(const std::string& folder, const CheckpointState& state, Manifest& manifest) {
  for (const auto& [name, tensors] : {std::pair(kWeightsName, &state.weights), {kOptimizerName, &state.optimizer}}) {
    SHARDMLP_ASSIGN_OR_RETURN(manifest.files[name], WriteSafetensors(absl::StrCat(folder, "/", name), *tensors));
  }
  SHARDMLP_ASSIGN_OR_RETURN(File file, File::Create(absl::StrCat(folder, "/", kManifestName)));
  SHARDMLP_RETURN_IF_ERROR(file.Append(ManifestText(manifest)));
  return file.Sync();
}

// A folder that is a checkpoint, or was one.
struct Found {
  CheckpointInfo info;
  int64_t saved_unix_nanos = std::numeric_limits<int64_t>::max();  // where that can't be read any more
  absl::Status damage;
};

// A folder with none of a checkpoint's files is none.
bool WasCheckpoint(const std::string& folder) {
  return absl::c_any_of(std::array{kWeightsName, kOptimizerName, kManifestName},
                        [&](const char* name) { return Exists(absl::StrCat(folder, "/", name)); });
}

Found Examine(const std::string& path, const std::string& name) {
  Found found{.info = {.name = name, .step = 0, .byte_count = 0}, .damage = absl::OkStatus()};
  const std::string folder = absl::StrCat(path, "/", name);
  const absl::StatusOr<Manifest> manifest = ReadManifest(folder);
  found.damage = manifest.status();
  if (!manifest.ok()) return found;
  found.info.step = manifest->step;
  found.info.byte_count = ByteCount(*manifest);
  found.saved_unix_nanos = manifest->saved_unix_nanos;
  for (const auto& [file, sum] : manifest->files) {
    std::error_code error;
    const uintmax_t size = fs::file_size(absl::StrCat(folder, "/", file), error);
    if (!error && size == static_cast<uintmax_t>(sum.size)) continue;
    const std::string got = error ? " is missing" : absl::StrCat(" has ", size, " bytes; ", sum.size, " were written");
    found.damage = Corrupt(absl::StrCat(folder, "/", file, got));
  }
  return found;
}

// Oldest first; those of unknown time last.
absl::StatusOr<std::vector<Found>> FindAll(const std::string& path) {
  std::vector<Found> found;
  std::error_code error;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (CheckCheckpointName(name).ok() && WasCheckpoint(entry->path())) found.push_back(Examine(path, name));
  }
  if (error) return SystemError(error.value(), "list", path);
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
    return std::tie(a.saved_unix_nanos, a.info.name) < std::tie(b.saved_unix_nanos, b.info.name);
  });
  return found;
}

// Of all tensors.
absl::StatusOr<int64_t> ByteCountOf(const CheckpointState& state) {
  int64_t total = 0;
  for (const auto* tensors : {&state.weights, &state.optimizer}) {
    for (const CheckpointTensor& tensor : *tensors) {
      SHARDMLP_ASSIGN_OR_RETURN(const int64_t byte_count, ByteCountOf(tensor));
      total += byte_count;
    }
  }
  return total;
}

}  // namespace

absl::Status CheckCanSave(const std::string& path, const std::string& name) {
  SHARDMLP_RETURN_IF_ERROR(CheckCheckpointName(name));
  if (const std::string target = absl::StrCat(path, "/", name); IsForeign(target)) {
    return NoCheckpoint(target, "replaced");
  }
  return CheckWritable(path);
}

absl::StatusOr<std::unique_ptr<CheckpointStore>> CheckpointStore::Open(const std::string& path,
                                                                       const ModelSpec& model) {
  SHARDMLP_RETURN_IF_ERROR(MakeFolder(path));
  const absl::StatusOr<FileDescriptor> lock = LockFolder(path);
  if (lock.ok()) {
    SHARDMLP_RETURN_IF_ERROR(Recover(path));
  } else if (!absl::IsUnavailable(lock.status())) {
    return lock.status();
  }
  return absl::WrapUnique(new CheckpointStore(path, model));
}

absl::StatusOr<CheckpointInfo> CheckpointStore::Save(const std::string& name, const CheckpointState& state) {
  SHARDMLP_RETURN_IF_ERROR(CheckCheckpointName(name));
  SHARDMLP_ASSIGN_OR_RETURN(Manifest manifest, ManifestOf(state, model_));
  SHARDMLP_ASSIGN_OR_RETURN(const FileDescriptor lock, LockFolder(path_));
  SHARDMLP_RETURN_IF_ERROR(Recover(path_));
  if (const std::string target = absl::StrCat(path_, "/", name); IsForeign(target)) {
    return NoCheckpoint(target, "replaced");
  }
  SHARDMLP_ASSIGN_OR_RETURN(const int64_t byte_count, ByteCountOf(state));
  SHARDMLP_RETURN_IF_ERROR(CheckRoom(path_, byte_count));
  SHARDMLP_ASSIGN_OR_RETURN(const std::string saving, MakeSavingFolder(path_, name));
  absl::Status status = WriteFiles(saving, state, manifest);
  if (status.ok()) status = Publish(path_, name);
  // What was replaced, or did not become one. What can't be removed now is removed by the next save.
  Recover(path_).IgnoreError();
  if (!status.ok()) return status;
  return CheckpointInfo{.name = name, .step = manifest.step, .byte_count = ByteCount(manifest)};
}

absl::StatusOr<std::unique_ptr<Checkpoint>> CheckpointStore::Load(const std::string& name) const {
  SHARDMLP_RETURN_IF_ERROR(CheckCheckpointName(name));
  const std::string folder = absl::StrCat(path_, "/", name);
  if (!IsFolder(folder)) return Unknown(path_, name);
  SHARDMLP_ASSIGN_OR_RETURN(FileDescriptor share, ShareCheckpoint(folder));
  SHARDMLP_ASSIGN_OR_RETURN(const Manifest manifest, ReadManifest(folder));
  SHARDMLP_RETURN_IF_ERROR(CheckModel(manifest, model_, absl::StrCat(folder, "/", kManifestName)));
  SHARDMLP_ASSIGN_OR_RETURN(SafetensorsFile weights, OpenVerified(manifest, folder, kWeightsName));
  SHARDMLP_ASSIGN_OR_RETURN(SafetensorsFile optimizer, OpenVerified(manifest, folder, kOptimizerName));
  return std::make_unique<VerifiedCheckpoint>(manifest, std::move(share),
                                              std::array<SafetensorsFile, 2>{std::move(weights), std::move(optimizer)});
}

absl::StatusOr<CheckpointInfo> CheckpointStore::Delete(const std::string& name) {
  SHARDMLP_RETURN_IF_ERROR(CheckCheckpointName(name));
  SHARDMLP_ASSIGN_OR_RETURN(const FileDescriptor lock, LockFolder(path_));
  SHARDMLP_RETURN_IF_ERROR(Recover(path_));
  const std::string folder = absl::StrCat(path_, "/", name);
  if (!Exists(folder)) return Unknown(path_, name);
  if (!WasCheckpoint(folder)) return NoCheckpoint(folder, "deleted");
  SHARDMLP_ASSIGN_OR_RETURN(const FileDescriptor claim, ClaimCheckpoint(folder));
  const CheckpointInfo info = Examine(path_, name).info;
  SHARDMLP_RETURN_IF_ERROR(Unpublish(path_, name));
  // What can't be removed now is removed by the next save.
  Recover(path_).IgnoreError();
  return info;
}

absl::StatusOr<FileSum> CheckpointStore::Edition(const std::string& name) const {
  SHARDMLP_RETURN_IF_ERROR(CheckCheckpointName(name));
  // It has the time of saving, and the checksums of the rest.
  const std::string manifest = absl::StrCat(path_, "/", name, "/", kManifestName);
  SHARDMLP_ASSIGN_OR_RETURN(const File file, File::OpenForReading(manifest, Reason::kCheckpointCorrupt));
  return SumOf(file);
}

absl::StatusOr<std::vector<CheckpointInfo>> CheckpointStore::List() const {
  SHARDMLP_ASSIGN_OR_RETURN(const std::vector<Found> found, FindAll(path_));
  std::vector<CheckpointInfo> infos;
  for (const Found& checkpoint : found) {
    if (checkpoint.damage.ok()) infos.push_back(checkpoint.info);
  }
  return infos;
}

absl::StatusOr<std::string> CheckpointStore::Latest() const {
  SHARDMLP_ASSIGN_OR_RETURN(const std::vector<Found> found, FindAll(path_));
  const auto whole = std::find_if(found.rbegin(), found.rend(), [](const Found& one) { return one.damage.ok(); });
  const std::string name = whole == found.rend() ? "" : whole->info.name;
  if (whole == found.rbegin()) return name;
  const Found& damaged = found.back();
  return Corrupt(absl::StrCat(
      damaged.damage.message(), "; checkpoint ", damaged.info.name, " in ", path_,
      " is damaged and may be the latest: ",
      name.empty() ? "no other is whole" : absl::StrCat("ask for another by name (", name, " is the latest whole one)"),
      ", or take it out of the folder"));
}

}  // namespace shardmlp
