// One Model.ReadTensor: a tensor's weights in chunks of whole rows, each read from the engine when the last was taken.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/rpc/engine_slot.h"
#include "server/rpc/rpc_record.h"
#include "shardmlp/v1/model.pb.h"

namespace shardmlp {

// Holds one chunk at a time, so an unread stream keeps no more than that. Reading, writing and finishing follow one
// another, so that no two threads are ever in it.
class TensorStream final : public grpc::ServerWriteReactor<v1::ReadTensorResponse> {
 public:
  // Starts one that owns itself until the rpc is done.
  static TensorStream* Start(const EngineSlot& engine, const std::string& tensor_name, const RpcRecord& record);

  explicit TensorStream(const RpcRecord& record) : record_(record) {}

  void OnWriteDone(bool ok) override;
  void OnDone() override;

 private:
  absl::Status Open(const EngineSlot& engine, const std::string& tensor_name);
  void ReadNext();
  void Send(absl::StatusOr<TensorRows> rows);
  void End(const absl::Status& status) { Finish(record_.End(status)); }

  const RpcRecord record_;
  std::unique_ptr<TensorStream> self_;
  Engine* engine_ = nullptr;
  int64_t tensor_ = 0;     // index in ModelSpec::tensors
  int64_t row_count_ = 0;  // of the tensor, [row_count, columns]
  int64_t row_bytes_ = 0;
  int64_t next_row_ = 0;
  int64_t chunk_rows_ = 0;  // of the chunk that is being read
  std::optional<int64_t> weights_version_;
  v1::ReadTensorResponse chunk_;
};

}  // namespace shardmlp
