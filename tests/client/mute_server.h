// A server that grants every window there is and then neither reads nor says anything: a process that was stopped.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

namespace shardmlp::fake {

class MuteServer {
 public:
  // On a Unix socket at `path`, or where that is empty on a TCP port.
  explicit MuteServer(const std::string& path) {
    if (path.empty()) {
      listener_ = socket(AF_INET, SOCK_STREAM, 0);
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      socklen_t size = sizeof(address);
      bind(listener_, reinterpret_cast<sockaddr*>(&address), size);
      getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
      target_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
    } else {
      unlink(path.c_str());
      listener_ = socket(AF_UNIX, SOCK_STREAM, 0);
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
      bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address));
      target_ = absl::StrCat("unix:", path);
    }
    listen(listener_, 1);
    thread_ = std::thread([this] { Serve(); });
  }

  ~MuteServer() {
    if (thread_.joinable()) Drain();
    close(listener_);
  }

  const std::string& target() const { return target_; }

  // Reads all that the client sent, to the end of the connection.
  std::string Drain() {
    drain_.Notify();
    thread_.join();
    return received_;
  }

 private:
  void Serve() {
    const int connection = accept(listener_, nullptr, nullptr);
    // HTTP/2: SETTINGS {INITIAL_WINDOW_SIZE 2^31 - 1, MAX_FRAME_SIZE 65535}, then WINDOW_UPDATE of the connection.
    constexpr std::array<uint8_t, 34> kWindows = {0, 0, 12,   4,    0, 0, 0, 0, 0, 0, 4, 0x7f, 0xff, 0xff, 0xff, 0, 5,
                                                  0, 0, 0xff, 0xff, 0, 0, 4, 8, 0, 0, 0, 0,    0,    0x7f, 0xfe, 0, 0};
    static_cast<void>(!write(connection, kWindows.data(), kWindows.size()));
    drain_.WaitForNotification();
    std::array<char, 65536> buffer;
    for (ssize_t count; (count = read(connection, buffer.data(), buffer.size())) > 0;) {
      received_.append(buffer.data(), count);
    }
    close(connection);
  }

  int listener_ = -1;
  std::string target_;
  absl::Notification drain_;
  std::string received_;
  std::thread thread_;
};

}  // namespace shardmlp::fake
