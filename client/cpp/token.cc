#include "client/cpp/token.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr absl::string_view kByteOrderMark = "\xef\xbb\xbf";  // which some editors write

absl::Status NoToken(absl::string_view message) {
  return Error(absl::StatusCode::kUnauthenticated, Reason::kUnauthenticated, message);
}

}  // namespace

absl::Status AddToken(const std::string& file, grpc::ClientContext& context) {
  if (file.empty()) return absl::OkStatus();
  std::ifstream stream(file);
  if (!stream) return NoToken(absl::StrCat("can't read the token in ", file, ": ", std::strerror(errno)));
  std::string line;
  absl::string_view token;
  // As the server reads its own, which may be the same file.
  for (int number = 1; token.empty() && std::getline(stream, line); ++number) {
    token = line;
    if (number == 1) absl::ConsumePrefix(&token, kByteOrderMark);
    token = absl::StripAsciiWhitespace(token);
    if (absl::StartsWith(token, "#")) token = {};
  }
  // What is no header of HTTP would end the process in gRPC.
  if (token.empty() || !std::all_of(token.begin(), token.end(), absl::ascii_isgraph)) {
    return NoToken(absl::StrCat("the first line of ", file, " is no token, expected ASCII without spaces"));
  }
  context.AddMetadata("authorization", absl::StrCat("Bearer ", token));
  return absl::OkStatus();
}

}  // namespace shardmlp
