// One try of a forward or backward: a header, the shards of its inputs and an end go out while result rows come in.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/connection.h"
#include "client/cpp/options.h"
#include "client/cpp/row_hooks.h"
#include "kernels/matrix.h"

namespace shardmlp {

struct ShardCall {
  std::string method;  // "/shardmlp.v1.Compute/Forward"
  grpc::ByteBuffer header;
  grpc::ByteBuffer end;
  std::vector<ConstMatrixView> inputs;  // x [T, H]; or x [T, H], [T, 0] where the server has it, and dy [T, O]
  MatrixView output;                    // y [T, O] or dx [T, H], written (=); empty where none is wanted
  int64_t rows_per_shard = 1;
  RowHooks hooks = {};
};

// Returns the body of the message that ended the answer (a ForwardEnd or BackwardEnd), after which `output` is
// complete. When it returns, whatever it returns, nothing refers to the matrices' memory any more. Inputs whose rows
// lie without gaps are sent from where they lie; others are copied, a shard at a time.
//
// UNAVAILABLE where the answer was cut short; INTERNAL where it breaks the protocol; DEADLINE_EXCEEDED (STALLED) where
// no message went or came for `options.stall_timeout`; CANCELLED (CANCELLED) where it was interrupted; as a hook says;
// else as the server says.
absl::StatusOr<std::string> RunShardCall(Connection& connection, const ShardCall& call, const ClientOptions& options);

}  // namespace shardmlp
