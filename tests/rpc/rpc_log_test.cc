// What the log says of rpcs that fail: whose they were, and how bad it is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_split.h"
#include "server/log.h"
#include "tests/rpc/rpc_fixture.h"

namespace shardmlp {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class RpcLogTest : public RpcTest {
 protected:
  RpcLogTest() {
    testing::internal::CaptureStderr();
    StartLog({.level = LogLevel::kInfo, .format = LogFormat::kText});
    Start();
  }

  // Lines so far; none is written after it.
  static std::vector<std::string> Lines() {
    StopLog();
    return absl::StrSplit(testing::internal::GetCapturedStderr(), '\n', absl::SkipEmpty());
  }
};

TEST_F(RpcLogTest, ACallThatFailsIsLoggedWithItsIdsOnce) {
  ASSERT_TRUE(Forward(ForwardCall(8, 2)).status.ok());
  engine_->FailAfter(4, Error(absl::StatusCode::kInternal, Reason::kDeviceFailed, "it broke"));
  std::vector<v1::BackwardRequest> messages = BackwardCall(8, 2);
  messages.front().mutable_header()->set_call_id(77);
  messages.front().mutable_header()->set_layer(1);
  EXPECT_FALSE(Backward(messages).status.ok());
  EXPECT_THAT(Lines(),
              ElementsAre(AllOf(HasSubstr(" error rpc failed method=Backward code=INTERNAL reason=DEVICE_FAILED "),
                                HasSubstr(" session=42 call=77 layer=1 why=\"it broke\""))));
}

}  // namespace
}  // namespace shardmlp
