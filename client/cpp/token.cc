#include "client/cpp/token.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

absl::Status NoToken(absl::string_view message) {
  return Error(absl::StatusCode::kUnauthenticated, Reason::kUnauthenticated, message);
}

}  // namespace

absl::Status AddToken(const std::string& file, grpc::ClientContext& context) {
  if (file.empty()) return absl::OkStatus();
  std::ifstream stream(file);
  if (!stream) return NoToken(absl::StrCat("can't read the token in ", file, ": ", std::strerror(errno)));
  std::string line;
  std::getline(stream, line);
  const absl::string_view token = absl::StripAsciiWhitespace(line);
  // What is no header of HTTP would end the process in gRPC.
  if (token.empty() || !std::all_of(token.begin(), token.end(), absl::ascii_isgraph)) {
    return NoToken(absl::StrCat("the first line of ", file, " is no token, expected ASCII without spaces"));
  }
  context.AddMetadata("authorization", absl::StrCat("Bearer ", token));
  return absl::OkStatus();
}

}  // namespace shardmlp
