// Calls with one request and one response.
#pragma once

#include <grpcpp/client_context.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/call_watch.h"
#include "client/cpp/connection.h"
#include "client/cpp/retry.h"

namespace shardmlp {

// &v1::Training::Stub::async::SealStep and its like.
template <typename Async, typename Request, typename Response>
using UnaryMethod = void (Async::*)(grpc::ClientContext*, const Request*, Response*, std::function<void(grpc::Status)>);

// What a failed call means to the caller: its Reason, its name, and STALLED where time ran out. Has `connection`
// replaced where it was lost.
absl::Status CallFailure(const absl::Status& failure, Connections& connections,
                         const std::shared_ptr<Connection>& connection, absl::string_view call);

// One try. `context` is the caller's so that another thread can cancel it; `interrupted` is ClientOptions'.
template <typename Async, typename Request, typename Response>
absl::StatusOr<Response> CallOnce(Connections& connections, grpc::ClientContext& context, absl::string_view call,
                                  UnaryMethod<Async, Request, Response> method, const Request& request,
                                  absl::Duration timeout, const std::function<bool()>& interrupted) {
  SHARDMLP_ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, connections.Next());
  if (absl::Status status = connection->Authorize(context); !status.ok()) return Annotate(status, call);
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  Response response;
  CallWatch watch;
  (connection->async<Async>().*method)(&context, &request, &response,
                                       [&watch](const grpc::Status& status) { watch.Finish(status); });
  const absl::Status status = watch.Await(context, *connection, absl::InfiniteDuration(), interrupted);
  if (!status.ok()) return CallFailure(status, connections, connection, call);
  return response;
}

// As many tries as `retry` allows.
template <typename Async, typename Request, typename Response>
absl::StatusOr<Response> CallWithRetries(Connections& connections, const RetryOptions& retry, const std::string& call,
                                         UnaryMethod<Async, Request, Response> method, const Request& request,
                                         absl::Duration timeout) {
  return WithRetries(Retries(retry, connections, call), [&] {
    grpc::ClientContext context;
    return CallOnce(connections, context, call, method, request, timeout, connections.options().interrupted);
  });
}

}  // namespace shardmlp
