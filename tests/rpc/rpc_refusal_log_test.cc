// What the log says of who may not come in: from where, and not so much that it says nothing else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/log.h"
#include "tests/rpc/raw_call.h"
#include "tests/rpc/rpc_fixture.h"

namespace shardmlp {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::Each;
using testing::HasSubstr;
using testing::Not;

constexpr char kToken[] = "correct-horse-battery";
constexpr int kFlood = 300;  // of an event a burst of 50 lines is written, then 10 a second

class RpcRefusalLogTest : public RpcTest {};

TEST_F(RpcRefusalLogTest, StrangersAreNamedByAddressAndSilenceNobody) {
  RpcServerOptions options;
  options.token_file = absl::StrCat(testing::TempDir(), "/refusal.tokens");
  std::ofstream(options.token_file) << kToken;
  testing::internal::CaptureStderr();
  StartLog({.level = LogLevel::kInfo, .format = LogFormat::kText});
  Start({}, options);
  for (int i = 0; i < kFlood; ++i) EXPECT_FALSE(RawCall(channel_, "/shardmlp.v1.Training/SealStep", {""}).status.ok());
  EXPECT_FALSE(RawCall(channel_, "/shardmlp.v1.Compute/Forward", {"\xff"}, kToken).status.ok());
  StopLog();
  const std::vector<std::string> lines =
      absl::StrSplit(testing::internal::GetCapturedStderr(), '\n', absl::SkipEmpty());
  std::vector<std::string> refused, others;
  for (const std::string& line : lines) {
    (absl::StrContains(line, "reason=UNAUTHENTICATED") ? refused : others).push_back(line);
  }
  EXPECT_LT(refused.size(), kFlood);
  EXPECT_THAT(refused, Each(AllOf(HasSubstr("rpc failed method=SealStep"), HasSubstr(" peer=ipv4:127.0.0.1:"))));
  EXPECT_THAT(others, Contains(AllOf(HasSubstr("rpc failed method=Forward"), Not(HasSubstr("peer=")))));
}

}  // namespace
}  // namespace shardmlp
