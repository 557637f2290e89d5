// Which failures a call is sent again after, and for how long.
#pragma once

#include <string>

#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cpp/connection.h"
#include "client/cpp/options.h"
#include "kernels/status.h"

namespace shardmlp {

// CANCELLED (CANCELLED), of a call that ClientOptions::interrupted ended.
absl::Status Interrupted();

// Whether the transport failed, rather than the server itself saying no: the connection is of no use any more.
bool IsConnectionLost(const absl::Status& failure);
// Whether the same call may succeed later: the connection was lost, the server is full, drains, or its weights changed
// in mid-call.
bool IsTransient(const absl::Status& failure);

// The tries of one call.
class Retries {
 public:
  // `call` names it in errors. `connections` must outlive this.
  Retries(const RetryOptions& options, const Connections& connections, std::string call)
      : options_(options), connections_(connections), call_(std::move(call)) {}

  // OK, after a back-off, where the call should be sent again. Else what to report: `failure` itself where another try
  // would not help, UNAVAILABLE (UNREACHABLE) where the budget is spent, or CANCELLED where the back-off was
  // interrupted.
  absl::Status AfterFailure(const absl::Status& failure);

 private:
  const RetryOptions options_;
  const Connections& connections_;
  const std::string call_;
  int tries_ = 0;
  absl::Time first_failure_;
  absl::BitGen random_;
};

// Calls `once` until it succeeds or Retries says to stop. It returns a Status or a StatusOr.
template <typename Once>
auto WithRetries(Retries retries, Once once) -> decltype(once()) {
  while (true) {
    auto result = once();
    if (result.ok()) return result;
    absl::Status failure;
    if constexpr (std::is_same_v<decltype(result), absl::Status>) {
      failure = result;
    } else {
      failure = result.status();
    }
    SHARDMLP_RETURN_IF_ERROR(retries.AfterFailure(failure));
  }
}

}  // namespace shardmlp
