#include "server/rpc/shard_receiver.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "server/rpc/convert.h"

namespace shardmlp {
namespace {

// The alternatives of ForwardRequest and BackwardRequest.
constexpr int kHeaderField = 1;
constexpr int kShardField = 2;
constexpr int kEndField = 3;

absl::Status OutOfOrder(absl::string_view got, absl::string_view expected) {
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidMessageOrder,
               absl::StrCat("got ", got, ", expected ", expected));
}

absl::string_view NameOf(int field) {
  switch (field) {
    case kHeaderField: return "a header";
    case kShardField: return "a shard";
    case kEndField: return "an end";
    default: return "a message without header, shard or end";
  }
}

// A payload as the engine reads it; absent and empty are one.
class PayloadSource final : public ByteSource {
 public:
  explicit PayloadSource(const WirePayload& payload) : payload_(payload) {}
  int64_t size() const override { return std::max<int64_t>(payload_.size(), 0); }
  void CopyTo(int64_t offset, int64_t count, void* to) const override { payload_.CopyTo(offset, count, to); }

 private:
  const WirePayload& payload_;
};

}  // namespace

absl::Status ShardReceiver::Receive(const grpc::ByteBuffer& message) {
  if (static_cast<int64_t>(message.Length()) > max_message_bytes_) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kMessageTooLarge,
                 absl::StrCat("got a message of ", message.Length(), " bytes, expected at most ", max_message_bytes_,
                              " (ServerLimits.max_message_bytes)"),
                 {{"max_message_bytes", absl::StrCat(max_message_bytes_)}});
  }
  SHARDMLP_ASSIGN_OR_RETURN(WireMessage wire, ReadWireMessage(message, kShardField));
  switch (state_) {
    case State::kHeader:
      if (wire.field != kHeaderField) return OutOfOrder(NameOf(wire.field), "a header first");
      return Start(wire.body);
    case State::kShards:
      if (wire.field == kEndField) return End(wire.body);
      if (wire.field != kShardField) return OutOfOrder(NameOf(wire.field), "a shard or an end after the header");
      shard_ = std::move(wire.shard);
      placed_rows_ = 0;
      return Place();
    case State::kEnded: break;
  }
  return OutOfOrder(NameOf(wire.field), "nothing after the end");
}

absl::Status ShardReceiver::Resume() { return blocked() ? Place() : absl::OkStatus(); }

absl::Status ShardReceiver::Close() const {
  return ended() ? absl::OkStatus() : OutOfOrder("a stream that closes without its end", "an end");
}

void ShardReceiver::Cancel() {
  shard_.reset();
  if (call_ != nullptr) std::exchange(call_, nullptr)->Cancel();
}

absl::Status ShardReceiver::Start(const std::string& header) {
  SHARDMLP_ASSIGN_OR_RETURN(Engine* const engine, engine_);
  SHARDMLP_ASSIGN_OR_RETURN(const CallHeader spec, ReadCallHeader(pass_, header));
  ids_ = std::visit(
      [](const auto& call) {
        return LogFields{{"session", call.session_id}, {"call", call.call_id}, {"layer", call.layer}};
      },
      spec);
  if (const auto* forward = std::get_if<ForwardSpec>(&spec)) {
    SHARDMLP_ASSIGN_OR_RETURN(call_, engine->StartForward(*forward, sink_));
  } else {
    SHARDMLP_ASSIGN_OR_RETURN(call_, engine->StartBackward(std::get<BackwardSpec>(spec), sink_));
  }
  state_ = State::kShards;
  return absl::OkStatus();
}

absl::Status ShardReceiver::Place() {
  const WireShard& shard = *shard_;
  if (shard.row_count < 1) {
    return Error(
        absl::StatusCode::kInvalidArgument, Reason::kInvalidRows,
        absl::StrCat("a shard at row ", shard.row_offset, " has ", shard.row_count, " rows, expected at least 1"));
  }
  const PayloadSource x(shard.payloads[0]);
  const PayloadSource dy(shard.payloads[1]);
  SHARDMLP_ASSIGN_OR_RETURN(const int64_t rows, call_->Place(shard.row_offset, shard.row_count, placed_rows_, x,
                                                             pass_ == Pass::kBackward ? &dy : nullptr));
  placed_rows_ += rows;
  if (placed_rows_ == shard.row_count) shard_.reset();
  return absl::OkStatus();
}

absl::Status ShardReceiver::End(const std::string& end) {
  v1::CallEnd message;
  if (!message.ParseFromString(end)) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kMalformedMessage,
                 absl::StrCat("the end's ", end.size(), " bytes are no ", message.GetTypeName()));
  }
  state_ = State::kEnded;
  return call_->End(message.row_count());
}

}  // namespace shardmlp
