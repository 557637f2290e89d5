// XXH3-64 checksums of what is written and read.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/model/file.h"

struct XXH3_state_s;

namespace shardmlp {

// Size and checksum of a file's bytes.
struct FileSum {
  int64_t size = 0;
  uint64_t xxh3_64 = 0;

  bool operator==(const FileSum&) const = default;
};

// Sums bytes as they come. Thread-compatible.
class Checksum {
 public:
  Checksum();
  void Add(absl::string_view bytes);
  FileSum sum() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
  int64_t size_ = 0;
};

// Of the whole file, read in small pieces.
absl::StatusOr<FileSum> SumOf(const File& file);

// 16 hexadecimal digits.
std::string ToHex(uint64_t xxh3_64);

}  // namespace shardmlp
