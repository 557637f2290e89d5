// Replicas of one test that meet over gRPC and sum over Gloo, on loopback.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "gtest/gtest.h"
#include "server/sync/rendezvous/replicas_options.h"
#include "tests/sync/free_port.h"
#include "tests/sync/recorder.h"
#include "tests/sync/replica_options.h"

namespace shardmlp::testing {

// Lines of a log. Thread-safe.
class Lines {
 public:
  std::function<void(absl::string_view)> sink() {
    return [this](absl::string_view line) {
      absl::MutexLock lock(&mutex_);
      lines_.emplace_back(line);
    };
  }
  // Waits for a line that holds `text`. False after a minute without.
  bool Has(const std::string& text) const {
    absl::MutexLock lock(&mutex_);
    const auto has = [&] {
      mutex_.AssertReaderHeld();
      for (const std::string& line : lines_) {
        if (line.find(text) != std::string::npos) return true;
      }
      return false;
    };
    return mutex_.AwaitWithTimeout(absl::Condition(&has), absl::Minutes(1));
  }

 private:
  mutable absl::Mutex mutex_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(mutex_);
};

// One replica, and all that it hears.
struct ReplicaServer {
  explicit ReplicaServer(ReplicasOptions options) {
    options.log = log.sink();
    replicas = MakeReplicas(options).value();
  }
  void Join(const ReplicaState& state = {}) { replicas->Join(state, recorder); }

  Lines log;
  Recorder recorder;
  std::unique_ptr<Replicas> replicas;  // first to go
};

// `size` replicas, some of which may be elsewhere.
class ReplicaServers {
 public:
  explicit ReplicaServers(int size, OnLoss on_loss = OnLoss::kWait) : servers_(size), on_loss_(on_loss) {}

  ReplicasOptions Options(int rank) const {
    ReplicasOptions options = FastOptions(rank, static_cast<int>(servers_.size()), coordinator);
    options.on_loss = on_loss_;
    return options;
  }
  // What had the rank before is destroyed, without a goodbye.
  ReplicaServer& Start(int rank) {
    servers_[rank].reset();
    servers_[rank] = std::make_unique<ReplicaServer>(Options(rank));
    return *servers_[rank];
  }
  void Kill(int rank) { servers_[rank].reset(); }
  ReplicaServer& operator[](int rank) { return *servers_[rank]; }
  Recorder& recorder(int rank) { return servers_[rank]->recorder; }

  // Starts all of them, and waits until all are in generation 1.
  void StartAll() {
    for (size_t rank = 0; rank < servers_.size(); ++rank) Start(static_cast<int>(rank)).Join();
    for (const auto& server : servers_) ASSERT_TRUE(server->recorder.Hears("formed 1"));
  }

  const std::string coordinator = FreeAddress();

 private:
  std::vector<std::unique_ptr<ReplicaServer>> servers_;
  const OnLoss on_loss_;
};

}  // namespace shardmlp::testing
