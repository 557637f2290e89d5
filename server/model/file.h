// Files as the model room reads and writes them: positioned reads, appends, and syncing to disk.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/status.h"

namespace shardmlp {

// Move-only owner of a file descriptor; the destructor closes it.
class FileDescriptor {
 public:
  explicit FileDescriptor(int number) : number_(number) {}
  FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~FileDescriptor();

  // Negative where there is none.
  int number() const { return number_; }

 private:
  int number_ = -1;
};

// Move-only owner of an open file. Reads are thread-safe, writes are not. Every error names the path and, where there
// is one, the offset.
class File {
 public:
  // NOT_FOUND where there is no such file. `corrupt` is the reason that one which is not regular, and later a read past
  // its end, is reported under (DATA_LOSS).
  static absl::StatusOr<File> OpenForReading(std::string path, Reason corrupt);
  // Fails where the file exists.
  static absl::StatusOr<File> Create(std::string path);

  const std::string& path() const { return path_; }
  // Bytes, as it was when opened for reading, and those written since.
  int64_t size() const { return size_; }
  // Fills `out` from `offset` on.
  absl::Status ReadAt(int64_t offset, absl::Span<char> out) const;
  absl::Status Append(absl::string_view bytes);
  // Returns once everything written is on disk.
  absl::Status Sync() const;

 private:
  File(std::string path, FileDescriptor descriptor, Reason corrupt)
      : path_(std::move(path)), descriptor_(std::move(descriptor)), corrupt_(corrupt) {}

  std::string path_;
  FileDescriptor descriptor_;
  int64_t size_ = 0;
  Reason corrupt_ = Reason::kUnspecified;
};

// The whole of a file of at most `max_bytes`; a longer one is DATA_LOSS (`corrupt`).
absl::StatusOr<std::string> ReadTextFile(const std::string& path, int64_t max_bytes, Reason corrupt);

// The folder itself, opened.
absl::StatusOr<FileDescriptor> OpenFolder(const std::string& path);

// Makes creations, removals and renames in a folder durable.
absl::Status SyncFolder(const std::string& path);

// The status of a system call that has failed with `error`, an errno: "cannot <what> <path>: <error>". NOT_FOUND
// (STORAGE_FAILED) where there is no such file; RESOURCE_EXHAUSTED (STORAGE_FULL) where there is no room; INTERNAL
// (STORAGE_FAILED) for anything else.
absl::Status SystemError(int error, absl::string_view what, absl::string_view path);
// Of the call that has just failed.
absl::Status SystemError(absl::string_view what, absl::string_view path);

}  // namespace shardmlp
