// The answer to a unary rpc, on its way from the service through the engine to gRPC.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/engine.h"
#include "server/rpc/rpc_record.h"

namespace shardmlp {

// A cheap copy; of all copies one is finished, once, from any thread. gRPC keeps request and response until then, or
// until the client cancels: that finishes it too, and what the engine answers later is dropped.
class UnaryReply {
 public:
  // `session_id` is for the log; 0 where the request names none.
  UnaryReply(Metrics& metrics, RpcMetrics& method, const grpc::CallbackServerContext& call, int64_t session_id = 0)
      : reactor_(std::make_shared<Reactor>(RpcRecord(metrics, method, call), session_id)) {
    reactor_->self = reactor_;
  }

  // What the service's method returns to gRPC.
  grpc::ServerUnaryReactor* reactor() const { return reactor_.get(); }

  // The response is sent where `status` is OK.
  void Finish(const absl::Status& status) const {
    reactor_->End(status, [] {});
  }

  // Finishes with what the engine answers, which `fill` puts into the response.
  template <typename T, typename FillResponse>
  Done<T> FinishWith(FillResponse fill) const {
    return [reactor = reactor_, fill](absl::StatusOr<T> result) {
      reactor->End(result.status(), [&] {
        if (result.ok()) fill(*result);
      });
    };
  }

 private:
  // Owns itself until gRPC is done with it.
  struct Reactor final : grpc::ServerUnaryReactor {
    Reactor(const RpcRecord& record, int64_t session_id) : record(record), session_id(session_id) {}

    // The first end counts. The response is there until it.
    void End(const absl::Status& status, absl::FunctionRef<void()> fill) {
      {
        absl::MutexLock lock(&mutex);
        if (std::exchange(ended, true)) return;
        fill();
      }
      Finish(record.End(status, session_id == 0 ? LogFields{} : LogFields{{"session", session_id}}));
    }
    void OnCancel() override {
      End(ClientGone(), [] {});
    }
    void OnDone() override { self = nullptr; }

    const RpcRecord record;
    const int64_t session_id;
    std::shared_ptr<Reactor> self;
    absl::Mutex mutex;
    bool ended ABSL_GUARDED_BY(mutex) = false;
  };

  std::shared_ptr<Reactor> reactor_;
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
