#include "server/model/checkpoint_folder.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/status.h"
#include "server/model/json.h"

namespace shardmlp {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kSavingPrefix = ".saving-";
constexpr absl::string_view kReplacedPrefix = ".replaced-";
constexpr size_t kMaxNameSize = 128;

std::string SavingPath(absl::string_view path, absl::string_view name) {
  return absl::StrCat(path, "/", kSavingPrefix, name);
}

std::string ReplacedPath(absl::string_view path, absl::string_view name) {
  return absl::StrCat(path, "/", kReplacedPrefix, name);
}

bool Exists(const std::string& path) {
  std::error_code error;
  return fs::exists(fs::symlink_status(path, error));
}

absl::Status Rename(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  return SystemError("rename", absl::StrCat(from, " to ", to));
}

absl::Status Remove(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (!error) return absl::OkStatus();
  return SystemError(error.value(), "remove", path);
}

// `kind`: LOCK_EX or LOCK_SH. `what`: another process is doing to the folder where it can't be locked.
absl::StatusOr<FileDescriptor> Lock(const std::string& folder, int kind, absl::string_view what) {
  SHARDMLP_ASSIGN_OR_RETURN(FileDescriptor descriptor, OpenFolder(folder));
  if (flock(descriptor.number(), kind | LOCK_NB) == 0) return descriptor;
  if (errno != EWOULDBLOCK) return SystemError("lock", folder);
  return Error(absl::StatusCode::kUnavailable, Reason::kOverloaded,
               absl::StrCat("another process is ", what, " ", folder));
}

// Lets the two names change places at once. False where the file system can't.
absl::StatusOr<bool> Exchange(const std::string& a, const std::string& b) {
  if (renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return true;
  if (errno == EINVAL || errno == ENOSYS) return false;
  return SystemError("exchange", absl::StrCat(a, " and ", b));
}

absl::Status Replace(const std::string& path, const std::string& name) {
  const std::string saving = SavingPath(path, name);
  const std::string target = absl::StrCat(path, "/", name);
  SHARDMLP_ASSIGN_OR_RETURN(const bool exchanged, Exchange(saving, target));
  if (!exchanged) {
    SHARDMLP_RETURN_IF_ERROR(Rename(target, ReplacedPath(path, name)));
    SHARDMLP_RETURN_IF_ERROR(Rename(saving, target));
  }
  return SyncFolder(path);
}

}  // namespace

absl::Status CheckCheckpointName(absl::string_view name) {
  const auto allowed = [](char c) { return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-'; };
  if (!name.empty() && name.size() <= kMaxNameSize && name[0] != '.' &&
      std::all_of(name.begin(), name.end(), allowed)) {
    return absl::OkStatus();
  }
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
               absl::StrCat("checkpoint name ", Describe(std::string(name)), "; 1 to ", kMaxNameSize,
                            " letters, digits, '.', '_' and '-' were expected, no '.' first"));
}

absl::Status MakeFolder(const std::string& path) {
  std::error_code error;
  if (path.empty() || fs::is_directory(path, error)) return absl::OkStatus();
  const std::string parent = fs::path(path).parent_path();
  SHARDMLP_RETURN_IF_ERROR(MakeFolder(parent));
  if (mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) return SystemError("make folder", path);
  return SyncFolder(parent.empty() ? "." : parent);
}

absl::Status CheckWritable(const std::string& path) {
  fs::path folder = path;
  std::error_code error;
  while (!folder.empty() && !fs::exists(folder, error)) folder = folder.parent_path();
  // What Recover removes, should this process die here.
  std::string probe = absl::StrCat(folder.empty() ? "." : folder.string(), "/", kSavingPrefix, "XXXXXX");
  const int descriptor = mkostemp(probe.data(), O_CLOEXEC);
  if (descriptor < 0) return SystemError("write to folder", path);
  close(descriptor);
  unlink(probe.c_str());
  return absl::OkStatus();
}

absl::Status CheckRoom(const std::string& path, int64_t bytes) {
  std::error_code error;
  const fs::space_info space = fs::space(path, error);
  if (error) return SystemError(error.value(), "examine", path);
  const uintmax_t free = geteuid() == 0 ? space.free : space.available;
  // Some network file systems do not say how large they are.
  if (space.capacity == 0 || free >= static_cast<uintmax_t>(bytes)) return absl::OkStatus();
  return Error(absl::StatusCode::kResourceExhausted, Reason::kStorageFull,
               absl::StrCat("a checkpoint takes ", bytes, " bytes, and the file system of ", path, " has ", free,
                            " free; make room there, then try again"));
}

absl::StatusOr<FileDescriptor> LockFolder(const std::string& path) {
  return Lock(path, LOCK_EX, "saving a checkpoint in");
}

absl::StatusOr<FileDescriptor> ShareCheckpoint(const std::string& folder) { return Lock(folder, LOCK_SH, "deleting"); }

absl::StatusOr<FileDescriptor> ClaimCheckpoint(const std::string& folder) { return Lock(folder, LOCK_EX, "restoring"); }

absl::StatusOr<std::string> MakeSavingFolder(const std::string& path, const std::string& name) {
  const std::string saving = SavingPath(path, name);
  if (mkdir(saving.c_str(), 0755) != 0) return SystemError("make folder", saving);
  return saving;
}

absl::Status Publish(const std::string& path, const std::string& name) {
  const std::string saving = SavingPath(path, name);
  SHARDMLP_RETURN_IF_ERROR(SyncFolder(saving));
  const std::string target = absl::StrCat(path, "/", name);
  if (Exists(target)) return Replace(path, name);
  SHARDMLP_RETURN_IF_ERROR(Rename(saving, target));
  return SyncFolder(path);
}

absl::Status Unpublish(const std::string& path, const std::string& name) {
  SHARDMLP_RETURN_IF_ERROR(Rename(absl::StrCat(path, "/", name), SavingPath(path, name)));
  return SyncFolder(path);
}

absl::Status Recover(const std::string& path) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error)) {
    names.push_back(entry->path().filename());
  }
  if (error) return SystemError(error.value(), "list", path);
  for (absl::string_view name : names) {
    const std::string remains = absl::StrCat(path, "/", name);
    if (absl::ConsumePrefix(&name, kReplacedPrefix)) {
      const std::string target = absl::StrCat(path, "/", name);
      SHARDMLP_RETURN_IF_ERROR(Exists(target) ? Remove(remains) : Rename(remains, target));
    } else if (absl::ConsumePrefix(&name, kSavingPrefix)) {
      SHARDMLP_RETURN_IF_ERROR(Remove(remains));
    } else {
      continue;
    }
    SHARDMLP_RETURN_IF_ERROR(SyncFolder(path));
  }
  return absl::OkStatus();
}

}  // namespace shardmlp
