#include "server/rpc/tokens.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr absl::string_view kScheme = "bearer ";
constexpr absl::string_view kByteOrderMark = "\xef\xbb\xbf";  // which some editors write

absl::Status Invalid(absl::string_view message) {
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, message);
}

absl::Status Unauthenticated(absl::string_view message) {
  return Error(absl::StatusCode::kUnauthenticated, Reason::kUnauthenticated, message);
}

}  // namespace

absl::Status Tokens::Read() {
  std::ifstream file(path_);
  if (!file) return Invalid(absl::StrCat("can't read the tokens in ", path_, ": ", std::strerror(errno)));
  std::vector<Digest> digests;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    absl::string_view token = line;
    if (number == 1) absl::ConsumePrefix(&token, kByteOrderMark);
    token = absl::StripAsciiWhitespace(token);
    if (token.empty() || token[0] == '#') continue;
    if (token.size() < kMinTokenBytes || !std::all_of(token.begin(), token.end(), absl::ascii_isgraph)) {
      return Invalid(absl::StrCat(path_, ", line ", number, ": got ", token.size(), " characters, expected a token of ",
                                  kMinTokenBytes, " or more, without spaces, in ASCII"));
    }
    digests.push_back(DigestOf(token));
  }
  if (file.bad()) return Invalid(absl::StrCat("can't read the tokens in ", path_, ": ", std::strerror(errno)));
  const bool none = digests.empty();
  absl::MutexLock lock(&mutex_);
  digests_ = std::move(digests);
  if (none) return Invalid(absl::StrCat(path_, " has no token, expected one a line: nobody may call"));
  return absl::OkStatus();
}

absl::Status Tokens::Check(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata) const {
  const auto [begin, end] = metadata.equal_range("authorization");
  if (begin == end) return Unauthenticated("the call has no token, expected metadata \"authorization: Bearer TOKEN\"");
  const absl::string_view value(begin->second.data(), begin->second.size());
  if (std::next(begin) != end || !absl::StartsWithIgnoreCase(value, kScheme)) {
    return Unauthenticated("the call's authorization is no token, expected \"Bearer TOKEN\", once");
  }
  const Digest got = DigestOf(value.substr(kScheme.size()));
  int known = 0;
  {
    absl::MutexLock lock(&mutex_);
    // All of them are looked at, and each to its end.
    for (const Digest& digest : digests_) known |= CRYPTO_memcmp(digest.data(), got.data(), got.size()) == 0;
  }
  if (known != 0) return absl::OkStatus();
  return Unauthenticated("the call's token is none of the server's");
}

Tokens::Digest Tokens::DigestOf(absl::string_view token) {
  Digest digest;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), digest.data());
  return digest;
}

}  // namespace shardmlp
