// Where the services find the engine: empty while the model loads, so that the port answers health from the start, and
// closed to calls that may not come in. There is no other way to it.
#pragma once

#include <grpcpp/server_context.h>

#include <atomic>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/status.h"
#include "server/engine/engine.h"
#include "server/rpc/tokens.h"

namespace shardmlp {

// Thread-safe. Owns neither: the engine must stay until the services are shut down.
class EngineSlot {
 public:
  // `tokens`: one of which each call needs; null: none.
  explicit EngineSlot(const Tokens* tokens) : tokens_(tokens) {}

  // Whether who comes in has shown a token.
  bool has_tokens() const { return tokens_ != nullptr; }
  void Set(Engine& engine) { engine_.store(&engine, std::memory_order_release); }

  // For the call of `context`. UNAUTHENTICATED (UNAUTHENTICATED) without a token; UNAVAILABLE (LOADING) until set.
  absl::StatusOr<Engine*> Get(const grpc::CallbackServerContext& context) const {
    if (tokens_ != nullptr) SHARDMLP_RETURN_IF_ERROR(tokens_->Check(context.client_metadata()));
    Engine* engine = engine_.load(std::memory_order_acquire);
    if (engine != nullptr) return engine;
    return Error(absl::StatusCode::kUnavailable, Reason::kLoading, "the server is still loading its model");
  }

 private:
  const Tokens* const tokens_;
  std::atomic<Engine*> engine_ = nullptr;
};

}  // namespace shardmlp
