// The hand-written framing against protobuf's own: each reads what the other writes.
#include "proto/wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "shardmlp/v1/compute.pb.h"

namespace shardmlp {
namespace {

constexpr int kRequestShard = v1::BackwardRequest::kShardFieldNumber;
constexpr int kResponseShard = v1::BackwardResponse::kResultFieldNumber;

// `bytes` as a message that arrived in slices of `piece_size`.
grpc::ByteBuffer Arrived(const std::string& bytes, size_t piece_size = 1 << 20) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size(); at += piece_size) slices.emplace_back(bytes.substr(at, piece_size));
  return {slices.data(), slices.size()};
}

std::string BytesOf(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) bytes.append(slice.begin(), slice.end());
  return bytes;
}

std::string BytesOf(const WirePayload& payload) {
  std::string bytes(std::max<int64_t>(payload.size(), 0), '?');
  payload.CopyTo(0, static_cast<int64_t>(bytes.size()), bytes.data());
  return bytes;
}

std::string Varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<char>(value | 0x80));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}

std::string VarintField(int field, uint64_t value) { return Varint(field << 3) + Varint(value); }
std::string BytesField(int field, const std::string& value) {
  return Varint(field << 3 | 2) + Varint(value.size()) + value;
}

v1::BackwardRequest ShardOf(int64_t row_offset, int64_t row_count, const std::string& x, const std::string& dy) {
  v1::BackwardRequest request;
  request.mutable_shard()->set_row_offset(row_offset);
  request.mutable_shard()->set_row_count(row_count);
  request.mutable_shard()->set_x(x);
  request.mutable_shard()->set_dy(dy);
  return request;
}

void ExpectShard(const absl::StatusOr<WireMessage>& message, const v1::BackwardShard& expected) {
  ASSERT_TRUE(message.ok()) << message.status();
  ASSERT_EQ(message->field, kRequestShard);
  EXPECT_EQ(message->shard.row_offset, expected.row_offset());
  EXPECT_EQ(message->shard.row_count, expected.row_count());
  EXPECT_EQ(BytesOf(message->shard.payloads[0]), expected.x());
  EXPECT_EQ(BytesOf(message->shard.payloads[1]), expected.dy());
}

void ExpectMalformed(const std::string& bytes, const std::string& said) {
  const auto message = ReadWireMessage(Arrived(bytes, 1), kRequestShard);
  ASSERT_FALSE(message.ok());
  EXPECT_EQ(message.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(message.status()), Reason::kMalformedMessage);
  EXPECT_THAT(std::string(message.status().message()), testing::HasSubstr(said));
}

TEST(WireTest, ReadsWhatProtobufWritesHoweverItIsSliced) {
  const v1::BackwardRequest request = ShardOf(1234567, 300, std::string(300, 'x'), std::string(700, 'y'));
  const std::string bytes = request.SerializeAsString();
  for (const size_t piece_size : {1, 2, 3, 7, 64, 299, 300, 301, 10000}) {
    ExpectShard(ReadWireMessage(Arrived(bytes, piece_size), kRequestShard), request.shard());
  }
}

TEST(WireTest, ProtobufReadsWhatItWrites) {
  const std::string x(300, 'x');
  const std::string dy(1 << 15, 'y');
  const std::vector<grpc::Slice> x_pieces = {grpc::Slice(x.substr(0, 10)), grpc::Slice(x.substr(10))};
  const std::array payloads = {x_pieces, std::vector<grpc::Slice>{grpc::Slice(dy)}};
  for (const int64_t row_offset : {int64_t{0}, int64_t{127}, int64_t{128}, int64_t{1} << 40}) {
    v1::BackwardRequest request;
    ASSERT_TRUE(request.ParseFromString(BytesOf(MakeWireShard(kRequestShard, row_offset, 300, payloads))));
    EXPECT_EQ(request.SerializeAsString(), ShardOf(row_offset, 300, x, dy).SerializeAsString());
  }
  v1::BackwardResponse response;
  ASSERT_TRUE(
      response.ParseFromString(BytesOf(MakeWireShard(kResponseShard, 5, 6, absl::MakeSpan(payloads.data(), 1)))));
  EXPECT_EQ(response.result().row_offset(), 5);
  EXPECT_EQ(response.result().row_count(), 6);
  EXPECT_EQ(response.result().dx(), x);
}

TEST(WireTest, WritesReferenceTheCallersMemory) {
  std::string x(4096, 'x');
  const std::vector<grpc::Slice> pieces = {grpc::Slice(x.data(), x.size(), grpc::Slice::STATIC_SLICE)};
  const grpc::ByteBuffer buffer = MakeWireShard(kRequestShard, 0, 1, absl::MakeConstSpan(&pieces, 1));
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(buffer.Dump(&slices).ok());
  EXPECT_EQ(slices.back().begin(), reinterpret_cast<const uint8_t*>(x.data()));
  // And reads reference the message.
  const auto message = ReadWireMessage(buffer, kRequestShard);
  ASSERT_TRUE(message.ok());
  x[0] = 'z';
  EXPECT_EQ(BytesOf(message->shard.payloads[0]).substr(0, 2), "zx");
}

TEST(WireTest, FieldsComeInAnyOrder) {
  std::array fields = {VarintField(1, 99), VarintField(2, 3), BytesField(3, "input"), BytesField(4, "gradient")};
  std::array<int, 4> order = {0, 1, 2, 3};
  do {
    std::string shard;
    for (const int i : order) shard += fields[i];
    const auto message = ReadWireMessage(Arrived(BytesField(kRequestShard, shard), 3), kRequestShard);
    ExpectShard(message, ShardOf(99, 3, "input", "gradient").shard());
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(WireTest, TheLastOfRepeatedFieldsCounts) {
  const std::string first = VarintField(1, 1) + VarintField(1, 7) + BytesField(3, "old") + BytesField(3, "new");
  // A second piece of the same alternative is merged into the first.
  const std::string second = VarintField(2, 5) + BytesField(4, "dy");
  const std::string bytes = BytesField(kRequestShard, first) + BytesField(kRequestShard, second);
  ExpectShard(ReadWireMessage(Arrived(bytes), kRequestShard), ShardOf(7, 5, "new", "dy").shard());
  v1::BackwardRequest request;
  ASSERT_TRUE(request.ParseFromString(bytes));
  EXPECT_EQ(request.SerializeAsString(), ShardOf(7, 5, "new", "dy").SerializeAsString());

  // Another alternative replaces it.
  const auto end = ReadWireMessage(Arrived(bytes + BytesField(3, VarintField(1, 42))), kRequestShard);
  ASSERT_TRUE(end.ok());
  EXPECT_EQ(end->field, v1::BackwardRequest::kEndFieldNumber);
  EXPECT_FALSE(end->shard.payloads[0].present());
  v1::CallEnd body;
  ASSERT_TRUE(body.ParseFromString(end->body));
  EXPECT_EQ(body.row_count(), 42);
}

TEST(WireTest, UnknownFieldsAreSkipped) {
  const std::string group = Varint(9 << 3 | 3) + VarintField(1, 5) + Varint(10 << 3 | 3) + Varint(10 << 3 | 4) +
                            BytesField(4, "in") + Varint(9 << 3 | 4);
  const std::string unknown = VarintField(100, ~uint64_t{0}) + BytesField(5, "?") + Varint(6 << 3 | 1) + "12345678" +
                              Varint(7 << 3 | 5) + "1234" + group + Varint(3 << 3 | 0) + Varint(8);
  const std::string shard = unknown + VarintField(1, 2) + unknown + VarintField(2, 1) + BytesField(3, "x") + unknown +
                            BytesField(4, "dy") + unknown;
  const std::string bytes = unknown + BytesField(kRequestShard, shard) + unknown;
  ExpectShard(ReadWireMessage(Arrived(bytes, 1), kRequestShard), ShardOf(2, 1, "x", "dy").shard());
}

TEST(WireTest, HeadersAndEndsGoThroughTheGeneratedTypes) {
  v1::BackwardRequest request;
  request.mutable_header()->set_session_id(77);
  request.mutable_header()->set_call_id(1LL << 50);
  const grpc::ByteBuffer buffer = MakeWireMessage(request);
  EXPECT_EQ(BytesOf(buffer), request.SerializeAsString());
  const auto message = ReadWireMessage(buffer, kRequestShard);
  ASSERT_TRUE(message.ok());
  EXPECT_EQ(message->field, v1::BackwardRequest::kHeaderFieldNumber);
  EXPECT_EQ(message->body, request.header().SerializeAsString());
}

TEST(WireTest, AnEmptyMessageHasNoAlternative) {
  const auto message = ReadWireMessage(Arrived(""), kRequestShard);
  ASSERT_TRUE(message.ok());
  EXPECT_EQ(message->field, 0);
  const auto empty_header = ReadWireMessage(Arrived(BytesField(1, "")), kRequestShard);
  ASSERT_TRUE(empty_header.ok());
  EXPECT_EQ(empty_header->field, 1);
}

TEST(WireTest, AnEmptyPayloadIsNotAnAbsentOne) {
  const auto read = ReadWireMessage(Arrived(BytesField(kRequestShard, BytesField(3, ""))), kRequestShard);
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->shard.payloads[0].size(), 0);
  EXPECT_TRUE(read->shard.payloads[0].present());
  EXPECT_EQ(read->shard.payloads[1].size(), -1);
  EXPECT_FALSE(read->shard.payloads[1].present());

  const std::array<std::vector<grpc::Slice>, 2> payloads;
  const auto written = ReadWireMessage(MakeWireShard(kRequestShard, 3, 4, payloads), kRequestShard);
  ASSERT_TRUE(written.ok());
  EXPECT_EQ(written->shard.payloads[0].size(), 0);
  EXPECT_EQ(written->shard.payloads[1].size(), 0);
  EXPECT_EQ(written->shard.row_count, 4);
}

TEST(WireTest, PayloadsAreCopiedFromAnyOffset) {
  std::string x(1000, 0);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<char>(i * 7);
  const v1::BackwardRequest request = ShardOf(0, 1, x, "");
  const auto message = ReadWireMessage(Arrived(request.SerializeAsString(), 33), kRequestShard);
  ASSERT_TRUE(message.ok());
  for (int64_t offset = 0; offset <= 1000; offset += 13) {
    for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{40}, 1000 - offset}) {
      if (offset + count > 1000) continue;
      std::string part(count, '?');
      message->shard.payloads[0].CopyTo(offset, count, part.data());
      EXPECT_EQ(part, x.substr(offset, count)) << offset << " " << count;
    }
  }
}

TEST(WireTest, TruncatedMessagesAreRefusedWhereverTheyEnd) {
  const std::string bytes = ShardOf(300, 200, std::string(20, 'x'), std::string(150, 'y')).SerializeAsString();
  for (size_t size = 1; size < bytes.size(); ++size) {
    const auto message = ReadWireMessage(Arrived(bytes.substr(0, size), 5), kRequestShard);
    ASSERT_FALSE(message.ok()) << size;
    EXPECT_EQ(ReasonOf(message.status()), Reason::kMalformedMessage);
  }
}

TEST(WireTest, HostileBytesAreRefused) {
  const std::string endless(11, '\xff');
  ExpectMalformed(endless, "varint of more than 10 bytes");
  ExpectMalformed(BytesField(2, Varint(1 << 3) + endless), "varint of more than 10 bytes");
  ExpectMalformed(Varint(2 << 3 | 2) + Varint(~uint64_t{0}), "a length of 18446744073709551615 where 0 bytes");
  ExpectMalformed(Varint(2 << 3 | 2) + Varint(1ULL << 31), "a length of 2147483648");
  // A payload that reaches beyond its shard, though not beyond the message.
  ExpectMalformed(Varint(2 << 3 | 2) + Varint(3) + Varint(3 << 3 | 2) + Varint(9) + "x12345678",
                  "a length of 9 where 1");
  ExpectMalformed(Varint(0), "field number 0");
  ExpectMalformed(Varint(uint64_t{1} << 40), "field number");
  ExpectMalformed(Varint(5 << 3 | 6), "wire type 6");
  ExpectMalformed(Varint(5 << 3 | 4), "a group ends");
  ExpectMalformed(Varint(5 << 3 | 3), "middle of a varint");
  ExpectMalformed(Varint(5 << 3 | 3) + Varint(6 << 3 | 4), "a group ends");
  ExpectMalformed(Varint(5 << 3 | 1) + "1234567", "8 bytes where 7");
  std::string nested;
  for (int i = 0; i < 200; ++i) nested += Varint(5 << 3 | 3);
  ExpectMalformed(nested, "nested too deeply");
}

// A damaged shard is refused here where protobuf refuses it, and else has the same fields.
TEST(WireTest, AgreesWithProtobufOnDamagedShards) {
  std::mt19937 random(20240229);
  const std::string whole = VarintField(50, 3) +
                            ShardOf(300, 5, "some input", "a gradient").shard().SerializeAsString() +
                            BytesField(9, "later") + VarintField(2, 77);
  int accepted = 0;
  for (int i = 0; i < 100000; ++i) {
    std::string shard = whole;
    for (uint32_t edits = random() % 3 + 1; edits > 0; --edits) {
      shard[random() % shard.size()] = static_cast<char>(random() % 4 == 0 ? random() : random() % 48);
    }
    if (random() % 4 == 0) shard.resize(random() % shard.size());
    const std::string bytes = BytesField(kRequestShard, shard);
    v1::BackwardRequest request;
    const bool parsed = request.ParseFromString(bytes);
    const auto message = ReadWireMessage(Arrived(bytes, random() % 40 + 1), kRequestShard);
    ASSERT_EQ(parsed, message.ok()) << testing::PrintToString(bytes) << message.status();
    if (!parsed) continue;
    ++accepted;
    ASSERT_TRUE(parsed) << testing::PrintToString(bytes);
    ExpectShard(message, request.shard());
    if (testing::Test::HasFailure()) FAIL() << testing::PrintToString(bytes);
  }
  EXPECT_GT(accepted, 10000);
}

}  // namespace
}  // namespace shardmlp
