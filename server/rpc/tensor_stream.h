// One Model.ReadTensor: a tensor's weights in chunks of whole rows, each read from the engine when the last was taken.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/engine.h"
#include "server/rpc/engine_slot.h"
#include "server/rpc/open_streams.h"
#include "server/rpc/rpc_record.h"
#include "shardmlp/v1/model.pb.h"

namespace shardmlp {

// Tensors that may be read at once. Each holds up to two chunks: gRPC's copy and ours.
inline constexpr int kMaxTensorStreams = 16;

// What every tensor stream of a server uses. All of it must outlive the gRPC server.
struct TensorStreamContext {
  const EngineSlot& engine;
  OpenStreams& streams;
  std::atomic<int>& open_count;  // of those that were admitted
};

// Holds one chunk at a time, so an unread stream keeps no more than that, and not for longer than the stall time-out.
// Reading, writing and finishing follow one another; from outside a stream is only told that it should end.
class TensorStream final : public grpc::ServerWriteReactor<v1::ReadTensorResponse>,
                           public OpenStream,
                           public std::enable_shared_from_this<TensorStream> {
 public:
  // Starts one that `context.streams` keeps until gRPC is done with it.
  static TensorStream* Start(const TensorStreamContext& context, const std::string& tensor_name,
                             const RpcRecord& record, grpc::CallbackServerContext* call);

  TensorStream(const TensorStreamContext& context, const RpcRecord& record, grpc::CallbackServerContext* call)
      : context_(context), record_(record), call_(call) {}

  // gRPC's reactions.
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  // OpenStream's.
  void Stop(const absl::Status& status) override;
  void CheckStall(absl::Time now) override;

 private:
  absl::Status Open(const std::string& tensor_name, const grpc::CallbackServerContext& call);
  void ReadNext();
  void Send(absl::StatusOr<TensorRows> rows);
  bool stopped() {
    absl::MutexLock lock(&mutex_);
    return !stopped_.ok();
  }
  // With why it was stopped, where it was.
  void End(const absl::Status& status);
  // From now on the client is waited for, or not.
  void SetWaiting(bool waiting);

  const TensorStreamContext context_;
  const RpcRecord record_;
  bool admitted_ = false;  // counted in open_count
  Engine* engine_ = nullptr;
  int64_t tensor_ = 0;     // index in ModelSpec::tensors
  int64_t row_count_ = 0;  // of the tensor, [row_count, columns]
  int64_t row_bytes_ = 0;
  int64_t next_row_ = 0;
  int64_t chunk_rows_ = 0;  // of the chunk that is being read
  std::optional<int64_t> weights_version_;
  v1::ReadTensorResponse chunk_;

  absl::Mutex mutex_;
  std::optional<absl::Time> waiting_since_ ABSL_GUARDED_BY(mutex_);  // for the client to take a chunk or the status
  absl::Status stopped_ ABSL_GUARDED_BY(mutex_);                     // why it should end, if it should
  grpc::CallbackServerContext* call_ ABSL_GUARDED_BY(mutex_);        // null once gRPC is done
};

}  // namespace shardmlp
