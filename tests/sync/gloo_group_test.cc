// Ranks as threads that sum, broadcast and fail over loopback.
#include "server/sync/gloo_group.h"

#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/status.h"
#include "tests/sync/gloo_mesh.h"

namespace shardmlp::testing {
namespace {

using ::testing::HasSubstr;

// What one rank has: matrices of all kinds, with values that are exact in f32 however they are summed.
struct Holdings {
  explicit Holdings(int rank) : large(512 * 600), strided(300 * 520, -1), bias(33), doubles(70 * 1000), half(4000) {
    const auto fill = [&](auto& values, int salt) {
      for (size_t i = 0; i < values.size(); ++i) values[i] = Value(rank, salt, static_cast<int>(i));
    };
    fill(large, 1);
    for (int row = 0; row < 300; ++row) {
      for (int col = 0; col < 500; ++col) strided[row * 520 + col] = Value(rank, 2, row * 500 + col);
    }
    fill(bias, 3);
    fill(doubles, 4);
    fill(half, 5);
  }
  static int Value(int rank, int salt, int i) { return (i * 7 + salt * 1000 + rank * 31) % 2048; }

  // The last one is none to sum.
  std::vector<MatrixView> views() {
    return {{large.data(), 512, 600, DType::kF32},   {strided.data(), 300, 500, 520, DType::kF32},
            {bias.data(), 1, 33, DType::kF32},       {nullptr, 0, 0, DType::kF32},
            {doubles.data(), 70, 1000, DType::kF64}, {half.data(), 40, 100, DType::kBF16}};
  }
  std::vector<MatrixView> summed() {
    std::vector<MatrixView> all = views();
    all.pop_back();
    return all;
  }

  std::vector<float> large;
  std::vector<float> strided;
  std::vector<float> bias;
  std::vector<double> doubles;
  std::vector<uint16_t> half;
};

std::vector<Holdings> All(int size) {
  std::vector<Holdings> all;
  for (int rank = 0; rank < size; ++rank) all.emplace_back(rank);
  return all;
}

class GlooGroupTest : public ::testing::TestWithParam<int> {};

TEST_P(GlooGroupTest, EachMatrixBecomesTheSumOverAllRanks) {
  const int size = GetParam();
  const auto groups = ConnectedMesh(size);
  std::vector<Holdings> all = All(size);
  OnRanks(size, [&](int rank) {
    const absl::Status status = groups[rank]->AllReduceSum(all[rank].summed());
    EXPECT_TRUE(status.ok()) << status;
  });
  const auto sum = [&](int salt, int i) {
    int total = 0;
    for (int rank = 0; rank < size; ++rank) total += Holdings::Value(rank, salt, i);
    return total;
  };
  for (Holdings& mine : all) {
    for (size_t i = 0; i < mine.large.size(); ++i) ASSERT_EQ(mine.large[i], sum(1, i)) << i;
    for (int row = 0; row < 300; ++row) {
      for (int col = 0; col < 500; ++col) ASSERT_EQ(mine.strided[row * 520 + col], sum(2, row * 500 + col));
      for (int col = 500; col < 520; ++col) ASSERT_EQ(mine.strided[row * 520 + col], -1) << "between rows";
    }
    for (size_t i = 0; i < mine.bias.size(); ++i) ASSERT_EQ(mine.bias[i], sum(3, i));
    for (size_t i = 0; i < mine.doubles.size(); ++i) ASSERT_EQ(mine.doubles[i], sum(4, i));
  }
}

TEST_P(GlooGroupTest, SumsThatRoundAreBitIdenticalOnAllRanks) {
  const int size = GetParam();
  const auto groups = ConnectedMesh(size);
  std::vector<std::vector<float>> values(size, std::vector<float>(300001));
  OnRanks(size, [&](int rank) {
    for (size_t i = 0; i < values[rank].size(); ++i) values[rank][i] = 1.0F / static_cast<float>(i * 3 + rank + 1);
    EXPECT_TRUE(groups[rank]->AllReduceSum({MatrixView(values[rank].data(), 1, 300001, DType::kF32)}).ok());
  });
  for (int rank = 1; rank < size; ++rank) {
    EXPECT_EQ(std::memcmp(values[rank].data(), values[0].data(), values[0].size() * sizeof(float)), 0) << rank;
  }
}

TEST_P(GlooGroupTest, BroadcastGivesTheRootsBytesToAll) {
  const int size = GetParam();
  const auto groups = ConnectedMesh(size);
  for (int root = 0; root < size; ++root) {
    std::vector<Holdings> all = All(size);
    OnRanks(size, [&](int rank) { EXPECT_TRUE(groups[rank]->Broadcast(root, all[rank].views()).ok()); });
    const Holdings want(root);
    for (const Holdings& mine : all) {
      EXPECT_EQ(mine.large, want.large);
      EXPECT_EQ(mine.strided, want.strided);
      EXPECT_EQ(mine.bias, want.bias);
      EXPECT_EQ(mine.doubles, want.doubles);
      EXPECT_EQ(mine.half, want.half);
    }
  }
}

TEST_P(GlooGroupTest, AFailureOnOneRankFailsAll) {
  const int size = GetParam();
  const auto groups = ConnectedMesh(size);
  std::vector<Holdings> all = All(size);
  // All but the last wait for it; instead of coming, it aborts.
  OnRanks(size, [&](int rank) {
    if (rank == size - 1) {
      groups[rank]->Abort(absl::CancelledError("had enough"));
    } else {
      const absl::Status status = groups[rank]->AllReduceSum(all[rank].summed());
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
      EXPECT_EQ(ReasonOf(status), Reason::kReplicaLost);
      EXPECT_EQ(groups[rank]->Broadcast(0, all[rank].views()), status) << "and so do later calls";
    }
  });
  EXPECT_EQ(groups[size - 1]->AllReduceSum(all[size - 1].summed()), absl::CancelledError("had enough"));
}

INSTANTIATE_TEST_SUITE_P(Sizes, GlooGroupTest, ::testing::Values(2, 3, 4));

TEST(GlooGroupFailureTest, AbortEndsACollectiveInFlightWithItsReason) {
  const auto groups = ConnectedMesh(2);
  Holdings mine(0);
  std::thread aborts([&] { groups[0]->Abort(absl::UnavailableError("rank 1 was lost")); });
  // Rank 1 never comes, so that this ends by Abort alone, whichever is first.
  EXPECT_EQ(groups[0]->AllReduceSum(mine.summed()), absl::UnavailableError("rank 1 was lost"));
  aborts.join();
}

TEST(GlooGroupFailureTest, ARankThatNeverComesFailsTheOthersAfterTheTimeout) {
  const auto groups = ConnectedMesh(2, {.timeout = absl::Milliseconds(100)});
  Holdings mine(0);
  const absl::Status status = groups[0]->AllReduceSum(mine.summed());
  EXPECT_EQ(ReasonOf(status), Reason::kReplicaLost) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("Timed out"));
}

TEST(GlooGroupFailureTest, ADestroyedRankFailsTheOthers) {
  auto groups = ConnectedMesh(2);
  groups[1].reset();
  Holdings mine(0);
  EXPECT_EQ(ReasonOf(groups[0]->AllReduceSum(mine.summed())), Reason::kReplicaLost);
}

TEST(GlooGroupFailureTest, ConnectGivesUpInTime) {
  const GlooDevice device = OpenGlooDevice("127.0.0.1").value();
  // Of two ranks one calls and the other waits to be called, by what their ports happen to be.
  absl::Status status;
  for (int i = 0; i < 30 && status.ok(); ++i) {
    const auto groups = ListeningMesh(device, 2, {.connect_timeout = absl::Milliseconds(100)});
    status = groups[0]->Connect(PeersOf(0, groups));
  }
  EXPECT_EQ(ReasonOf(status), Reason::kReplicaLost) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("Connect timeout"));
}

TEST(GlooGroupFailureTest, AbortEndsConnect) {
  const GlooDevice device = OpenGlooDevice("127.0.0.1").value();
  const auto groups = ListeningMesh(device, 3, {.connect_timeout = absl::Hours(1)});
  std::thread aborts([&] { groups[0]->Abort(absl::UnavailableError("rank 2 was lost")); });
  EXPECT_EQ(groups[0]->Connect(PeersOf(0, groups)), absl::UnavailableError("rank 2 was lost"));
  aborts.join();
}

TEST(GlooGroupFailureTest, WrongArgumentsBreakNoGroup) {
  const auto groups = ConnectedMesh(2);
  std::vector<uint16_t> half(4);
  const MatrixView bf16(half.data(), 2, 2, DType::kBF16);
  EXPECT_EQ(ReasonOf(groups[0]->AllReduceSum({bf16})), Reason::kInvalidDType);
  EXPECT_EQ(groups[0]->Broadcast(2, {bf16}).code(), absl::StatusCode::kInvalidArgument);
  OnRanks(2, [&](int rank) { EXPECT_TRUE(groups[rank]->AllReduceSum({}).ok()); });
}

TEST(GlooDeviceTest, AnAddressOfAnotherMachineIsRefusedByName) {
  const auto device = OpenGlooDevice("192.0.2.1");
  EXPECT_EQ(device.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(device.status().message()), HasSubstr("192.0.2.1"));
}

}  // namespace
}  // namespace shardmlp::testing
