// shardmlp-server: flags -> ServerOptions -> Server. The only file that may exit.
#include <semaphore.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "server/grpc_log.h"
#include "server/log.h"
#include "server/options.h"
#include "server/options_check.h"
#include "server/server.h"

namespace shardmlp {
namespace {

constexpr int kFailed = 1;
constexpr int kBadFlags = 2;

// Threads of an OpenMP team that spin while they wait would take the service's cores. libgomp reads this before main.
void SetOpenMpWaitPolicy(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  setenv("OMP_WAIT_POLICY", "passive", /*overwrite=*/1);
  execv("/proc/self/exe", argv);  // returns only where it fails, and then we go on as we are
}

void Say(absl::string_view what) { std::cerr << "shardmlp-server: " << what << std::endl; }

// The last line of a log that is started: of JSON too it is one, for who reads nothing else.
int Fail(const absl::Status& status, const LogOptions& log) {
  if (log.format == LogFormat::kJson) LogError("server ended", {{"why", std::string(status.message())}});
  StopLog();
  if (log.format == LogFormat::kText) Say(status.message());
  return kFailed;
}

// Posted by each SIGTERM and SIGINT. A handler, since threads that libraries start at load would not block a signal.
sem_t signalled;

// Acts on signals on a thread of its own: the first notifies `stop`, or ends a process that does not serve yet; the
// second ends it at once.
class Signals {
 public:
  Signals() {
    sem_init(&signalled, /*pshared=*/0, 0);
    struct sigaction action = {};
    action.sa_handler = [](int) { sem_post(&signalled); };
    action.sa_flags = SA_RESTART;
    sigaction(SIGTERM, &action, nullptr);
    sigaction(SIGINT, &action, nullptr);
    std::thread([this] { Act(); }).detach();
  }

  void SetServing() { serving_ = true; }
  const absl::Notification& stop() const { return stop_; }

 private:
  void Act() {
    Await();
    if (!serving_) _exit(EXIT_SUCCESS);
    stop_.Notify();
    Await();
    _exit(kFailed);
  }
  static void Await() {
    while (sem_wait(&signalled) != 0) continue;
  }

  std::atomic<bool> serving_ = false;
  absl::Notification stop_;
};

// What --check-config asks for.
int CheckConfig(const ServerOptions& options) {
  for (const std::string& warning : Warnings(options)) std::cout << "warning: " << warning << "\n";
  std::vector<std::string> wrong = Contradictions(options);
  for (std::string& finding : CheckFiles(options)) wrong.push_back(std::move(finding));
  for (const std::string& finding : wrong) Say(finding);
  if (wrong.empty()) std::cout << "the configuration is in order" << std::endl;
  return wrong.empty() ? EXIT_SUCCESS : kBadFlags;
}

int Main(int argc, char** argv) {
  const std::vector<const char*> arguments(argv + 1, argv + argc);
  for (const absl::string_view argument : arguments) {
    if (argument == "--help") {
      std::cout << Usage();
      return EXIT_SUCCESS;
    }
  }
  const auto options = ParseOptions(arguments);
  if (!options.ok()) {
    Say(options.status().message());
    return kBadFlags;
  }
  if (options->check_config) return CheckConfig(*options);
  SetOpenMpWaitPolicy(argv);
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);  // Debian's build checks at every lock
  StartLog(options->log);
  LogGrpc();

  static Signals signals;  // its thread stays to the end
  const auto server = Server::Start(*options, std::cout);
  if (!server.ok()) return Fail(server.status(), options->log);
  signals.SetServing();
  const absl::Status status = (*server)->Run(signals.stop());
  if (!status.ok()) return Fail(status, options->log);
  StopLog();
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace shardmlp

int main(int argc, char** argv) { return shardmlp::Main(argc, argv); }
