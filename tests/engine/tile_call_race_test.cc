// Calls that are cancelled, fail or are shut down at every point, and by several threads at once.
#include <atomic>
#include <latch>
#include <thread>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "server/engine/scheduler.h"
#include "server/engine/tile_call.h"
#include "tests/engine/call_harness.h"
#include "tests/engine/outcome.h"

namespace shardmlp::testing {
namespace {

constexpr int64_t kRows = 24;
constexpr int64_t kTileRows = 4;

// A whole call of six tiles in shards of 5 rows, one small action after another, with results that are kept for a
// while.
class Script {
 public:
  explicit Script(CallRig& rig) : rig_(rig) { rig_.sink.keep = true; }

  // The next action; false once there is none.
  bool Next() {
    if (Place() || End()) return true;
    for (int tries = 0; tries < 3; ++tries) {
      switch (turn_++ % 3) {
        case 0:
          if (rig_.host->Start()) return true;
          break;
        case 1:
          if (rig_.host->Finish()) return true;
          break;
        case 2:
          if (GiveBack()) return true;
          break;
      }
    }
    return false;
  }

 private:
  bool Place() {
    const int64_t begin = placed_ / 5 * 5;
    const int64_t count = std::min<int64_t>(5, kRows - begin);
    if (placed_ == kRows || over()) return false;
    const int64_t placed = rig_.Place(begin, count, placed_ - begin);
    placed_ += placed;
    return placed > 0;
  }
  bool End() {
    if (placed_ < kRows || ended_ || over()) return false;
    ended_ = true;
    EXPECT_TRUE(Succeeds(rig_.call->End(kRows)));
    return true;
  }
  bool GiveBack() {
    if (rig_.sink.held() == 0) return false;
    rig_.sink.GiveBack();
    return true;
  }
  bool over() const { return rig_.host->finished_calls > 0; }

  CallRig& rig_;
  int turn_ = 0;
  int64_t placed_ = 0;
  bool ended_ = false;
};

int ScriptLength(Pass pass) {
  CallRig rig(pass, kRows, kTileRows);
  Script script(rig);
  int length = 0;
  while (script.Next()) ++length;
  EXPECT_TRUE(Succeeds(rig.sink.summary));
  return length;
}

int SinkCalls(Pass pass) {
  CallRig rig(pass, kRows, kTileRows);
  Script script(rig);
  while (script.Next()) {
  }
  return rig.sink.total();
}

class CallRaceTest : public ::testing::TestWithParam<Pass> {};

TEST_P(CallRaceTest, CancelledBetweenAnyTwoActionsItIsSilent) {
  const int length = ScriptLength(GetParam());
  ASSERT_GT(length, 20);
  for (int cut = 0; cut <= length; ++cut) {
    CallRig rig(GetParam(), kRows, kTileRows);
    Script script(rig);
    for (int i = 0; i < cut; ++i) ASSERT_TRUE(script.Next());
    rig.call->Cancel();
    const int before = rig.sink.total();
    rig.call->Cancel();
    while (script.Next()) {
    }
    EXPECT_EQ(rig.sink.total(), before) << "cancelled after " << cut << " actions";
    EXPECT_EQ(rig.host->finished_calls, 1) << "cancelled after " << cut << " actions";
  }
}

TEST_P(CallRaceTest, CancelledFromInsideAnySinkMethodItIsSilent) {
  const int sink_calls = SinkCalls(GetParam());
  ASSERT_GT(sink_calls, 8);
  for (int nth = 0; nth < sink_calls; ++nth) {
    CallRig rig(GetParam(), kRows, kTileRows);
    rig.sink.react_after = nth;
    rig.sink.react = [&] { rig.call->Cancel(); };
    Script script(rig);
    while (script.Next()) {
    }
    EXPECT_EQ(rig.sink.total(), nth + 1);
    EXPECT_EQ(rig.host->finished_calls, 1);
  }
}

TEST_P(CallRaceTest, FailedBetweenAnyTwoActionsItSaysSoOnce) {
  const int length = ScriptLength(GetParam());
  for (int cut = 0; cut < length; ++cut) {
    CallRig rig(GetParam(), kRows, kTileRows);
    Script script(rig);
    for (int i = 0; i < cut; ++i) ASSERT_TRUE(script.Next());
    const bool was_over = rig.sink.finishes > 0;
    rig.call->Fail(ShuttingDown());
    rig.call->Fail(ShuttingDown());
    const int before = rig.sink.total();
    while (script.Next()) {
    }
    EXPECT_EQ(rig.sink.total(), before);
    EXPECT_EQ(rig.sink.finishes, 1);
    EXPECT_EQ(Succeeds(rig.sink.summary), was_over) << "failed after " << cut << " actions";
    EXPECT_EQ(rig.host->finished_calls, 1);
  }
}

TEST_P(CallRaceTest, ResultsOutliveTheHost) {
  for (const int cut : {6, 12, 18}) {
    CallRig rig(GetParam(), kRows, kTileRows);
    Script script(rig);
    for (int i = 0; i < cut; ++i) ASSERT_TRUE(script.Next());
    rig.call->Fail(ShuttingDown());
    rig.host.reset();
    while (rig.sink.held() > 0) rig.sink.GiveBack();
  }
}

TEST_P(CallRaceTest, ALaneGoesBackOnceTheCallIsOverAndItsLastResultIsSent) {
  CallRig rig(GetParam(), kTileRows, kTileRows);
  rig.sink.keep = true;
  rig.Send(kTileRows);
  ASSERT_TRUE(Succeeds(rig.sink.summary));
  EXPECT_EQ(rig.lanes->lanes_in_use(), 1) << "its result is being sent";
  rig.sink.GiveBack();
  EXPECT_EQ(rig.lanes->lanes_in_use(), 0) << "whoever keeps the call";
}

TEST_P(CallRaceTest, ALaneIsFreeByTheTimeTheSinkIsToldSo) {
  for (const bool admitted : {false, true}) {
    for (const bool computed : {false, true}) {
      CallRig rig(GetParam(), kTileRows, kTileRows);
      if (!admitted) rig.host->admission = absl::AbortedError("the attempt is over");
      if (!computed) rig.host->device = absl::InternalError("the device failed");
      int64_t in_use = -1;
      rig.sink.react_after = admitted && computed ? 1 : 0;
      rig.sink.react = [&] { in_use = rig.lanes->lanes_in_use(); };
      rig.Send(kTileRows);
      ASSERT_EQ(rig.sink.finishes, 1);
      EXPECT_EQ(in_use, 0) << "the next call may come at once";
    }
  }
}

TEST_P(CallRaceTest, ALaneStaysForTilesThatAreOnTheDevice) {
  CallRig rig(GetParam(), 2 * kTileRows, kTileRows);
  rig.Place(0, 2 * kTileRows);
  ASSERT_TRUE(rig.host->Start());
  rig.call->Cancel();
  EXPECT_EQ(rig.lanes->lanes_in_use(), 1) << "the device may still write into it";
  ASSERT_TRUE(rig.host->Finish());
  EXPECT_EQ(rig.lanes->lanes_in_use(), 0) << "a tile that has not begun is none";
}

TEST_P(CallRaceTest, OutputsGivenBackByTwoThreadsKeepTilesInOrder) {
  for (int round = 0; round < 300; ++round) {
    CallRig rig(GetParam(), 4, 1);
    rig.sink.keep = true;
    rig.Place(0, 4);
    rig.host->Run();
    rig.Place(0, 4, 2);
    ASSERT_EQ(rig.sink.held(), 2u);
    std::shared_ptr<void> first = rig.sink.Take();
    std::shared_ptr<void> second = rig.sink.Take();
    std::latch both(2);
    std::thread other([&] {
      both.arrive_and_wait();
      first.reset();
    });
    both.arrive_and_wait();
    second.reset();
    other.join();
    EXPECT_TRUE(Succeeds(rig.call->End(4)));
    rig.host->Run();
    ASSERT_TRUE(Succeeds(rig.sink.summary));
  }
}

TEST_P(CallRaceTest, CancelWaitsForASinkMethodOnAnotherThread) {
  CallRig rig(GetParam(), kTileRows, kTileRows);
  absl::Notification inside, cancelled;
  bool waited = false;
  rig.sink.react = [&] {
    inside.Notify();
    // Until Cancel has marked the call as over; then it must not return before this does.
    while (rig.TryPlace(0, kTileRows, kTileRows, std::string(kTileRows * kHidden * 8, 'x'),
                        std::string(kTileRows * kOutput * 8, 'y'))
               .ok()) {
      std::this_thread::yield();
    }
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    waited = !cancelled.HasBeenNotified();
  };
  rig.Place(0, kTileRows);
  std::thread device([&] { rig.host->Run(); });
  inside.WaitForNotification();
  rig.call->Cancel();
  cancelled.Notify();
  device.join();
  EXPECT_TRUE(waited);
  EXPECT_EQ(rig.sink.total(), 1);
}

INSTANTIATE_TEST_SUITE_P(Passes, CallRaceTest, ::testing::Values(Pass::kForward, Pass::kBackward));

}  // namespace
}  // namespace shardmlp::testing
