// A replica's stream to the coordinator.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "server/sync/rendezvous/loop.h"
#include "shardmlp/v1/rendezvous.grpc.pb.h"

namespace shardmlp {

// Belongs to the thread of a Loop, and calls back there. Must live until Ended.
class MemberStream final : private grpc::ClientBidiReactor<v1::MeetRequest, v1::MeetResponse> {
 public:
  struct Calls {
    std::function<void(const v1::MeetResponse&)> received;
    std::function<void(const absl::Status&)> ended;  // last; may destroy this
  };
  MemberStream(const std::shared_ptr<grpc::Channel>& channel, Loop& loop, Calls calls);

  // Nothing is sent once the stream is about to end.
  void Send(v1::MeetRequest request);
  // Ends it with `why`, unless it ended by itself.
  void Cancel(const absl::Status& why);

  // Since anything came in, or since it was opened.
  absl::Duration Silence() const { return SteadyNow() - heard_; }
  // Whether anything was sent since the last call of this.
  bool TakeSent() { return std::exchange(sent_, false) || writes_; }
  bool answers() const { return answers_; }

 private:
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  void Write();
  // No more operations follow.
  void Finish();

  Loop& loop_;
  const Calls calls_;
  const std::unique_ptr<v1::Rendezvous::Stub> stub_;
  grpc::ClientContext context_;
  v1::MeetResponse response_;
  std::deque<v1::MeetRequest> queue_;  // the first is being written, where one is
  size_t queued_bytes_ = 0;
  bool writes_ = false;
  bool sent_ = false;
  bool answers_ = false;
  bool finished_ = false;
  std::optional<absl::Status> cancelled_;
  absl::Time heard_ = SteadyNow();
};

}  // namespace shardmlp
