#include "client/cpp/unary_call.h"

#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace shardmlp {

absl::Status CallFailure(const absl::Status& failure, Connections& connections,
                         const std::shared_ptr<Connection>& connection, absl::string_view call) {
  if (IsConnectionLost(failure)) connections.Replace(connection);
  if (failure.code() == absl::StatusCode::kDeadlineExceeded && ReasonOf(failure) == Reason::kUnspecified) {
    return Error(failure.code(), Reason::kStalled,
                 absl::StrCat(call, ": no answer from ", connections.target(), " in time"));
  }
  return Annotate(failure, call);
}

}  // namespace shardmlp
