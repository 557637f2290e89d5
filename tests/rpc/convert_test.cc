// The headers and ends of calls, between the wire and the engine.
#include "server/rpc/convert.h"

#include <gtest/gtest.h>

namespace shardmlp {
namespace {

TEST(ConvertTest, AForwardAsksForItsInputToBeKeptWhereItsHeaderSaysSo) {
  v1::ForwardHeader header;
  header.set_session_id(5);
  header.set_layer(3);
  header.set_row_count(7);
  header.set_dtype(v1::DTYPE_BF16);
  for (const bool keep : {false, true}) {
    header.set_keep_input(keep);
    const auto spec = ReadCallHeader(Pass::kForward, header.SerializeAsString());
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(std::get<ForwardSpec>(*spec).keep_input, keep);
    EXPECT_EQ(std::get<ForwardSpec>(*spec).row_count, 7);
  }
}

TEST(ConvertTest, ABackwardNamesItsTicket) {
  v1::BackwardHeader header;
  header.set_dtype(v1::DTYPE_F32);
  header.set_ticket(123456789012345);
  const auto spec = ReadCallHeader(Pass::kBackward, header.SerializeAsString());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(std::get<BackwardSpec>(*spec).ticket, 123456789012345);
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
