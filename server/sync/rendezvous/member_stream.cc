#include "server/sync/rendezvous/member_stream.h"

#include <utility>

#include "kernels/status.h"
#include "proto/status_bridge.h"
#include "server/sync/rendezvous/messages.h"

namespace shardmlp {

MemberStream::MemberStream(const std::shared_ptr<grpc::Channel>& channel, Loop& loop, Calls calls)
    : loop_(loop), calls_(std::move(calls)), stub_(v1::Rendezvous::NewStub(channel)) {
  stub_->async()->Meet(&context_, this);
  // Operations are started on the loop's thread, so gRPC must not be done while they may be.
  AddHold();
  StartRead(&response_);
  StartCall();
}

void MemberStream::Send(v1::MeetRequest request) {
  if (finished_ || cancelled_) return;
  queued_bytes_ += request.ByteSizeLong();
  queue_.push_back(std::move(request));
  Write();
  if (queued_bytes_ > kMaxQueuedBytes) {
    Cancel(Error(absl::StatusCode::kUnavailable, Reason::kReplicaLost, "rank 0 takes nothing of what is sent to it"));
  }
}

void MemberStream::Cancel(const absl::Status& why) {
  if (cancelled_) return;
  cancelled_ = why;
  context_.TryCancel();
}

void MemberStream::OnReadDone(bool ok) {
  loop_.Post([this, ok] {
    if (!ok) return Finish();
    heard_ = SteadyNow();
    answers_ = true;
    if (!cancelled_) calls_.received(response_);
    StartRead(&response_);
  });
}

void MemberStream::OnWriteDone(bool) {
  loop_.Post([this] {
    writes_ = false;
    sent_ = true;
    queued_bytes_ -= queue_.front().ByteSizeLong();
    queue_.pop_front();
    Write();
  });
}

void MemberStream::OnDone(const grpc::Status& status) {
  loop_.Post([this, status = FromGrpcStatus(status)] {
    // Copies: the call may destroy this.
    const auto ended = calls_.ended;
    ended(cancelled_.value_or(status));
  });
}

void MemberStream::Write() {
  if (writes_ || finished_ || queue_.empty()) return;
  writes_ = true;
  StartWrite(&queue_.front());
}

void MemberStream::Finish() {
  finished_ = true;
  RemoveHold();
}

}  // namespace shardmlp
