#include "server/sync/replica_rank.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

TEST(RankFromPodNameTest, TheOrdinalAtTheEnd) {
  EXPECT_EQ(RankFromPodName("shardmlp-0").value(), 0);
  EXPECT_EQ(RankFromPodName("name-3").value(), 3);
  EXPECT_EQ(RankFromPodName("my-release-shardmlp-12").value(), 12);
}

TEST(RankFromPodNameTest, ANameWithoutOneIsRefusedByName) {
  for (const char* name : {"", "shardmlp", "shardmlp-", "-3", "shardmlp-x", "shardmlp-3x", "shardmlp--1x",
                           "shardmlp-03", "shardmlp- 3", "shardmlp-+3", "shardmlp-99999999999", "shardmlp-3.svc"}) {
    const absl::StatusOr<int> rank = RankFromPodName(name);
    EXPECT_EQ(ReasonOf(rank.status()), Reason::kInvalidArgument) << name;
    EXPECT_THAT(std::string(rank.status().message()), ::testing::HasSubstr(absl::StrCat("\"", name, "\"")));
  }
}

}  // namespace
}  // namespace shardmlp
