// The headers and ends of calls, between the wire and the engine.
#include "server/rpc/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace shardmlp {
namespace {

TEST(ConvertTest, AForwardAsksForItsInputToBeKeptWhereItsHeaderSaysSo) {
  v1::ForwardHeader header;
  header.set_session_id(5);
  header.set_layer(3);
  header.set_row_count(7);
  header.set_dtype(v1::DTYPE_BF16);
  for (const auto& [sent, keep] :
       {std::pair(v1::KEEP_INPUT_NO, KeepInput::kNo), std::pair(v1::KEEP_INPUT_IF_ROOM, KeepInput::kIfRoom),
        std::pair(v1::KEEP_INPUT_PINNED, KeepInput::kPinned)}) {
    header.set_keep_input(sent);
    header.add_released_tickets(sent + 40);
    const auto spec = ReadCallHeader(Pass::kForward, header.SerializeAsString());
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(std::get<ForwardSpec>(*spec).keep_input, keep);
    EXPECT_EQ(std::get<ForwardSpec>(*spec).row_count, 7);
    EXPECT_EQ(std::get<ForwardSpec>(*spec).released_tickets.back(), sent + 40);
  }
  header.set_keep_input(static_cast<v1::KeepInput>(3));
  const auto unknown = ReadCallHeader(Pass::kForward, header.SerializeAsString());
  EXPECT_EQ(unknown.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(unknown.status().message()), ::testing::HasSubstr("keep_input is 3"));
}

TEST(ConvertTest, ABackwardNamesItsTicket) {
  v1::BackwardHeader header;
  header.set_dtype(v1::DTYPE_F32);
  header.set_ticket(123456789012345);
  header.add_released_tickets(5);
  const auto spec = ReadCallHeader(Pass::kBackward, header.SerializeAsString());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(std::get<BackwardSpec>(*spec).ticket, 123456789012345);
  EXPECT_EQ(std::get<BackwardSpec>(*spec).released_tickets, std::vector<int64_t>{5});
}

TEST(ConvertTest, AForwardsEndSaysWhatWasKept) {
  const auto message =
      MakeCallEnd(Pass::kForward,
                  {.row_count = 7, .weights_version = 2, .repeated_row_count = 0, .ticket = 9, .gate_up_kept = true});
  v1::ForwardResponse response;
  ASSERT_TRUE(response.ParseFromString(message->SerializeAsString()));
  EXPECT_EQ(response.end().ticket(), 9);
  EXPECT_TRUE(response.end().gate_up_kept());
  EXPECT_EQ(response.end().row_count(), 7);
  EXPECT_EQ(response.end().weights_version(), 2);
}

}  // namespace
}  // namespace shardmlp
