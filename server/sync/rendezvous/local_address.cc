#include "server/sync/rendezvous/local_address.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr int kMaxPort = 65535;

// Host without brackets, and port; empty where `address` is of another form.
std::pair<std::string, std::string> Split(absl::string_view address) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos) return {};
  absl::string_view host = address.substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) {
    if (!absl::ConsumeSuffix(&host, "]")) return {};
  } else if (host.find(':') != absl::string_view::npos) {
    return {};
  }
  return {std::string(host), std::string(address.substr(colon + 1))};
}

absl::Status Unreachable(absl::string_view address, absl::string_view why) {
  return Error(absl::StatusCode::kUnavailable, Reason::kReplicaLost, absl::StrCat("can't reach ", address, ": ", why));
}

}  // namespace

absl::Status CheckHostAndPort(absl::string_view address) {
  const auto [host, port] = Split(address);
  int number = 0;
  if (!host.empty() && absl::SimpleAtoi(port, &number) && number > 0 && number <= kMaxPort) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
               absl::StrCat("address is \"", address, "\", expected host:port or [ipv6]:port"));
}

absl::StatusOr<std::string> LocalAddressTowards(absl::string_view host_and_port) {
  const auto [host, port] = Split(host_and_port);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0) {
    return Unreachable(host_and_port, gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, freeaddrinfo);
  int error = EADDRNOTAVAIL;
  for (const addrinfo* to = addresses.get(); to != nullptr; to = to->ai_next) {
    const int probe = socket(to->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_storage own = {};
    socklen_t size = sizeof(own);
    char number[NI_MAXHOST];
    // A datagram socket that is connected has sent nothing, but knows its own end.
    const bool known =
        probe >= 0 && connect(probe, to->ai_addr, to->ai_addrlen) == 0 &&
        getsockname(probe, reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
        getnameinfo(reinterpret_cast<sockaddr*>(&own), size, number, sizeof(number), nullptr, 0, NI_NUMERICHOST) == 0;
    if (!known) error = errno;
    if (probe >= 0) close(probe);
    if (known) return std::string(number);
  }
  return Unreachable(host_and_port, std::strerror(error));
}

}  // namespace shardmlp
