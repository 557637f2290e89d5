// Who may call: the bearer tokens of a file.
#pragma once

#include <grpcpp/support/string_ref.h>

#include <array>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace shardmlp {

// A token a line, in printable ASCII without spaces; lines that are blank or begin with '#' are none. Several let a new
// one in before the old one goes. What is kept in
// memory are their SHA-256 digests, and the time that a comparison takes tells nothing of a token. Thread-safe.
class Tokens {
 public:
  // Empty until read.
  explicit Tokens(std::string path) : path_(std::move(path)) {}

  // Takes what the file has now. INVALID_ARGUMENT, naming file and line, where it can't be read, or has a token that is
  // none or shorter than kMinTokenBytes: then those that were read before stay. INVALID_ARGUMENT too where it is there
  // and has no token: then none is left, since that is how to take back the last.
  absl::Status Read();

  // OK where the metadata of an rpc has "authorization: Bearer TOKEN", once, of one of the tokens; else UNAUTHENTICATED
  // (UNAUTHENTICATED), which says what is wrong and nothing of any token.
  absl::Status Check(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata) const;

 private:
  using Digest = std::array<unsigned char, 32>;
  static Digest DigestOf(absl::string_view token);

  const std::string path_;
  mutable absl::Mutex mutex_;
  std::vector<Digest> digests_ ABSL_GUARDED_BY(mutex_);
};

// Guessing one of 16 random characters is out of the question.
inline constexpr size_t kMinTokenBytes = 16;

}  // namespace shardmlp
