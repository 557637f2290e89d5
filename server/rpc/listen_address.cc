#include "server/rpc/listen_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace shardmlp {
namespace {

constexpr int kMaxPort = 65535;

}  // namespace

bool IsUnixSocket(absl::string_view address) {
  return absl::StartsWith(address, "unix:") || absl::StartsWith(address, "unix-abstract:");
}

bool IsLoopback(absl::string_view address) {
  const absl::string_view host = address.substr(0, address.rfind(':'));
  in_addr number = {};
  // A name that only starts like an address could resolve to anything.
  if (inet_pton(AF_INET, std::string(host).c_str(), &number) == 1) return ntohl(number.s_addr) >> 24 == IN_LOOPBACKNET;
  return host == "localhost" || host == "[::1]";
}

absl::Status CheckListenAddress(absl::string_view address, bool anywhere) {
  if (IsUnixSocket(address)) return absl::OkStatus();
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon == absl::string_view::npos || colon == 0 || !absl::SimpleAtoi(address.substr(colon + 1), &port) ||
      port < 0 || port > kMaxPort) {
    return absl::InvalidArgumentError(
        absl::StrCat("address is \"", address, "\", expected host:port, [ipv6]:port or unix:/path"));
  }
  if (anywhere || IsLoopback(address)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("address \"", address, "\" is not loopback: anyone who reaches it could read and change the ",
                   "weights. Give --tls-cert and --tls-key, with --tls-client-ca or --token-file; or say ",
                   "--insecure-listen-anywhere where the network keeps others out"));
}

absl::Status CheckNotTaken(absl::string_view address) {
  if (!absl::ConsumePrefix(&address, "unix:")) return absl::OkStatus();
  absl::ConsumePrefix(&address, "//");  // unix:///path
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  if (address.size() >= sizeof(name.sun_path)) return absl::OkStatus();  // too long for gRPC as well
  std::memcpy(name.sun_path, address.data(), address.size());
  const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int error = connect(probe, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) == 0 ? 0 : errno;
  close(probe);
  // No file, or nobody behind it.
  if (error == ENOENT || error == ECONNREFUSED) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("can't listen on unix:", address, ": ",
                   error == 0 || error == EAGAIN ? "another server listens there" : std::strerror(error)));
}

std::string WithBoundPort(absl::string_view address, int port) {
  if (IsUnixSocket(address)) return std::string(address);
  return absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
}

}  // namespace shardmlp
