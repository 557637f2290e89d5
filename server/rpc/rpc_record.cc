#include "server/rpc/rpc_record.h"

#include <string>

namespace shardmlp {
namespace {

// The server's own faults are errors; what the client is to mend, a warning; what it only has to send again, or has
// itself ended, is the ordinary course of things.
LogLevel LevelOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kUnknown: return LogLevel::kError;
    case absl::StatusCode::kCancelled: return LogLevel::kDebug;
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kUnavailable: return LogLevel::kInfo;
    default: return LogLevel::kWarning;
  }
}

}  // namespace

grpc::Status RpcRecord::End(const absl::Status& status, const LogFields& ids) const {
  const absl::Duration duration = absl::Now() - started_;
  method_->Handled(status.code(), duration);
  if (status.ok()) return ToGrpcStatus(status);
  metrics_->CountFailure(Name(ReasonOf(status)));
  if (const LogLevel level = LevelOf(status.code()); Logs(level)) {
    LogFields fields = {{"method", method_->name()},
                        {"code", absl::StatusCodeToString(status.code())},
                        {"reason", std::string(Name(ReasonOf(status)))},
                        {"seconds", absl::ToDoubleSeconds(duration)}};
    fields.insert(fields.end(), ids.begin(), ids.end());
    if (absl::IsUnauthenticated(status) || absl::IsPermissionDenied(status)) fields.push_back({"peer", call_->peer()});
    fields.push_back({"why", std::string(status.message())});
    Log(level, "rpc failed", fields, Name(ReasonOf(status)));
  }
  return ToGrpcStatus(status);
}

}  // namespace shardmlp
