// /metrics over HTTP, for Prometheus.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"

namespace httplib {
class Server;
}

namespace shardmlp {

// Several scrapes may be under way; a connection that sends no whole request is closed after 5 s, and none is kept
// after its answer. Connections beyond a few wait to be accepted.
class MetricsEndpoint {
 public:
  // Listens on `address` ("127.0.0.1:9464", "[::1]:0"; port 0 takes a free one) and answers with `text` until
  // destroyed, which waits for the connections that are open. UNAVAILABLE where it can't listen. `text` is called from
  // several threads.
  static absl::StatusOr<std::unique_ptr<MetricsEndpoint>> Listen(const std::string& address,
                                                                 std::function<std::string()> text);
  ~MetricsEndpoint();
  MetricsEndpoint(const MetricsEndpoint&) = delete;
  MetricsEndpoint& operator=(const MetricsEndpoint&) = delete;

  int port() const { return port_; }

 private:
  MetricsEndpoint(std::unique_ptr<httplib::Server> server, int port);

  const std::unique_ptr<httplib::Server> server_;
  const int port_;
  std::thread thread_;
};

}  // namespace shardmlp
