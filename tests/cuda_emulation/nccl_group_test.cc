// NCCL's replica group over the emulation: N ranks as threads, each with a GPU of its own.
#include "server/sync/nccl_group.h"

#include <functional>
#include <map>
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

// Where the threads of a test meet.
class Meeting {
 public:
  // Brings rank 0's bytes to all that ask for them.
  std::string operator()(const std::string& bytes) {
    absl::MutexLock lock(&mutex_);
    if (!bytes.empty()) bytes_ = bytes;
    const auto there = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return !bytes_.empty(); };
    mutex_.Await(absl::Condition(&there));
    return bytes_;
  }
  // Returns once `size` threads have called it.
  void AwaitAll(int size) {
    absl::MutexLock lock(&mutex_);
    ++arrived_;
    const auto all = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return arrived_ >= size; };
    mutex_.Await(absl::Condition(&all));
  }

 private:
  absl::Mutex mutex_;
  std::string bytes_ ABSL_GUARDED_BY(mutex_);
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
    Meeting meeting;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank, options]() mutable {
        const auto backend = MakeCudaBackend({.device = rank}).value();
        options.rank = options.device = rank;
        options.size = size;
        const auto group = MakeNcclGroup(options, std::ref(meeting));
        EXPECT_TRUE(group.ok()) << group.status();
        meeting.AwaitAll(size);
        if (group.ok()) work({rank, *backend, **group});
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
  ExpectLost(MakeNcclGroup({.rank = 0, .size = 2, .connect_timeout = absl::Milliseconds(50)},
                           [](const std::string& bytes) { return bytes; })
                 .status(),
             "connecting of 2 replicas did not end in time");
}

TEST_P(NcclGroupTest, WhatIsNoGroupIsRefused) {
  const auto made = [](const NcclOptions& options, const std::string& bytes) {
    return MakeNcclGroup(options, [&](const std::string&) { return bytes; }).status();
  };
  EXPECT_EQ(made({.rank = 0, .size = 1}, "").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(made({.rank = 2, .size = 2}, "").code(), absl::StatusCode::kInvalidArgument);
  ExpectLost(made({.rank = 1, .size = 2}, "short"), "rank 0's id has 5 bytes, expected 128");
  const absl::Status lost = absl::UnavailableError("no rank 0");
  EXPECT_EQ(MakeNcclGroup({.rank = 1, .size = 2}, [&](const std::string&) { return lost; }).status(), lost);
}

INSTANTIATE_TEST_SUITE_P(Seeds, NcclGroupTest, ::testing::Values(0, 1, 2, 3));

}  // namespace
}  // namespace shardmlp::testing
