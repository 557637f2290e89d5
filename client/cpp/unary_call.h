// Calls with one request and one response.
#pragma once

#include <grpcpp/client_context.h>

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/connection.h"
#include "client/cpp/retry.h"
#include "proto/status_bridge.h"

namespace shardmlp {

template <typename Stub, typename Request, typename Response>
using UnaryMethod = grpc::Status (Stub::*)(grpc::ClientContext*, const Request&, Response*);

// What a failed call means to the caller: its Reason, its name, and STALLED where time ran out. Has `connection`
// replaced where it was lost.
absl::Status CallFailure(const grpc::Status& status, Connections& connections,
                         const std::shared_ptr<Connection>& connection, absl::string_view call);

// One try. `context` is the caller's so that another thread can cancel it.
template <typename Stub, typename Request, typename Response>
absl::StatusOr<Response> CallOnce(Connections& connections, grpc::ClientContext& context, absl::string_view call,
                                  UnaryMethod<Stub, Request, Response> method, const Request& request,
                                  absl::Duration timeout) {
  SHARDMLP_ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, connections.Next());
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  Response response;
  const grpc::Status status = (connection->stub<Stub>().*method)(&context, request, &response);
  if (!status.ok()) return CallFailure(status, connections, connection, call);
  return response;
}

// As many tries as `retry` allows.
template <typename Stub, typename Request, typename Response>
absl::StatusOr<Response> CallWithRetries(Connections& connections, const RetryOptions& retry, const std::string& call,
                                         UnaryMethod<Stub, Request, Response> method, const Request& request,
                                         absl::Duration timeout) {
  return WithRetries(Retries(retry, connections.target(), call), [&] {
    grpc::ClientContext context;
    return CallOnce(connections, context, call, method, request, timeout);
  });
}

}  // namespace shardmlp
