// A server over a CopyEngine in this process, and a client on gRPC's own stubs, which knows nothing of ours.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/metrics.h"
#include "server/rpc/rpc_server.h"
#include "shardmlp/v1/compute.grpc.pb.h"
#include "tests/rpc/copy_engine.h"

namespace shardmlp {

// Rows of x, dy, y or dx: [rows, 8] f32, the CopyEngine's default size.
constexpr int64_t kColumns = 8;
constexpr int64_t kRowBytes = kColumns * sizeof(float);

// Bytes of rows [begin, begin + count), each value different from all others within 2^24.
std::string Rows(int64_t begin, int64_t count);

v1::ForwardRequest ForwardHeader(int64_t row_count);
v1::ForwardRequest ForwardShard(int64_t row_offset, int64_t row_count);
v1::ForwardRequest ForwardEnd(int64_t row_count);
v1::BackwardRequest BackwardHeader(int64_t row_count, bool input_gradient = true);
v1::BackwardRequest BackwardShard(int64_t row_offset, int64_t row_count);
v1::BackwardRequest BackwardEnd(int64_t row_count);
// A whole call of `shard_count` shards of nearly equal size.
std::vector<v1::ForwardRequest> ForwardCall(int64_t row_count, int shard_count);
std::vector<v1::BackwardRequest> BackwardCall(int64_t row_count, int shard_count, bool input_gradient = true);

// What came back of a call.
struct Answer {
  absl::Status status;
  std::string rows;                    // joined
  std::vector<int64_t> message_bytes;  // payload of each result
  std::optional<v1::ForwardEnd> forward_end;
  std::optional<v1::BackwardEnd> backward_end;
};

class RpcTest : public testing::Test {
 protected:
  // Starts listening; Serve follows unless `load` is false.
  void Start(const CopyEngineOptions& engine = {}, const RpcServerOptions& server = {}, bool load = true);
  ~RpcTest() override;

  std::unique_ptr<v1::Compute::Stub> Stub() const { return v1::Compute::NewStub(channel_); }
  // Sends `messages`, closes, and reads all.
  Answer Forward(const std::vector<v1::ForwardRequest>& messages) const;
  Answer Backward(const std::vector<v1::BackwardRequest>& messages) const;
  // Checks that a plain call is still answered right and that none is left open.
  void ExpectUnharmed();
  // The value of a series as /metrics gives it, "shardmlp_open_calls" or "name{label=\"x\"}"; NaN where there is none.
  double Metric(const std::string& series) const;

  Metrics metrics_;
  std::unique_ptr<CopyEngine> engine_;
  std::unique_ptr<RpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

// Fails the test with the statuses' differences where they differ.
void ExpectStatus(const absl::Status& got, absl::StatusCode code, Reason reason,
                  absl::string_view part_of_message = "");

}  // namespace shardmlp
