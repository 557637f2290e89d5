#include "server/model/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"

namespace shardmlp {

absl::Status SystemError(absl::string_view what, absl::string_view path) {
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot ", what, " ", path));
}

absl::StatusOr<File> File::OpenForReading(std::string path, Reason corrupt) {
  // O_NONBLOCK: a FIFO under this name must not hang the server.
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return SystemError("open", path);
  File file(std::move(path), descriptor, corrupt);
  struct stat info;
  if (fstat(descriptor, &info) != 0) return SystemError("examine", file.path_);
  if (!S_ISREG(info.st_mode)) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 absl::StrCat(file.path_, " is not a regular file"));
  }
  file.size_ = info.st_size;
  return file;
}

absl::StatusOr<File> File::Create(std::string path) {
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (descriptor < 0) return SystemError("create", path);
  return File(std::move(path), descriptor, Reason::kUnspecified);
}

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) close(fd_);
    path_ = std::move(other.path_);
    fd_ = std::exchange(other.fd_, -1);
    size_ = other.size_;
    corrupt_ = other.corrupt_;
  }
  return *this;
}

File::~File() {
  if (fd_ >= 0) close(fd_);
}

absl::Status File::ReadAt(int64_t offset, absl::Span<char> out) const {
  while (!out.empty()) {
    const ssize_t count = pread(fd_, out.data(), out.size(), offset);
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
    const ssize_t count = write(fd_, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return SystemError("write", absl::StrCat(path_, " at byte ", size_));
    size_ += count;
    bytes.remove_prefix(count);
  }
  return absl::OkStatus();
}

absl::Status File::Sync() const { return fsync(fd_) == 0 ? absl::OkStatus() : SystemError("sync", path_); }

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

absl::Status SyncFolder(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return SystemError("open", path);
  const absl::Status status = fsync(descriptor) == 0 ? absl::OkStatus() : SystemError("sync", path);
  close(descriptor);
  return status;
}

}  // namespace shardmlp
