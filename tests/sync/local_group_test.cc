// The group of one, by ReplicaGroup's contract.
#include <vector>

#include "gtest/gtest.h"
#include "server/sync/replica_group.h"

namespace shardmlp {
namespace {

// Two matrices of a group's size: what one rank has.
struct Matrices {
  std::vector<float> a = {1, -2.5F, 3, 4, 5, 6};  // [2, 3]
  std::vector<double> b = {7, 8};                 // [1, 2]
  std::vector<MatrixView> views = {{a.data(), 2, 3, DType::kF32}, {b.data(), 1, 2, DType::kF64}};
};

TEST(LocalGroupTest, ItIsRankZeroOfOneAndTakesWhateverMemoryThereIs) {
  const auto group = MakeLocalGroup();
  EXPECT_EQ(group->rank(), 0);
  EXPECT_EQ(group->size(), 1);
  EXPECT_TRUE(group->device_memory()) << "it touches none, so nothing need be copied for it";
}

TEST(LocalGroupTest, TheSumOverOneRankIsWhatItHas) {
  const auto group = MakeLocalGroup();
  Matrices mine;
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(group->AllReduceSum(mine.views).ok());
  EXPECT_EQ(mine.a, Matrices().a);
  EXPECT_EQ(mine.b, Matrices().b);
  EXPECT_TRUE(group->AllReduceSum({}).ok());
}

TEST(LocalGroupTest, TheRootsMatricesAreItsOwn) {
  const auto group = MakeLocalGroup();
  Matrices mine;
  EXPECT_TRUE(group->Broadcast(0, mine.views).ok());
  EXPECT_EQ(mine.a, Matrices().a);
  EXPECT_EQ(mine.b, Matrices().b);
}

TEST(LocalGroupTest, ThereIsNoOtherRoot) {
  const auto group = MakeLocalGroup();
  Matrices mine;
  for (const int root : {-1, 1}) {
    EXPECT_EQ(group->Broadcast(root, mine.views).code(), absl::StatusCode::kInvalidArgument) << root;
  }
  EXPECT_TRUE(group->Broadcast(0, mine.views).ok()) << "a wrong argument breaks no group";
}

TEST(LocalGroupTest, OnceAbortedEveryCollectiveFailsWithTheFirstReason) {
  const auto group = MakeLocalGroup();
  Matrices mine;
  group->Abort(absl::UnavailableError("rank 1 was lost"));
  group->Abort(absl::InternalError("too late"));
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(group->AllReduceSum(mine.views), absl::UnavailableError("rank 1 was lost"));
    EXPECT_EQ(group->Broadcast(0, mine.views), absl::UnavailableError("rank 1 was lost"));
  }
  EXPECT_EQ(mine.a, Matrices().a);
  EXPECT_TRUE(MakeLocalGroup()->AllReduceSum(mine.views).ok()) << "the owner forms a new group";
}

}  // namespace
}  // namespace shardmlp
