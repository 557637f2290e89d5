#include "client/cpp/heartbeat.h"

#include <algorithm>

#include "client/cpp/unary_call.h"

namespace shardmlp {

Heartbeat::Heartbeat(Connections& connections, int64_t session_id, absl::Duration lease)
    : connections_(connections), session_id_(session_id), interval_(lease / 3), thread_([this] { Run(); }) {}

Heartbeat::~Heartbeat() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    if (renewal_ != nullptr) renewal_->TryCancel();
  }
  thread_.join();
}

bool Heartbeat::AwaitStop(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithTimeout(absl::Condition(&stopping_), timeout);
}

void Heartbeat::Run() {
  absl::Duration wait = interval_;
  while (!AwaitStop(wait)) {
    const absl::Status renewed = Renew();
    if (absl::IsNotFound(renewed)) return;
    // A renewal that failed is tried again before the lease ends.
    wait = renewed.ok() ? interval_ : interval_ / 4;
  }
}

absl::Status Heartbeat::Renew() {
  grpc::ClientContext context;
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return absl::OkStatus();
    renewal_ = &context;
  }
  v1::RenewSessionRequest request;
  request.set_session_id(session_id_);
  const auto response =
      CallOnce(connections_, context, "RenewSession", &v1::Training::Stub::async::RenewSession, request, interval_,
               /*interrupted=*/nullptr);
  absl::MutexLock lock(&mutex_);
  renewal_ = nullptr;
  return response.status();
}

}  // namespace shardmlp
