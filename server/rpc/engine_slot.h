// Where the services find the engine: empty while the model loads, so that the port answers health from the start.
#pragma once

#include <atomic>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/status.h"
#include "server/engine/engine.h"

namespace shardmlp {

// Thread-safe. Does not own the engine, which must stay until the services are shut down.
class EngineSlot {
 public:
  void Set(Engine& engine) { engine_.store(&engine, std::memory_order_release); }

  // UNAVAILABLE (LOADING) until set.
  absl::StatusOr<Engine*> Get() const {
    Engine* engine = engine_.load(std::memory_order_acquire);
    if (engine != nullptr) return engine;
    return Error(absl::StatusCode::kUnavailable, Reason::kLoading, "the server is still loading its model");
  }

 private:
  std::atomic<Engine*> engine_ = nullptr;
};

}  // namespace shardmlp
