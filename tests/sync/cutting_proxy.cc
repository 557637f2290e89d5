#include "tests/sync/cutting_proxy.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace shardmlp::testing {
namespace {

sockaddr_in Loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

// Passes on what is there. False once either end is closed.
bool Pass(int from, int to) {
  char buffer[1 << 16];
  const ssize_t count = recv(from, buffer, sizeof(buffer), 0);
  for (ssize_t sent = 0; sent < count;) {
    const ssize_t now = send(to, buffer + sent, count - sent, MSG_NOSIGNAL);
    if (now <= 0) return false;
    sent += now;
  }
  return count > 0;
}

}  // namespace

CuttingProxy::CuttingProxy(const std::string& target) : target_(target) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  if (pipe(wake_) != 0 || bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener_, 16) != 0 || getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    std::abort();
  }
  address_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  thread_ = std::thread([this] { Run(); });
}

CuttingProxy::~CuttingProxy() {
  {
    absl::MutexLock lock(&mutex_);
    ends_ = true;
  }
  close(wake_[1]);
  thread_.join();
  absl::MutexLock lock(&mutex_);
  for (const Link& link : links_) {
    for (const int end : link.ends) close(end);
  }
  close(wake_[0]);
  close(listener_);
}

void CuttingProxy::Cut() {
  absl::MutexLock lock(&mutex_);
  cut_ = true;
  for (Link& link : links_) link.dead = true;
}

void CuttingProxy::Mend() {
  absl::MutexLock lock(&mutex_);
  cut_ = false;
}

void CuttingProxy::Accept() {
  int port = 0;
  sockaddr_in address = {};
  if (absl::SimpleAtoi(target_.substr(target_.rfind(':') + 1), &port)) address = Loopback(port);
  const int near = accept(listener_, nullptr, nullptr);
  const int far = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  absl::MutexLock lock(&mutex_);
  // Where the target does not listen, and where the link is cut, the caller waits.
  const bool dead = cut_ || connect(far, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0;
  links_.push_back({{near, far}, dead});
}

void CuttingProxy::Run() {
  while (true) {
    std::vector<pollfd> polled = {{listener_, POLLIN, 0}, {wake_[0], POLLIN, 0}};
    {
      absl::MutexLock lock(&mutex_);
      if (ends_) return;
      for (const Link& link : links_) {
        for (const int end : link.ends) polled.push_back({link.dead ? -1 : end, POLLIN, 0});
      }
    }
    if (poll(polled.data(), polled.size(), 1000) <= 0) continue;
    {
      absl::MutexLock lock(&mutex_);
      for (size_t i = 2; i < polled.size(); ++i) {
        Link& link = links_[(i - 2) / 2];
        if (polled[i].revents == 0 || link.dead) continue;
        if (Pass(link.ends[i % 2], link.ends[1 - i % 2])) continue;
        link.dead = true;
        for (const int end : link.ends) shutdown(end, SHUT_RDWR);
      }
    }
    if (polled[0].revents != 0) Accept();
  }
}

}  // namespace shardmlp::testing
