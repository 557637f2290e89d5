// The answer to a unary rpc, on its way from the service through the engine to gRPC.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/rpc/rpc_record.h"

namespace shardmlp {

// A cheap copy; of all copies one is finished, once, from any thread. gRPC keeps request and response until then.
class UnaryReply {
 public:
  UnaryReply(grpc::CallbackServerContext* context, Metrics& metrics, RpcMetrics& method)
      : reactor_(context->DefaultReactor()), record_(metrics, method) {}

  // What the service's method returns to gRPC.
  grpc::ServerUnaryReactor* reactor() const { return reactor_; }

  // The response is sent where `status` is OK.
  void Finish(const absl::Status& status) const { reactor_->Finish(record_.End(status)); }

  // Finishes with what the engine answers, which `fill` puts into the response.
  template <typename T, typename FillResponse>
  Done<T> FinishWith(FillResponse fill) const {
    return [reply = *this, fill](absl::StatusOr<T> result) {
      if (result.ok()) fill(*result);
      reply.Finish(result.status());
    };
  }

 private:
  grpc::ServerUnaryReactor* reactor_;
  RpcRecord record_;
};

// Answers with what `body` returns, having filled the response.
inline grpc::ServerUnaryReactor* AnswerNow(const UnaryReply& reply, absl::FunctionRef<absl::Status()> body) {
  reply.Finish(body());
  return reply.reactor();
}

// `start` hands the reply on to the engine, or fails, which is then the answer.
inline grpc::ServerUnaryReactor* AnswerLater(const UnaryReply& reply, absl::FunctionRef<absl::Status()> start) {
  if (const absl::Status status = start(); !status.ok()) reply.Finish(status);
  return reply.reactor();
}

}  // namespace shardmlp
