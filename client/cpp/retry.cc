#include "client/cpp/retry.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/tls_problem.h"

namespace shardmlp {
namespace {

constexpr absl::Duration kTlsTimeout = absl::Seconds(1);

}  // namespace

absl::Status Interrupted() { return Error(absl::StatusCode::kCancelled, Reason::kCancelled, "interrupted"); }

bool IsConnectionLost(const absl::Status& failure) {
  // What the server says itself has a reason. CANCELLED without one is a stream that was reset.
  return ReasonOf(failure) == Reason::kUnspecified &&
         (failure.code() == absl::StatusCode::kUnavailable || failure.code() == absl::StatusCode::kCancelled);
}

bool IsTransient(const absl::Status& failure) {
  if (IsConnectionLost(failure)) return true;
  const Reason reason = ReasonOf(failure);
  switch (failure.code()) {
    // Who is missing should be known to the trainer, who may wait on or discard.
    case absl::StatusCode::kUnavailable: return reason != Reason::kTrainerMissing && reason != Reason::kUnreachable;
    // Out of memory stays so, and so does a full disk, or a message above the limit.
    case absl::StatusCode::kResourceExhausted:
      return reason == Reason::kUnspecified || reason == Reason::kOverloaded || reason == Reason::kTooManySessions;
    default: return false;
  }
}

absl::Status Retries::AfterFailure(const absl::Status& failure) {
  if (!IsTransient(failure)) return failure;
  const absl::Time now = absl::Now();
  if (tries_++ == 0) first_failure_ = now;
  const absl::Duration longest = std::min(
      options_.initial_backoff * static_cast<double>(int64_t{1} << std::min(tries_ - 1, 30)), options_.max_backoff);
  const absl::Duration backoff = longest * absl::Uniform(random_, 0.5, 1.0);
  const auto& abandoned = connections_.options().abandoned;
  if (now + backoff > first_failure_ + options_.budget || (abandoned && abandoned())) {
    std::string tls;
    if (IsConnectionLost(failure)) {
      tls = TlsProblem(connections_.target(), connections_.options().credentials, kTlsTimeout);
    }
    return Error(
        absl::StatusCode::kUnavailable, Reason::kUnreachable,
        absl::StrCat(call_, ": gave up on ", connections_.target(), " after ", tries_, tries_ == 1 ? " try" : " tries",
                     " in ", absl::FormatDuration(absl::Trunc(now - first_failure_, absl::Milliseconds(1))),
                     "; the last failure: ", failure.ToString(absl::StatusToStringMode::kWithNoExtraData),
                     tls.empty() ? "" : "; TLS: ", tls),
        {{"target", connections_.target()},
         {"tries", absl::StrCat(tries_)},
         {"last", std::string(Name(ReasonOf(failure)))}});
  }
  const auto& interrupted = connections_.options().interrupted;
  const absl::Time until = now + backoff;
  for (absl::Time at = now; at < until; at = absl::Now()) {
    if (interrupted && interrupted()) return Annotate(Interrupted(), call_);
    absl::SleepFor(std::min(until - at, kInterruptInterval));
  }
  return absl::OkStatus();
}

}  // namespace shardmlp
