// A server of a model on the CPU, on a free port of this machine.
#pragma once

#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/engine/engine.h"
#include "server/rpc/rpc_server.h"
#include "tests/bench/random_model.h"

namespace shardmlp {

// Serves until destroyed. Where it can't start, ends the benchmark.
class LoopbackServer {
 public:
  explicit LoopbackServer(const RandomModel& model)
      : engine_(Engine::Create({}, MakeCpuBackend().value(), model, MakeLocalReplicas(), nullptr, metrics_).value()),
        server_(RpcServer::Listen({.listen = {"127.0.0.1:0"}}, metrics_).value()) {
    server_->Serve(*engine_);
  }
  ~LoopbackServer() {
    engine_->Shutdown();
    server_->Shutdown(absl::UnavailableError("done"), absl::Now() + absl::Seconds(10));
  }
  LoopbackServer(const LoopbackServer&) = delete;
  LoopbackServer& operator=(const LoopbackServer&) = delete;

  const std::string& address() const { return server_->addresses().front(); }
  int64_t tile_rows() const { return engine_->limits().tile_row_count; }

 private:
  Metrics metrics_;
  const std::unique_ptr<Engine> engine_;
  const std::unique_ptr<RpcServer> server_;
};

}  // namespace shardmlp
