// The client's half of a shard stream, apart from how it travels: a header once and first, shards, an end.
//
//   kHeader --header--> kShards --end--> kEnded          anything else is INVALID_ARGUMENT (INVALID_MESSAGE_ORDER)
//
// One implementation for both passes. A shard goes to the engine as it comes; where the engine takes only a part of it,
// the receiver keeps the rest and takes no further message until that is placed.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/wire.h"
#include "server/engine/call.h"
#include "server/engine/engine.h"
#include "server/log.h"
#include "server/metrics.h"

namespace shardmlp {

// For one thread at a time. After a failure only Cancel and the destructor may be called.
class ShardReceiver {
 public:
  // `engine`, or why there is none, which is the answer. It and `sink` must outlive the call: until the sink's
  // OnFinished, or Cancel.
  ShardReceiver(absl::StatusOr<Engine*> engine, Pass pass, int64_t max_message_bytes, CallSink& sink)
      : engine_(std::move(engine)), pass_(pass), max_message_bytes_(max_message_bytes), sink_(sink) {}

  // Takes the next message; not while `blocked`. INVALID_ARGUMENT, or what the engine says.
  absl::Status Receive(const grpc::ByteBuffer& message);
  // There is room again: places what is left of the last shard.
  absl::Status Resume();
  // The client has closed its half.
  absl::Status Close() const;
  // Drops the call, where there is one.
  void Cancel();

  // Rows of the last shard wait for room.
  bool blocked() const { return shard_.has_value(); }
  // Whose call it is, once its header has come; for the log.
  LogFields ids() const { return ids_; }
  // The end has come, so nothing more may.
  bool ended() const { return state_ == State::kEnded; }

 private:
  enum class State { kHeader, kShards, kEnded };

  absl::Status Start(const std::string& header);
  absl::Status Place();
  absl::Status End(const std::string& end);

  const absl::StatusOr<Engine*> engine_;
  const Pass pass_;
  const int64_t max_message_bytes_;
  CallSink& sink_;
  State state_ = State::kHeader;
  LogFields ids_;
  std::shared_ptr<Call> call_;
  std::optional<WireShard> shard_;  // not placed whole
  int64_t placed_rows_ = 0;         // of shard_
};

}  // namespace shardmlp
