// Every way to get a shard stream wrong: a status that says what was got and what was expected, and a server unharmed.
#include <gmock/gmock.h>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "tests/rpc/raw_call.h"
#include "tests/rpc/rpc_fixture.h"

namespace shardmlp {
namespace {

using Messages = std::vector<v1::ForwardRequest>;

struct BadCall {
  std::string name;
  Messages messages;
  Reason reason;
  std::string part_of_message;
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

v1::ForwardRequest Header(void (*change)(v1::ForwardHeader&)) {
  v1::ForwardRequest request = ForwardHeader(8);
  change(*request.mutable_header());
  return request;
}

v1::ForwardRequest Shard(void (*change)(v1::ForwardShard&)) {
  v1::ForwardRequest request = ForwardShard(0, 4);
  change(*request.mutable_shard());
  return request;
}

std::vector<BadCall> BadCalls() {
  const v1::ForwardRequest header = ForwardHeader(8);
  return {
      {"Nothing", {}, Reason::kInvalidMessageOrder, "closes without its end"},
      {"NoHeader", {ForwardShard(0, 8)}, Reason::kInvalidMessageOrder, "got a shard, expected a header first"},
      {"EndAlone", {ForwardEnd(0)}, Reason::kInvalidMessageOrder, "got an end, expected a header first"},
      {"HeaderTwice", {header, header}, Reason::kInvalidMessageOrder, "got a header, expected a shard or an end"},
      {"LateHeader", {header, ForwardShard(0, 4), header}, Reason::kInvalidMessageOrder, "got a header"},
      {"EmptyMessage", {header, {}}, Reason::kInvalidMessageOrder, "without header, shard or end"},
      {"NoEnd", {header, ForwardShard(0, 8)}, Reason::kInvalidMessageOrder, "closes without its end"},
      {"Overlap", {header, ForwardShard(0, 4), ForwardShard(3, 4)}, Reason::kInvalidRows, "expected 4"},
      {"Gap", {header, ForwardShard(0, 4), ForwardShard(5, 3)}, Reason::kInvalidRows, "expected 4"},
      {"Repeat", {header, ForwardShard(0, 4), ForwardShard(0, 4)}, Reason::kInvalidRows, "expected 4"},
      {"TooManyRows", {header, ForwardShard(0, 9)}, Reason::kInvalidRows, "9 rows at 0 of 8"},
      {"MissingRows", {header, ForwardShard(0, 4), ForwardEnd(8)}, Reason::kInvalidRows, "after 4"},
      {"OtherEnd", {header, ForwardShard(0, 8), ForwardEnd(7)}, Reason::kInvalidRows, "an end of 7"},
      {"NoRows", {header, Shard([](auto& s) { s.set_row_count(0); })}, Reason::kInvalidRows, "at least 1"},
      {"NegativeRows", {header, Shard([](auto& s) { s.set_row_count(-4); })}, Reason::kInvalidRows, "-4 rows"},
      {"NegativeOffset", {header, Shard([](auto& s) { s.set_row_offset(-1); })}, Reason::kInvalidRows, "from -1"},
      {"ShortPayload", {header, Shard([](auto& s) { s.mutable_x()->pop_back(); })}, Reason::kInvalidShape, "127 bytes"},
      {"LongPayload",
       {header, Shard([](auto& s) { s.mutable_x()->push_back(0); })},
       Reason::kInvalidShape,
       "129 bytes"},
      {"NoPayload", {header, Shard([](auto& s) { s.clear_x(); })}, Reason::kInvalidShape, "got 0 bytes, expected 128"},
      {"NoDType", {Header([](auto& h) { h.clear_dtype(); })}, Reason::kInvalidDType, "dtype is 0"},
      {"OtherDType", {Header([](auto& h) { h.set_dtype(static_cast<v1::DType>(99)); })}, Reason::kInvalidDType, "99"},
      {"NoSuchLayer",
       {Header([](auto& h) { h.set_layer(2); })},
       Reason::kUnknownLayer,
       "no layer 2",
       absl::StatusCode::kNotFound},
      {"NoSuchSession",
       {Header([](auto& h) { h.set_session_id(1); })},
       Reason::kUnknownSession,
       "no session 1",
       absl::StatusCode::kNotFound},
  };
}

class BadCallTest : public RpcTest, public testing::WithParamInterface<BadCall> {};

TEST_P(BadCallTest, IsAnsweredWithWhatWasGotAndExpected) {
  Start();
  const Answer answer = Forward(GetParam().messages);
  ExpectStatus(answer.status, GetParam().code, GetParam().reason, GetParam().part_of_message);
  EXPECT_FALSE(answer.forward_end.has_value());
  ExpectUnharmed();
}

INSTANTIATE_TEST_SUITE_P(Streams, BadCallTest, testing::ValuesIn(BadCalls()),
                         [](const auto& info) { return info.param.name; });

class BadInputTest : public RpcTest {
 protected:
  absl::Status SendBytes(const std::vector<std::string>& messages) const {
    return RawCall(channel_, "/shardmlp.v1.Compute/Backward", messages).status;
  }
};

TEST_F(BadInputTest, AMessageAfterTheEndIsRefused) {
  Start();
  engine_->HoldDevice();  // or the call may be over by then
  Messages messages = ForwardCall(8, 1);
  messages.push_back(ForwardShard(0, 4));
  const Answer answer = Forward(messages);
  ExpectStatus(answer.status, absl::StatusCode::kInvalidArgument, Reason::kInvalidMessageOrder,
               "got a shard, expected nothing after the end");
  engine_->ReleaseDevice();
  ExpectUnharmed();
}

TEST_F(BadInputTest, ABackwardShardWithoutDyIsRefused) {
  Start();
  v1::BackwardRequest shard = BackwardShard(0, 4);
  shard.mutable_shard()->clear_dy();
  const Answer answer = Backward({BackwardHeader(4), shard, BackwardEnd(4)});
  ExpectStatus(answer.status, absl::StatusCode::kInvalidArgument, Reason::kInvalidShape, "got 0 bytes");
  ExpectUnharmed();
}

TEST_F(BadInputTest, BytesThatAreNoMessageAreRefused) {
  Start();
  const std::string header = BackwardHeader(4).SerializeAsString();
  // A tag that never ends, a shard longer than the message, a payload longer than the shard, field number 0, an end
  // whose own field is cut.
  for (const std::string& bytes :
       {std::string("\xff\xff\xff"), std::string("\x12\x7f"), std::string("\x12\x02\x1a\x7f"),
        std::string("\x00\x01", 2), std::string("\x1a\x01\x08")}) {
    SCOPED_TRACE(testing::PrintToString(bytes));
    ExpectStatus(SendBytes({header, bytes}), absl::StatusCode::kInvalidArgument, Reason::kMalformedMessage);
  }
  ExpectStatus(SendBytes({std::string("\x0a\x01\xff")}), absl::StatusCode::kInvalidArgument, Reason::kMalformedMessage,
               "BackwardHeader");
  ExpectUnharmed();
}

TEST_F(BadInputTest, AMessageAboveTheLimitIsRefusedWithTheLimit) {
  RpcServerOptions options;
  options.limits.max_message_bytes = 1000;
  Start({}, options);
  const Answer answer = Forward({ForwardHeader(60), ForwardShard(0, 40), ForwardEnd(40)});
  ExpectStatus(answer.status, absl::StatusCode::kInvalidArgument, Reason::kMessageTooLarge, "at most 1000");
  ExpectUnharmed();
}

TEST_F(BadInputTest, AMessageFarAboveTheLimitIsCutByGrpcWithTheSizes) {
  RpcServerOptions options;
  options.limits.max_message_bytes = 1000;
  Start({}, options);
  const Answer answer = Forward({ForwardHeader(6000), ForwardShard(0, 4000), ForwardEnd(4000)});
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kResourceExhausted) << answer.status;
  EXPECT_THAT(std::string(answer.status.message()), testing::HasSubstr("larger than max (128011 vs. 2000)"));
  ExpectUnharmed();
}

}  // namespace
}  // namespace shardmlp
