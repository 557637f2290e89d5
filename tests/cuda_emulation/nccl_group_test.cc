// NCCL's replica group over the emulation: N ranks as threads, each with a GPU of its own.
#include "server/sync/nccl_group.h"

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/status.h"
#include "tests/cuda_emulation/emulation.h"
#include "tests/kernels/device_matrix.h"

namespace shardmlp::testing {
namespace {

using ::testing::HasSubstr;

// Where the threads of a test meet: each says what it has for the others, and gets what they have for it.
class Meeting {
 public:
  explicit Meeting(int size) : said_(size) {}

  // Returns once all have said, in each rank's place what it said for `rank`.
  std::vector<std::string> Exchange(int rank, const std::vector<std::string>& said) {
    absl::MutexLock lock(&mutex_);
    said_[rank] = said;
    ++arrived_;
    const auto all = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return arrived_ >= static_cast<int>(said_.size()); };
    mutex_.Await(absl::Condition(&all));
    std::vector<std::string> heard;
    for (const std::vector<std::string>& from : said_) heard.push_back(from[rank]);
    return heard;
  }

 private:
  absl::Mutex mutex_;
  std::vector<std::vector<std::string>> said_ ABSL_GUARDED_BY(mutex_);
  int arrived_ ABSL_GUARDED_BY(mutex_) = 0;
};

// One rank, for a thread of its own.
struct Rank {
  int rank;
  Backend& backend;
  ReplicaGroup& group;
};

class NcclGroupTest : public ::testing::TestWithParam<uint64_t> {
 protected:
  NcclGroupTest() { emulation::SetSeed(GetParam()); }
  ~NcclGroupTest() override {
    emulation::Reset();
    EXPECT_EQ(emulation::live_object_count(), 0);
  }

  // Runs `work` on `size` ranks at once, once all are connected.
  static void OnRanks(int size, NcclOptions options, const std::function<void(const Rank&)>& work) {
    Meeting found(size), connected(size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank, options]() mutable {
        const auto backend = MakeCudaBackend({.device = rank}).value();
        options.device = rank;
        const auto group = NcclTransport(options)->listen(rank, size).value();
        const absl::Status status = group->Connect(found.Exchange(rank, group->addresses()));
        EXPECT_EQ(status, absl::OkStatus());
        connected.Exchange(rank, group->addresses());
        if (status.ok()) work({rank, *backend, *group});
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  static void OnRanks(int size, const std::function<void(const Rank&)>& work) { OnRanks(size, NcclOptions(), work); }

  static void ExpectLost(const absl::Status& status, const std::string& words) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_EQ(ReasonOf(status), Reason::kReplicaLost) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  }
};

TEST_P(NcclGroupTest, EveryRankGetsTheSumToTheBit) {
  for (const int size : {2, 3, 4}) {
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      std::vector<Dense> large(size), small(size);
      OnRanks(size, [&](const Rank& r) {
        EXPECT_EQ(r.group.rank(), r.rank);
        EXPECT_EQ(r.group.size(), size);
        EXPECT_TRUE(r.group.device_memory());
        const DeviceMatrix a(r.backend, RandomDense(40, 30, r.rank), dtype);
        const DeviceMatrix b(r.backend, RandomDense(1, 7, 10 + r.rank), dtype);
        const MatrixView none(nullptr, 0, 5, dtype);
        for (int i = 0; i < 2; ++i) ASSERT_TRUE(r.group.AllReduceSum({a.view(), none, b.view()}).ok());
        large[r.rank] = a.Read();
        small[r.rank] = b.Read();
      });
      Dense expected(40, 30);
      for (int rank = 0; rank < size; ++rank) {
        const Dense given = RandomDense(40, 30, rank);
        for (size_t i = 0; i < given.values.size(); ++i) expected.values[i] += size * given.values[i];
        EXPECT_EQ(large[rank], large[0]);
        EXPECT_EQ(small[rank], small[0]);
      }
      EXPECT_LE(RelativeDifference(large[0], expected), dtype == DType::kF64 ? 1e-15 : 1e-6);
    }
  }
}

TEST_P(NcclGroupTest, ABroadcastIsTheRootsInAnyDType) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    std::vector<Dense> got(3);
    OnRanks(3, [&](const Rank& r) {
      const DeviceMatrix m(r.backend, RandomDense(5, 9, r.rank), dtype);
      ASSERT_TRUE(r.group.Broadcast(2, {m.view()}).ok());
      got[r.rank] = m.Read();
    });
    EXPECT_EQ(got[0], got[2]);
    EXPECT_EQ(got[1], got[2]);
    EXPECT_LE(RelativeDifference(got[0], RandomDense(5, 9, 2)), 1.0 / 256);
  }
}

TEST_P(NcclGroupTest, WhatNoRankCanSumIsRefusedAndTheGroupGoesOn) {
  OnRanks(2, [&](const Rank& r) {
    const DeviceMatrix padded(r.backend, Dense(3, 4, 1), DType::kF32, 2);
    const DeviceMatrix bf16(r.backend, Dense(3, 4, 1), DType::kBF16), good(r.backend, Dense(3, 4, 1), DType::kF32);
    EXPECT_EQ(ReasonOf(r.group.AllReduceSum({padded.view()})), Reason::kInvalidShape);
    EXPECT_EQ(ReasonOf(r.group.AllReduceSum({bf16.view()})), Reason::kInvalidDType);
    EXPECT_EQ(ReasonOf(r.group.Broadcast(2, {good.view()})), Reason::kInvalidArgument);
    ASSERT_TRUE(r.group.AllReduceSum({good.view()}).ok());
    EXPECT_EQ(good.Read(), Dense(3, 4, 2));
  });
}

TEST_P(NcclGroupTest, AbortEndsACollectiveThatIsWaitedForAndEveryLaterOne) {
  absl::Notification aborted;
  OnRanks(2, [&](const Rank& r) {
    if (r.rank == 1) return aborted.WaitForNotification();  // never joins
    const DeviceMatrix m(r.backend, Dense(3, 4, 1), DType::kF32);
    std::thread other([&] { r.group.Abort(absl::AbortedError("rank 1 is gone")); });
    EXPECT_EQ(r.group.AllReduceSum({m.view()}), absl::AbortedError("rank 1 is gone"));
    other.join();
    EXPECT_EQ(r.group.Broadcast(0, {m.view()}), absl::AbortedError("rank 1 is gone"));
    aborted.Notify();
  });
}

TEST_P(NcclGroupTest, AHungPeerEndsACollectiveInTime) {
  absl::Notification ended;
  OnRanks(2, {.timeout = absl::Milliseconds(50)}, [&](const Rank& r) {
    if (r.rank == 1) return ended.WaitForNotification();
    const DeviceMatrix m(r.backend, Dense(3, 4, 1), DType::kF32);
    ExpectLost(r.group.AllReduceSum({m.view()}), "a collective of 2 replicas did not end in time; rank 0 gives up");
    ExpectLost(r.group.AllReduceSum({m.view()}), "did not end in time");
    ended.Notify();
  });
}

// The others hear of a rank that is gone, and are not left with a part of a sum.
TEST_P(NcclGroupTest, APeerThatGoesAwayEndsACollectiveOfTheOthers) {
  absl::BlockingCounter summing(3);
  OnRanks(3, [&](const Rank& r) {
    const DeviceMatrix m(r.backend, Dense(3, 4, 1), DType::kF32);
    ASSERT_TRUE(r.group.AllReduceSum({m.view()}).ok());
    summing.DecrementCount();
    if (r.rank == 2) summing.Wait();
    if (r.rank == 2) return r.group.Abort(absl::AbortedError("enough"));
    ExpectLost(r.group.AllReduceSum({m.view()}), "ncclRemoteError");
    EXPECT_EQ(m.Read(), Dense(3, 4, 3));
  });
}

TEST_P(NcclGroupTest, RanksThatDisagreeAboutTheShapeAreToldSo) {
  OnRanks(2, [&](const Rank& r) {
    const DeviceMatrix m(r.backend, Dense(1, 4 + r.rank, 1), DType::kF32);
    EXPECT_FALSE(r.group.AllReduceSum({m.view()}).ok());
  });
  EXPECT_THAT(emulation::TakeFaults(), ::testing::ElementsAre(HasSubstr("different collectives")));
}

TEST_P(NcclGroupTest, NoPeerInTimeIsNamed) {
  const auto group = NcclTransport({.connect_timeout = absl::Milliseconds(50)})->listen(0, 2).value();
  const absl::Status status = group->Connect({"", ""});
  ExpectLost(status, "connecting of 2 replicas did not end in time");
  EXPECT_EQ(group->failure(), status);
}

TEST_P(NcclGroupTest, AbortEndsConnecting) {
  const auto group = NcclTransport({})->listen(0, 2).value();
  std::thread other([&] { group->Abort(absl::AbortedError("rank 1 is gone")); });
  EXPECT_EQ(group->Connect({"", ""}), absl::AbortedError("rank 1 is gone"));
  other.join();
}

TEST_P(NcclGroupTest, WhatIsNoGroupIsRefused) {
  const Transport nccl = NcclTransport({}).value();
  EXPECT_EQ(nccl.listen(0, 1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(nccl.listen(2, 2).status().code(), absl::StatusCode::kInvalidArgument);
  const auto group = nccl.listen(1, 2).value();
  ExpectLost(group->Connect({"short", ""}), "rank 0's id has 5 bytes, expected 128");
  ExpectLost(group->Connect({}), "rank 0's id has 0 bytes");
}

INSTANTIATE_TEST_SUITE_P(Seeds, NcclGroupTest, ::testing::Values(0, 1, 2, 3));

}  // namespace
}  // namespace shardmlp::testing
