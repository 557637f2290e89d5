#include "server/metrics_endpoint.h"

#include <httplib.h>

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

namespace shardmlp {
namespace {

constexpr int kThreads = 8;
constexpr int kMaxConnections = 32;  // answered, or waiting for a thread
constexpr time_t kTimeoutSeconds = 5;

// The library's pool, which takes as many connections as there are.
class BoundedPool final : public httplib::TaskQueue {
 public:
  void enqueue(std::function<void()> serve) override {
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &BoundedPool::HasRoom));
      ++connections_;
    }
    pool_.enqueue([this, serve = std::move(serve)] {
      serve();
      absl::MutexLock lock(&mutex_);
      --connections_;
    });
  }
  void shutdown() override { pool_.shutdown(); }

 private:
  bool HasRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return connections_ < kMaxConnections; }

  absl::Mutex mutex_;
  int connections_ ABSL_GUARDED_BY(mutex_) = 0;
  httplib::ThreadPool pool_{kThreads};
};

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::Listen(const std::string& address,
                                                                         std::function<std::string()> text) {
  const absl::Status refused = absl::UnavailableError(absl::StrCat("can't serve metrics on ", address));
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon == std::string::npos || !absl::SimpleAtoi(address.substr(colon + 1), &port)) return refused;
  std::string host = address.substr(0, colon);
  if (absl::StartsWith(host, "[") && absl::EndsWith(host, "]")) host = host.substr(1, host.size() - 2);

  auto server = std::make_unique<httplib::Server>();
  server->new_task_queue = [] { return new BoundedPool; };
  server->set_keep_alive_max_count(1).set_keep_alive_timeout(kTimeoutSeconds);
  server->set_read_timeout(kTimeoutSeconds).set_write_timeout(kTimeoutSeconds);
  // The library would share the port with whoever listens there.
  server->set_socket_options([](socket_t socket) {
    const int yes = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  });
  server->Get("/metrics", [text = std::move(text)](const httplib::Request&, httplib::Response& response) {
    response.set_content(text(), "text/plain; version=0.0.4; charset=utf-8");
  });
  const bool bound = port > 0 ? server->bind_to_port(host, port) : (port = server->bind_to_any_port(host)) > 0;
  if (!bound) return refused;
  return std::unique_ptr<MetricsEndpoint>(new MetricsEndpoint(std::move(server), port));
}

MetricsEndpoint::MetricsEndpoint(std::unique_ptr<httplib::Server> server, int port)
    : server_(std::move(server)), port_(port), thread_([this] { server_->listen_after_bind(); }) {
  while (!server_->is_running()) std::this_thread::yield();  // it could not be stopped before
}

MetricsEndpoint::~MetricsEndpoint() {
  server_->stop();
  thread_.join();
}

}  // namespace shardmlp
