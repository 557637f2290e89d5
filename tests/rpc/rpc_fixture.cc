#include "tests/rpc/rpc_fixture.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>

#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/status.h"
#include "proto/status_bridge.h"

namespace shardmlp {
namespace {

template <typename Request>
void AddShards(int64_t row_count, int shard_count, Request (*shard)(int64_t, int64_t), std::vector<Request>& messages) {
  for (int i = 0; i < shard_count; ++i) {
    const int64_t begin = row_count * i / shard_count;
    const int64_t end = row_count * (i + 1) / shard_count;
    if (end > begin) messages.push_back(shard(begin, end - begin));
  }
}

// Appends a result, which must follow on what came before.
void Add(int64_t row_offset, int64_t row_count, const std::string& rows, Answer& answer) {
  EXPECT_EQ(row_offset * kRowBytes, static_cast<int64_t>(answer.rows.size()));
  EXPECT_EQ(row_count * kRowBytes, static_cast<int64_t>(rows.size()));
  answer.rows += rows;
  answer.message_bytes.push_back(static_cast<int64_t>(rows.size()));
}

}  // namespace

std::string Rows(int64_t begin, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count * kColumns));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(begin * kColumns + static_cast<int64_t>(i));
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
}

v1::ForwardRequest ForwardHeader(int64_t row_count) {
  v1::ForwardRequest request;
  request.mutable_header()->set_session_id(CopyEngine::kSessionId);
  request.mutable_header()->set_layer(1);
  request.mutable_header()->set_row_count(row_count);
  request.mutable_header()->set_dtype(v1::DTYPE_F32);
  return request;
}

v1::ForwardRequest ForwardShard(int64_t row_offset, int64_t row_count) {
  v1::ForwardRequest request;
  request.mutable_shard()->set_row_offset(row_offset);
  request.mutable_shard()->set_row_count(row_count);
  request.mutable_shard()->set_x(Rows(row_offset, row_count));
  return request;
}

v1::ForwardRequest ForwardEnd(int64_t row_count) {
  v1::ForwardRequest request;
  request.mutable_end()->set_row_count(row_count);
  return request;
}

v1::BackwardRequest BackwardHeader(int64_t row_count, bool input_gradient) {
  v1::BackwardRequest request;
  request.mutable_header()->set_session_id(CopyEngine::kSessionId);
  request.mutable_header()->set_layer(1);
  request.mutable_header()->set_row_count(row_count);
  request.mutable_header()->set_dtype(v1::DTYPE_F32);
  request.mutable_header()->set_call_id(1);
  request.mutable_header()->set_weights_version(CopyEngine::kWeightsVersion);
  request.mutable_header()->set_input_gradient(input_gradient);
  return request;
}

v1::BackwardRequest BackwardShard(int64_t row_offset, int64_t row_count) {
  v1::BackwardRequest request;
  request.mutable_shard()->set_row_offset(row_offset);
  request.mutable_shard()->set_row_count(row_count);
  request.mutable_shard()->set_x(std::string(static_cast<size_t>(row_count * kRowBytes), '\1'));
  request.mutable_shard()->set_dy(Rows(row_offset, row_count));
  return request;
}

v1::BackwardRequest BackwardEnd(int64_t row_count) {
  v1::BackwardRequest request;
  request.mutable_end()->set_row_count(row_count);
  return request;
}

std::vector<v1::ForwardRequest> ForwardCall(int64_t row_count, int shard_count) {
  std::vector<v1::ForwardRequest> messages = {ForwardHeader(row_count)};
  AddShards(row_count, shard_count, &ForwardShard, messages);
  messages.push_back(ForwardEnd(row_count));
  return messages;
}

std::vector<v1::BackwardRequest> BackwardCall(int64_t row_count, int shard_count, bool input_gradient) {
  std::vector<v1::BackwardRequest> messages = {BackwardHeader(row_count, input_gradient)};
  AddShards(row_count, shard_count, &BackwardShard, messages);
  messages.push_back(BackwardEnd(row_count));
  return messages;
}

void RpcTest::Start(const CopyEngineOptions& engine, const RpcServerOptions& server, bool load) {
  engine_ = std::make_unique<CopyEngine>(engine);
  RpcServerOptions options = server;
  options.listen = {"127.0.0.1:0"};
  auto listening = RpcServer::Listen(options, metrics_);
  ASSERT_TRUE(listening.ok()) << listening.status();
  server_ = *std::move(listening);
  if (load) server_->Serve(*engine_);
  channel_ = grpc::CreateChannel(server_->addresses().front(), grpc::InsecureChannelCredentials());
}

RpcTest::~RpcTest() { server_.reset(); }

Answer RpcTest::Forward(const std::vector<v1::ForwardRequest>& messages) const {
  const auto stub = Stub();
  grpc::ClientContext context;
  const auto stream = stub->Forward(&context);
  for (const auto& message : messages) stream->Write(message);
  stream->WritesDone();
  Answer answer;
  for (v1::ForwardResponse response; stream->Read(&response);) {
    if (response.has_end()) answer.forward_end = response.end();
    if (response.has_result()) {
      Add(response.result().row_offset(), response.result().row_count(), response.result().y(), answer);
    }
  }
  answer.status = FromGrpcStatus(stream->Finish());
  return answer;
}

Answer RpcTest::Backward(const std::vector<v1::BackwardRequest>& messages) const {
  const auto stub = Stub();
  grpc::ClientContext context;
  const auto stream = stub->Backward(&context);
  for (const auto& message : messages) stream->Write(message);
  stream->WritesDone();
  Answer answer;
  for (v1::BackwardResponse response; stream->Read(&response);) {
    if (response.has_end()) answer.backward_end = response.end();
    if (response.has_result()) {
      Add(response.result().row_offset(), response.result().row_count(), response.result().dx(), answer);
    }
  }
  answer.status = FromGrpcStatus(stream->Finish());
  return answer;
}

void RpcTest::ExpectUnharmed() {
  const Answer answer = Forward(ForwardCall(9, 2));
  EXPECT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.rows, Rows(0, 9));
  EXPECT_TRUE(answer.forward_end.has_value());
  engine_->AwaitOpenCalls(0);
}

double RpcTest::Metric(const std::string& series) const {
  const std::string text = metrics_.Text();
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    double value = 0;
    absl::string_view rest = line;
    if (absl::ConsumePrefix(&rest, series + " ") && absl::SimpleAtod(rest, &value)) return value;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

void ExpectStatus(const absl::Status& got, absl::StatusCode code, Reason reason, absl::string_view part_of_message) {
  EXPECT_EQ(got.code(), code) << got;
  EXPECT_EQ(std::string(Name(ReasonOf(got))), std::string(Name(reason))) << got;
  EXPECT_THAT(std::string(got.message()), testing::HasSubstr(std::string(part_of_message)));
}

}  // namespace shardmlp
