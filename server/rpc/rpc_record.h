// One rpc as metrics and log have it: started, and handled with a code, a reason and a duration.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/status.h"
#include "proto/status_bridge.h"
#include "server/log.h"
#include "server/metrics.h"

namespace shardmlp {

// What an rpc ends with whose client is there no more.
inline absl::Status ClientGone() {
  return Error(absl::StatusCode::kCancelled, Reason::kCancelled, "the client cancelled the call or went away");
}

class RpcRecord {
 public:
  // Counts the start. Both metrics must outlive the record; `call` must be there until End.
  RpcRecord(Metrics& metrics, RpcMetrics& method, const grpc::CallbackServerContext& call)
      : metrics_(&metrics), method_(&method), call_(&call) {
    method.Started();
  }

  // Counts the end, once, logs a failure with `ids`, and the address of who may not come in, and gives `status` as gRPC
  // has it.
  grpc::Status End(const absl::Status& status, const LogFields& ids = {}) const;

 private:
  Metrics* metrics_;
  RpcMetrics* method_;
  const grpc::CallbackServerContext* call_;
  absl::Time started_ = absl::Now();
};

}  // namespace shardmlp
