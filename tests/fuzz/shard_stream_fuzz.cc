// Hostile shard streams: whatever a client sends, the receiver refuses it or hands the engine rows in order, never more
// than the header said.
//
// An input is a byte (odd: backward), then messages, each a two-byte length (high byte first) and as many bytes; the
// last one may be short.
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "kernels/status.h"
#include "server/rpc/shard_receiver.h"
#include "tests/rpc/copy_engine.h"

namespace shardmlp {
namespace {

constexpr int64_t kMaxMessageBytes = 1 << 12;

void Check(bool holds) {
  if (!holds) std::abort();
}

// What the engine answers: rows in order, and one outcome.
class CheckedSink final : public CallSink {
 public:
  void OnRoom() override {}
  void OnResult(CallResult result) override {
    Check(!finished_ && result.row_offset == rows_ && result.row_count > 0);
    Check(result.byte_count % result.row_count == 0);
    rows_ += result.row_count;
  }
  void OnFinished(absl::StatusOr<CallSummary> summary) override {
    Check(!finished_);
    finished_ = true;
    if (summary.ok()) Check(summary->row_count >= rows_);
  }

 private:
  int64_t rows_ = 0;
  bool finished_ = false;
};

// The next message, and the input without it.
grpc::ByteBuffer TakeMessage(absl::string_view& input) {
  const size_t length =
      std::min<size_t>(input.size() - 2, static_cast<uint8_t>(input[0]) * 256 + static_cast<uint8_t>(input[1]));
  const grpc::Slice slice(input.data() + 2, length);
  input.remove_prefix(2 + length);
  return grpc::ByteBuffer(&slice, 1);
}

void FuzzStream(Pass pass, absl::string_view input) {
  static CopyEngine& engine = *new CopyEngine;
  CheckedSink sink;
  ShardReceiver receiver(&engine, pass, kMaxMessageBytes, sink);
  absl::Status status;
  while (status.ok() && input.size() >= 2 && !receiver.blocked()) status = receiver.Receive(TakeMessage(input));
  if (status.ok()) receiver.Close().IgnoreError();
  if (!status.ok()) Check(ReasonOf(status) != Reason::kUnspecified && !status.message().empty());
  receiver.Cancel();
}

}  // namespace
}  // namespace shardmlp

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  if (size >= 1) {
    shardmlp::FuzzStream(data[0] % 2 == 1 ? shardmlp::Pass::kBackward : shardmlp::Pass::kForward, input.substr(1));
  }
  return 0;
}
