// One Forward or Backward stream: shards in, results out, both at once. The only reactor of the data path.
//
// Three parties tell a stream things at any time and from any thread: gRPC (a read or write ended, the client is gone),
// the engine (room, results, the outcome), and OpenStreams (stop, stalled). Each only notes its fact under the mutex.
// Then one thread at a time, the driver, acts on the facts with no lock held: it alone reads from and writes to gRPC,
// and it alone calls the engine. gRPC's threads drive at once; the device thread never drives, but has OpenStreams'
// thread do it. So nothing the client does can hold up the device, and the order of any two actions is plain.
//
// Memory: at most one received message (while the engine has no room for it no other is read, and HTTP/2's flow control
// stops the client), and the results that the engine's staging holds, which are sent from where they lie.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/engine/call.h"
#include "server/metrics.h"
#include "server/rpc/engine_slot.h"
#include "server/rpc/message_limits.h"
#include "server/rpc/open_streams.h"
#include "server/rpc/rpc_record.h"
#include "server/rpc/shard_receiver.h"

namespace shardmlp {

// What every stream of a server uses. All of it must outlive the gRPC server.
struct ShardStreamContext {
  const EngineSlot& engine;
  const MessageLimits limits;
  OpenStreams& streams;
  Metrics& metrics;
};

class ShardStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                          public CallSink,
                          public OpenStream,
                          public std::enable_shared_from_this<ShardStream> {
 public:
  // Starts a stream that `context.streams` keeps until gRPC is done with it. One that may not come in ends unread.
  static ShardStream* Start(const ShardStreamContext& context, Pass pass, RpcMetrics& method,
                            grpc::CallbackServerContext* call);

  ShardStream(const ShardStreamContext& context, const absl::StatusOr<Engine*>& engine, Pass pass, RpcMetrics& method,
              grpc::CallbackServerContext* call);

  // gRPC's reactions.
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  // The engine's.
  void OnRoom() override;
  void OnResult(CallResult result) override;
  void OnFinished(absl::StatusOr<CallSummary> summary) override;

  // OpenStream's.
  void Stop(const absl::Status& status) override;
  void CheckStall(absl::Time now) override;
  // Acts on what was noted, unless another thread does.
  void Drive();

 private:
  // What happened since the driver last looked.
  struct Facts {
    std::optional<bool> read;     // a read ended: with a message, or because there is none
    std::optional<bool> written;  // a write ended
    bool room = false;
    std::vector<CallResult> results;
    std::optional<absl::StatusOr<CallSummary>> outcome;
    std::optional<absl::Status> stop;
    bool any() const { return read || written || room || !results.empty() || outcome || stop; }
  };

  // Notes a fact on a thread that may drive, and on the device thread.
  void NoteAndDrive(absl::FunctionRef<void(Facts&)> note);
  void NoteAndWake(absl::FunctionRef<void(Facts&)> note);

  // The driver's. `facts` are those that came since the last time.
  void Act(Facts facts);
  void ActOnOutcome(const absl::StatusOr<CallSummary>& summary);
  void ActOnInput(const Facts& facts);
  void QueueResult(const CallResult& result);
  void Send();
  void Read();
  void Fail(const absl::Status& status);
  void UpdateWaiting(bool progress);
  bool CancelledByClient();
  bool failed() const { return status_.has_value() && !status_->ok(); }

  const ShardStreamContext& context_;
  const Pass pass_;
  const RpcRecord record_;

  // The driver's alone.
  ShardReceiver receiver_;
  grpc::ByteBuffer incoming_;
  std::deque<grpc::ByteBuffer> outgoing_;
  grpc::ByteBuffer sending_;
  bool reading_ = false;  // into incoming_
  bool writing_ = false;  // sending_
  bool closed_ = false;   // the client's half
  absl::Time read_started_;
  absl::Time write_started_;
  std::optional<absl::Status> status_;  // what the stream ends with, once outgoing_ is sent
  bool finished_ = false;               // status_ was given to gRPC

  absl::Mutex mutex_;
  Facts facts_ ABSL_GUARDED_BY(mutex_);
  bool driving_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Time> waiting_since_ ABSL_GUARDED_BY(mutex_);  // for the client to send or to take something
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;                      // finished_ or failed(), for CheckStall
  grpc::CallbackServerContext* call_ ABSL_GUARDED_BY(mutex_);        // null once gRPC is done
};

}  // namespace shardmlp
