// The shard streams' messages as gRPC byte buffers, written and read without copying payloads.
//
// All four messages of the shard streams (ForwardRequest, ForwardResponse, BackwardRequest, BackwardResponse) are one
// `oneof` whose shard alternative has the same layout: row_offset = 1, row_count = 2, and one or two `bytes` fields, 3
// and 4; the alternative after the shard's is the last. This file knows that layout and no more; headers and ends go
// through the generated types. Fields may come in any order, repeated (the last one counts, and pieces of one
// alternative are merged) or unknown (skipped), as protobuf has it.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace google::protobuf {
class MessageLite;
}

namespace shardmlp {

// A `bytes` field that still lies in the slices of the message it came in, and keeps them alive.
class WirePayload {
 public:
  // Absent.
  WirePayload() = default;
  // Present, and empty where there are no pieces.
  explicit WirePayload(std::vector<grpc::Slice> pieces);

  bool present() const { return present_; }
  // -1 where the field was absent.
  int64_t size() const { return !present_ ? -1 : ends_.empty() ? 0 : ends_.back(); }
  // Copies bytes [offset, offset + count) to `to`. They must exist.
  void CopyTo(int64_t offset, int64_t count, void* to) const;

 private:
  std::vector<grpc::Slice> pieces_;
  std::vector<int64_t> ends_;  // where each piece ends in the payload
  bool present_ = false;
};

struct WireShard {
  int64_t row_offset = 0;
  int64_t row_count = 0;
  std::array<WirePayload, 2> payloads;  // fields 3 and 4
};

struct WireMessage {
  int field = 0;     // which alternative of the oneof; 0 where the message had none
  WireShard shard;   // where `field` is the shard's
  std::string body;  // else: the alternative's own serialized message
};

// Reads one message. INVALID_ARGUMENT (MALFORMED_MESSAGE), saying where, for bytes that are no such message.
absl::StatusOr<WireMessage> ReadWireMessage(const grpc::ByteBuffer& buffer, int shard_field);

// A message whose alternative `shard_field` is a shard. `payloads`: the pieces of field 3 and, where there are two, of
// field 4. The slices are referenced, not copied; they come last in the message.
grpc::ByteBuffer MakeWireShard(int shard_field, int64_t row_offset, int64_t row_count,
                               absl::Span<const std::vector<grpc::Slice>> payloads);

// A whole generated message (a header or an end).
grpc::ByteBuffer MakeWireMessage(const google::protobuf::MessageLite& message);

}  // namespace shardmlp
