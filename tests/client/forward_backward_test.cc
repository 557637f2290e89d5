// Rows there and back: every row of every matrix where it belongs, however calls are cut and memory is laid out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "tests/client/connected.h"
#include "tests/client/fake_server.h"
#include "tests/client/matrix_data.h"

namespace shardmlp {
namespace {

using fake::Connected;
using fake::ExpectBackward;
using fake::ExpectForward;
using fake::FakeModel;
using fake::FakeServer;
using fake::MatrixData;
using testing::HasSubstr;

constexpr int64_t kHidden = 6;  // of layer 0
constexpr int64_t kOutput = 4;

class LayoutTest : public testing::TestWithParam<std::tuple<int64_t, DType, int64_t, int64_t>> {};

TEST_P(LayoutTest, ForwardAndBackwardMoveEveryRow) {
  const auto [rows, dtype, gap, shard_bytes] = GetParam();
  fake::FakeServerOptions options{.model = FakeModel()};
  options.model.mutable_limits()->set_preferred_shard_bytes(shard_bytes);
  FakeServer server(options);
  Connected connected(server.target());

  MatrixData x(rows, kHidden, dtype, gap);
  MatrixData y(rows, kOutput, dtype, gap + 1);
  x.Fill(1);
  const auto forwarded = connected.session->Forward(0, x.view(), y.view());
  ASSERT_TRUE(forwarded.ok()) << forwarded.status();
  EXPECT_EQ(forwarded->weights_version, 11);
  ExpectForward(x, y);

  MatrixData dy(rows, kOutput, dtype, gap);
  MatrixData dx(rows, kHidden, dtype, gap + 2);
  dy.Fill(2);
  ASSERT_TRUE(connected.session->Backward(0, forwarded->weights_version, x.view(), dy.view(), dx.view()).ok());
  ExpectBackward(x, dy, dx);
  EXPECT_EQ(server.counted_rows(), rows);
  EXPECT_EQ(connected.session->pending_row_count(), rows);
}

INSTANTIATE_TEST_SUITE_P(Layouts, LayoutTest,
                         testing::Combine(testing::Values<int64_t>(0, 1, 2, 5, 125, 257),
                                          testing::Values(DType::kF32, DType::kBF16, DType::kF16, DType::kF64),
                                          testing::Values<int64_t>(0, 3),         // elements between rows
                                          testing::Values<int64_t>(1, 100, 5000)  // bytes of a shard
                                          ));

TEST(ForwardBackwardTest, HeadersSayWhatTheCallIs) {
  FakeServer server;
  Connected connected(server.target());
  MatrixData x(5, kHidden, DType::kBF16);
  MatrixData y(5, kOutput, DType::kBF16);
  MatrixData dx(5, kHidden, DType::kBF16);
  ASSERT_TRUE(connected.session->Forward(0, x.view(), y.view()).ok());
  ASSERT_TRUE(connected.session->Backward(0, 11, x.view(), y.view(), dx.view()).ok());
  ASSERT_TRUE(connected.session->Backward(0, 12, x.view(), y.view(), {}).ok());
  ASSERT_TRUE(connected.session->Backward(0, 13, x.view(), y.view(), dx.view(), {.weight_gradient = false}).ok());

  std::vector<fake::SeenCall> calls;
  for (const fake::SeenCall& call : server.calls()) {
    if (call.complete) calls.push_back(call);
  }
  ASSERT_EQ(calls.size(), 4);
  EXPECT_EQ(calls[0].forward.session_id(), connected.session->id());
  EXPECT_EQ(calls[0].forward.layer(), 0);
  EXPECT_EQ(calls[0].forward.row_count(), 5);
  EXPECT_EQ(calls[0].forward.dtype(), v1::DTYPE_BF16);
  const v1::BackwardHeader& both = calls[1].backward;
  EXPECT_EQ(both.session_id(), connected.session->id());
  EXPECT_EQ(both.step(), 3);
  EXPECT_EQ(both.attempt(), 5);
  EXPECT_EQ(both.weights_version(), 11);
  EXPECT_GT(both.call_id(), 0);
  EXPECT_TRUE(both.input_gradient() && both.weight_gradient());
  EXPECT_FALSE(calls[2].backward.input_gradient());
  EXPECT_TRUE(calls[2].backward.weight_gradient());
  EXPECT_TRUE(calls[3].backward.input_gradient());
  EXPECT_FALSE(calls[3].backward.weight_gradient());
  EXPECT_NE(both.call_id(), calls[2].backward.call_id());
  // Only the calls that asked for weight gradients are to be sealed.
  EXPECT_EQ(connected.session->pending_row_count(), 10);
}

TEST(ForwardBackwardTest, ATicketThatIsMissingIsAnsweredWithX) {
  FakeServer server;
  server.SetForwardAnswerHook([](v1::ForwardResponse& answer) {
    if (answer.has_end()) answer.mutable_end()->set_ticket(77);
  });
  Connected connected(server.target());
  MatrixData x(5, kHidden, DType::kF32), y(5, kOutput, DType::kF32);
  MatrixData dy(5, kOutput, DType::kF32), dx(5, kHidden, DType::kF32);
  const auto kept = connected.session->Forward(0, x.Fill(1).view(), y.view(), {.keep_input = ClientKeepInput::kIfRoom});
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_EQ(kept->ticket, 77);
  EXPECT_EQ(kept->weights_version, 11);
  EXPECT_EQ(server.calls().back().forward.keep_input(), v1::KEEP_INPUT_IF_ROOM);
  server.SetHook([](const fake::Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method != "Backward" || moment.try_number > 0) return std::nullopt;
    return fake::Refuse(absl::StatusCode::kFailedPrecondition, Reason::kTicketMissing, "gone");
  });
  const absl::Status status =
      connected.session->Backward(0, 11, x.view(), dy.Fill(2).view(), dx.view(), {.ticket = kept->ticket});
  ASSERT_TRUE(status.ok()) << status;
  ExpectBackward(x, dy, dx);
  std::vector<v1::BackwardHeader> headers;
  for (const fake::SeenCall& call : server.calls()) {
    if (call.method == "Backward" && !call.complete) headers.push_back(call.backward);
  }
  ASSERT_EQ(headers.size(), 2);
  EXPECT_EQ(headers[0].ticket(), 77);
  EXPECT_EQ(headers[1].ticket(), 0);
  EXPECT_EQ(headers[0].call_id(), headers[1].call_id());
  EXPECT_EQ(server.counted_rows(), 5);
  EXPECT_EQ(connected.session->pending_row_count(), 5);
}

TEST(ForwardBackwardTest, AForwardThatNoBackwardFollowsAsksForNothingToBeKept) {
  FakeServer server;
  Connected connected(server.target());
  MatrixData x(5, kHidden, DType::kF32), y(5, kOutput, DType::kF32);
  ASSERT_TRUE(connected.session->Forward(0, x.view(), y.view()).ok());
  EXPECT_EQ(server.calls().back().forward.keep_input(), v1::KEEP_INPUT_NO);
}

TEST(ForwardBackwardTest, AReleasedTicketIsToldWithTheNextCallThatArrives) {
  FakeServer server;
  server.SetForwardAnswerHook([](v1::ForwardResponse& answer) {
    if (answer.has_end()) answer.mutable_end()->set_ticket(77);
  });
  Connected connected(server.target());
  MatrixData x(5, kHidden, DType::kF32), y(5, kOutput, DType::kF32);
  MatrixData dy(5, kOutput, DType::kF32), dx(5, kHidden, DType::kF32);
  const auto pinned = connected.session->Forward(0, x.view(), y.view(), {.keep_input = ClientKeepInput::kPinned});
  ASSERT_TRUE(pinned.ok()) << pinned.status();
  EXPECT_EQ(server.calls().back().forward.keep_input(), v1::KEEP_INPUT_PINNED);
  connected.session->Release(77);
  connected.session->Release(78);
  // The caller has no x any more: a ticket that is missing is its to answer for, and this call tells nobody anything.
  server.SetHook([](const fake::Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method != "Backward" || moment.try_number > 0) return std::nullopt;
    return fake::Refuse(absl::StatusCode::kFailedPrecondition, Reason::kTicketMissing, "gone");
  });
  const MatrixView dropped(nullptr, 5, 0, DType::kF32);
  const absl::Status missing = connected.session->Backward(0, 11, dropped, dy.view(), dx.view(), {.ticket = 77});
  EXPECT_EQ(ReasonOf(missing), Reason::kTicketMissing);
  EXPECT_EQ(connected.session->pending_row_count(), 0);
  ASSERT_TRUE(connected.session->Forward(0, x.view(), y.view()).ok());
  ASSERT_TRUE(connected.session->Forward(0, x.view(), y.view()).ok());
  std::vector<std::vector<int64_t>> told;
  for (const fake::SeenCall& call : server.calls()) {
    if (call.complete) continue;
    const auto& tickets =
        call.method == "Backward" ? call.backward.released_tickets() : call.forward.released_tickets();
    told.emplace_back(tickets.begin(), tickets.end());
  }
  EXPECT_THAT(told, ::testing::ElementsAre(::testing::IsEmpty(), ::testing::ElementsAre(77, 78),
                                           ::testing::ElementsAre(77, 78), ::testing::IsEmpty()));
}

TEST(ForwardBackwardTest, BackwardOfNothingCostsNoCall) {
  FakeServer server;
  Connected connected(server.target());
  MatrixData x(5, kHidden, DType::kF32);
  MatrixData dy(5, kOutput, DType::kF32);
  EXPECT_TRUE(connected.session->Backward(0, 11, x.view(), dy.view(), {}, {.weight_gradient = false}).ok());
  EXPECT_EQ(server.Count("Backward"), 0);
}

TEST(ForwardBackwardTest, ShardsFollowTheServersLimits) {
  fake::FakeServerOptions options{.model = FakeModel(), .result_rows = 1000};
  options.model.mutable_limits()->set_preferred_shard_bytes(1 << 20);
  options.model.mutable_limits()->set_max_message_bytes(100 << 10);
  options.model.mutable_limits()->set_tile_row_count(48);
  FakeServer server(options);
  Connected connected(server.target());
  MatrixData x(100, 1024, DType::kF32);
  MatrixData y(100, 1024, DType::kF32);
  ASSERT_TRUE(connected.session->Forward(2, x.Fill(3).view(), y.view()).ok());
  ExpectForward(x, y);
  // A row has 4 KiB, so 24 rows and their framing fit into 100 KiB, which is half a tile.
  EXPECT_THAT(server.calls().back().shard_rows, testing::ElementsAre(24, 24, 24, 24, 4));
  // Twice as much a row: 12.
  MatrixData dx(30, 1024, DType::kF32);
  ASSERT_TRUE(connected.session->Backward(2, 11, x.view().Rows(0, 30), y.view().Rows(0, 30), dx.view()).ok());
  EXPECT_THAT(server.calls().back().shard_rows, testing::ElementsAre(12, 12, 6));
}

TEST(ForwardBackwardTest, WrongMatricesAreRefusedBeforeAnythingIsSent) {
  FakeServer server;
  Connected connected(server.target());
  MatrixData x(5, kHidden, DType::kF32);
  MatrixData y(5, kOutput, DType::kF32);
  MatrixData other(6, kHidden, DType::kF32);
  MatrixData half(5, kOutput, DType::kBF16);
  Session& session = *connected.session;

  EXPECT_EQ(ReasonOf(session.Forward(9, x.view(), y.view()).status()), Reason::kUnknownLayer);
  EXPECT_EQ(session.Forward(0, y.view(), x.view()).status().message(), "x is [5, 4] f32, expected [5, 6] f32");
  EXPECT_EQ(session.Forward(0, other.view(), y.view()).status().message(), "y is [5, 4] f32, expected [6, 4] f32");
  EXPECT_EQ(session.Forward(0, x.view(), half.view()).status().message(), "y is [5, 4] bf16, expected [5, 4] f32");
  EXPECT_EQ(session.Backward(0, 11, x.view(), x.view(), x.view()).message(), "dy is [5, 6] f32, expected [5, 4] f32");
  EXPECT_EQ(session.Backward(0, 11, x.view(), y.view(), y.view()).message(), "dx is [5, 4] f32, expected [5, 6] f32");
  EXPECT_EQ(server.calls().size(), 0);
  EXPECT_EQ(session.pending_row_count(), 0);
}

// A server that answers wrongly is named and not asked again.
class BadAnswerTest : public testing::Test {
 protected:
  void ExpectInternal(fake::ForwardAnswerHook hook, Reason reason, const std::string& said) {
    FakeServer server;
    Connected connected(server.target());
    server.SetForwardAnswerHook(std::move(hook));
    MatrixData x(8, kHidden, DType::kF32);
    MatrixData y(8, kOutput, DType::kF32);
    const absl::Status status = connected.session->Forward(0, x.Fill(1).view(), y.view()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_EQ(ReasonOf(status), reason) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(said));
    EXPECT_EQ(server.Count("Forward"), 1);
  }
};

TEST_F(BadAnswerTest, Gap) {
  const auto hook = [](v1::ForwardResponse& response) {
    if (response.result().row_offset() == 3) response.mutable_result()->set_row_offset(4);
  };
  ExpectInternal(hook, Reason::kInvalidRows, "rows [4, +3) of the result where row 3 of 8 is next");
}

TEST_F(BadAnswerTest, Overlap) {
  const auto hook = [](v1::ForwardResponse& response) {
    if (response.result().row_offset() == 3) response.mutable_result()->set_row_offset(2);
  };
  ExpectInternal(hook, Reason::kInvalidRows, "rows [2, +3)");
}

TEST_F(BadAnswerTest, TooManyRows) {
  const auto hook = [](v1::ForwardResponse& response) {
    if (response.result().row_offset() == 6) response.mutable_result()->set_row_count(1LL << 62);
  };
  ExpectInternal(hook, Reason::kInvalidRows, "where row 6 of 8 is next");
}

TEST_F(BadAnswerTest, WrongSize) {
  const auto hook = [](v1::ForwardResponse& response) {
    if (response.has_result()) response.mutable_result()->mutable_y()->push_back('!');
  };
  ExpectInternal(hook, Reason::kInvalidShape, "49 bytes of result, expected 48 for [3, 4] f32");
}

TEST_F(BadAnswerTest, EndTooEarly) {
  const auto hook = [](v1::ForwardResponse& response) {
    if (response.result().row_offset() == 3) response.mutable_end()->set_row_count(8);
  };
  ExpectInternal(hook, Reason::kInvalidRows, "the answer ends after 3 of 8 rows");
}

TEST_F(BadAnswerTest, EndWithAnotherCount) {
  const auto hook = [](v1::ForwardResponse& response) {
    if (response.has_end()) response.mutable_end()->set_row_count(7);
  };
  ExpectInternal(hook, Reason::kInvalidRows, "end counts 7 rows, expected 8");
}

TEST_F(BadAnswerTest, NeitherResultNorEnd) {
  const auto hook = [](v1::ForwardResponse& response) { response.Clear(); };
  ExpectInternal(hook, Reason::kMalformedMessage, "neither");
}

}  // namespace
}  // namespace shardmlp
