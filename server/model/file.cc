#include "server/model/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"

namespace shardmlp {

absl::Status SystemError(int error, absl::string_view what, absl::string_view path) {
  const absl::Status described = absl::ErrnoToStatus(error, absl::StrCat("cannot ", what, " ", path));
  if (error == ENOSPC || error == EDQUOT) {
    return Error(absl::StatusCode::kResourceExhausted, Reason::kStorageFull,
                 absl::StrCat(described.message(), "; make room there, then try again"));
  }
  return Error(error == ENOENT ? absl::StatusCode::kNotFound : absl::StatusCode::kInternal, Reason::kStorageFailed,
               described.message());
}

absl::Status SystemError(absl::string_view what, absl::string_view path) { return SystemError(errno, what, path); }

FileDescriptor::~FileDescriptor() {
  if (number_ >= 0) close(number_);
}

absl::StatusOr<File> File::OpenForReading(std::string path, Reason corrupt) {
  // O_NONBLOCK: a FIFO under this name must not hang the server.
  FileDescriptor descriptor(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (descriptor.number() < 0) return SystemError("open", path);
  struct stat info;
  if (fstat(descriptor.number(), &info) != 0) return SystemError("examine", path);
  if (!S_ISREG(info.st_mode)) {
    return Error(absl::StatusCode::kDataLoss, corrupt, absl::StrCat(path, " is not a regular file"));
  }
  File file(std::move(path), std::move(descriptor), corrupt);
  file.size_ = info.st_size;
  return file;
}

absl::StatusOr<File> File::Create(std::string path) {
  FileDescriptor descriptor(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (descriptor.number() < 0) return SystemError("create", path);
  return File(std::move(path), std::move(descriptor), Reason::kUnspecified);
}

absl::Status File::ReadAt(int64_t offset, absl::Span<char> out) const {
  while (!out.empty()) {
    const ssize_t count = pread(descriptor_.number(), out.data(), out.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return SystemError("read", absl::StrCat(path_, " at byte ", offset));
    if (count == 0) {
      return Error(absl::StatusCode::kDataLoss, corrupt_,
                   absl::StrCat(path_, " ends at byte ", offset, "; ", out.size(), " more bytes were expected"));
    }
    offset += count;
    out.remove_prefix(count);
  }
  return absl::OkStatus();
}

absl::Status File::Append(absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = write(descriptor_.number(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return SystemError("write", absl::StrCat(path_, " at byte ", size_));
    size_ += count;
    bytes.remove_prefix(count);
  }
  return absl::OkStatus();
}

absl::Status File::Sync() const {
  return fsync(descriptor_.number()) == 0 ? absl::OkStatus() : SystemError("sync", path_);
}

absl::StatusOr<std::string> ReadTextFile(const std::string& path, int64_t max_bytes, Reason corrupt) {
  SHARDMLP_ASSIGN_OR_RETURN(const File file, File::OpenForReading(path, corrupt));
  if (file.size() > max_bytes) {
    return Error(absl::StatusCode::kDataLoss, corrupt,
                 absl::StrCat(path, " has ", file.size(), " bytes; at most ", max_bytes, " were expected"));
  }
  std::string text(file.size(), '\0');
  SHARDMLP_RETURN_IF_ERROR(file.ReadAt(0, absl::MakeSpan(text)));
  return text;
}

absl::StatusOr<FileDescriptor> OpenFolder(const std::string& path) {
  FileDescriptor descriptor(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (descriptor.number() < 0) return SystemError("open", path);
  return descriptor;
}

absl::Status SyncFolder(const std::string& path) {
  SHARDMLP_ASSIGN_OR_RETURN(const FileDescriptor folder, OpenFolder(path));
  return fsync(folder.number()) == 0 ? absl::OkStatus() : SystemError("sync", path);
}

}  // namespace shardmlp
