// A link between two ends of this machine that can be cut without either end being told.
#pragma once

#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace shardmlp::testing {

// Passes what comes to address() on to `target`, and back. Thread-safe.
class CuttingProxy {
 public:
  explicit CuttingProxy(const std::string& target);  // "127.0.0.1:port"
  ~CuttingProxy();

  std::string address() const { return address_; }  // "127.0.0.1:port"
  // From now on nothing passes, and no connection is closed for it.
  void Cut();
  // New connections pass again; those of before never do.
  void Mend();

 private:
  struct Link {
    int ends[2];
    bool dead;
  };
  void Run();
  void Accept();

  const std::string target_;
  std::string address_;
  int listener_ = -1;
  int wake_[2];  // a pipe
  absl::Mutex mutex_;
  bool cut_ ABSL_GUARDED_BY(mutex_) = false;
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Link> links_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace shardmlp::testing
