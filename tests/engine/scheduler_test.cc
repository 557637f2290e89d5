#include "server/engine/scheduler.h"

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/outcome.h"

namespace shardmlp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// What happened, in order.
class Log {
 public:
  void Add(const std::string& what) {
    absl::MutexLock lock(&mutex_);
    lines_.push_back(what);
  }
  std::vector<std::string> lines() const {
    absl::MutexLock lock(&mutex_);
    return lines_;
  }

 private:
  mutable absl::Mutex mutex_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(mutex_);
};

class LoggingTile final : public TileJob {
 public:
  LoggingTile(
      Log& log, std::string name, absl::AnyInvocable<void()> on_start = [] {})
      : log_(log), name_(std::move(name)), on_start_(std::move(on_start)) {}
  ~LoggingTile() override {
    if (!finished_) log_.Add(absl::StrCat("drop ", name_));
  }
  void Start() override {
    log_.Add(absl::StrCat("start ", name_));
    on_start_();
  }
  void Finish() override {
    log_.Add(absl::StrCat("finish ", name_));
    finished_ = true;
  }

 private:
  Log& log_;
  const std::string name_;
  absl::AnyInvocable<void()> on_start_;
  bool finished_ = false;
};

class SchedulerTest : public ::testing::Test {
 protected:
  void Start(int depth) { scheduler_ = std::make_unique<Scheduler>(depth); }

  void Tile(int64_t session, const std::string& name) {
    scheduler_->SubmitTile(session, std::make_unique<LoggingTile>(log_, name));
  }
  void Control(const std::string& name) {
    scheduler_->SubmitControl(
        [this, name](const absl::Status& turn) { log_.Add(turn.ok() ? name : absl::StrCat("refuse ", name)); });
  }

  void TensorJob(
      const std::string& name, absl::AnyInvocable<void()> on_run = [] {}) {
    ++tensor_jobs_;
    scheduler_->SubmitTensorJob([this, name, on_run = std::move(on_run)](const absl::Status& turn) mutable {
      log_.Add(turn.ok() ? name : absl::StrCat("refuse ", name));
      on_run();
      --tensor_jobs_;
    });
  }

  // Keeps the device thread busy until Go, so that what is submitted meanwhile is all there when it chooses.
  void Hold() {
    scheduler_->SubmitControl([this](const absl::Status&) { go_.WaitForNotification(); });
  }
  // Lets it go on, and returns what happened until it had nothing left to do.
  std::vector<std::string> Go() {
    go_.Notify();
    return Idle();
  }
  std::vector<std::string> Idle() {
    while (tensor_jobs_ > 0 || scheduler_->queued_tile_count() > 0) std::this_thread::yield();
    // A control job runs when no tile is in flight.
    absl::Notification idle;
    scheduler_->SubmitControl([&](const absl::Status&) { idle.Notify(); });
    idle.WaitForNotification();
    return log_.lines();
  }

  Log log_;
  absl::Notification go_;
  std::atomic<int> tensor_jobs_ = 0;      // that have not run
  std::unique_ptr<Scheduler> scheduler_;  // last, so that it stops first
};

TEST_F(SchedulerTest, ATileIsStartedAndFinished) {
  for (int depth = 1; depth <= 2; ++depth) {
    Log log;
    Scheduler scheduler(depth);
    absl::Notification started;
    scheduler.SubmitTile(1, std::make_unique<LoggingTile>(log, "a", [&] { started.Notify(); }));
    started.WaitForNotification();
    absl::Notification idle;  // at depth 2 a lone tile must not wait for a second
    scheduler.SubmitControl([&](const absl::Status&) { idle.Notify(); });
    idle.WaitForNotification();
    EXPECT_THAT(log.lines(), ElementsAre("start a", "finish a"));
  }
}

TEST_F(SchedulerTest, SessionsTakeTurnsTileByTile) {
  Start(1);
  Hold();
  for (const char* name : {"a1", "a2", "a3"}) Tile(1, name);
  Tile(2, "b1");
  for (const char* name : {"c1", "c2"}) Tile(3, name);
  EXPECT_EQ(scheduler_->queued_tile_count(), 6);
  EXPECT_THAT(Go(), ElementsAre("start a1", "finish a1", "start b1", "finish b1", "start c1", "finish c1", "start a2",
                                "finish a2", "start c2", "finish c2", "start a3", "finish a3"));
  EXPECT_EQ(scheduler_->queued_tile_count(), 0);
}

TEST_F(SchedulerTest, ASessionThatComesLaterWaitsForOneTileOfEachAndNotForAll) {
  Start(1);
  Hold();
  scheduler_->SubmitTile(1, std::make_unique<LoggingTile>(log_, "a1", [this] { Tile(2, "b1"); }));
  for (const char* name : {"a2", "a3", "a4"}) Tile(1, name);
  const std::vector<std::string> log = Go();
  EXPECT_THAT(std::vector(log.begin(), log.begin() + 6),
              ElementsAre("start a1", "finish a1", "start a2", "finish a2", "start b1", "finish b1"));
}

TEST_F(SchedulerTest, AtDepthTwoATileIsStartedBeforeTheOneAheadIsFinished) {
  Start(2);
  Hold();
  for (const char* name : {"a", "b", "c"}) Tile(1, name);
  EXPECT_THAT(Go(), ElementsAre("start a", "start b", "finish a", "start c", "finish b", "finish c"));
}

TEST_F(SchedulerTest, ControlJobsGoAheadOfTilesInTheirOwnOrder) {
  Start(2);
  Hold();
  Tile(1, "a");
  Control("sum");
  Tile(2, "b");
  Control("apply");
  EXPECT_THAT(Go(), ElementsAre("sum", "apply", "start a", "start b", "finish a", "finish b"));
}

TEST_F(SchedulerTest, TensorJobsTakeTurnsWithTheTilesHoweverManyThereAre) {
  Start(1);
  Hold();
  for (const char* name : {"read 1", "read 2", "read 3"}) TensorJob(name);
  for (const char* name : {"a1", "a2"}) Tile(1, name);
  Tile(2, "b1");
  EXPECT_THAT(Go(), ElementsAre("read 1", "start a1", "finish a1", "start b1", "finish b1", "read 2", "start a2",
                                "finish a2", "read 3"));
}

TEST_F(SchedulerTest, ATileThatComesLaterWaitsForOneTensorJob) {
  Start(1);
  Hold();
  TensorJob("read 1", [this] { Tile(1, "a"); });
  for (const char* name : {"read 2", "read 3"}) TensorJob(name);
  EXPECT_THAT(Go(), ElementsAre("read 1", "read 2", "start a", "finish a", "read 3"));
}

TEST_F(SchedulerTest, ControlJobsGoAheadOfTensorJobs) {
  Start(1);
  Hold();
  TensorJob("read");
  Tile(1, "a");
  Control("sum");
  EXPECT_THAT(Go(), ElementsAre("sum", "read", "start a", "finish a"));
}

TEST_F(SchedulerTest, ATensorJobRunsWhileNoTileIsInFlight) {
  Start(2);
  Hold();
  Tile(1, "a");
  TensorJob("read");
  Tile(1, "b");
  EXPECT_THAT(Go(), ElementsAre("start a", "finish a", "read", "start b", "finish b"));
}

TEST_F(SchedulerTest, AControlJobRunsWhileNoTileIsInFlight) {
  Start(2);
  Hold();
  scheduler_->SubmitTile(1, std::make_unique<LoggingTile>(log_, "a", [this] { Control("sum"); }));
  Tile(1, "b");
  EXPECT_THAT(Go(), ElementsAre("start a", "finish a", "sum", "start b", "finish b"));
}

TEST_F(SchedulerTest, AControlJobMaySubmitAnother) {
  Start(1);
  Hold();
  scheduler_->SubmitControl([this](const absl::Status&) {
    log_.Add("first");
    Control("second");
  });
  Tile(1, "a");
  EXPECT_THAT(Go(), ElementsAre("first", "second", "start a", "finish a"));
}

class StoppingTest : public SchedulerTest {
 protected:
  // Stops the scheduler on a thread of its own, and returns once it refuses jobs; it ends after Go.
  std::thread StopMeanwhile() {
    std::thread stopper([this] { scheduler_->Stop(); });
    for (std::atomic<bool> refused = false; !refused;) {
      auto shared = std::make_shared<std::atomic<bool>>(false);
      scheduler_->SubmitControl([shared](const absl::Status&) { *shared = true; });
      refused = shared->load();
      std::this_thread::yield();
    }
    return stopper;
  }
};

TEST_F(StoppingTest, WhatHasStartedIsFinishedAndTheRestIsDroppedOrRefused) {
  Start(2);
  absl::Notification started;
  scheduler_->SubmitTile(1, std::make_unique<LoggingTile>(log_, "a", [&] {
                           started.Notify();
                           go_.WaitForNotification();
                         }));
  started.WaitForNotification();
  Tile(1, "b");
  Tile(2, "c");
  Control("sum");
  TensorJob("read");
  std::thread stopper = StopMeanwhile();
  EXPECT_THAT(log_.lines(), ElementsAre("start a"));
  go_.Notify();
  stopper.join();
  EXPECT_THAT(log_.lines(),
              ::testing::UnorderedElementsAre("start a", "finish a", "refuse sum", "refuse read", "drop b", "drop c"));
  EXPECT_EQ(scheduler_->queued_tile_count(), 0);
}

TEST_F(StoppingTest, AfterwardsJobsAreRefusedAtOnce) {
  Start(1);
  scheduler_->Stop();
  scheduler_->Stop();
  absl::Status turn;
  scheduler_->SubmitControl([&](absl::Status given) { turn = std::move(given); });
  EXPECT_TRUE(Fails(turn, absl::StatusCode::kUnavailable, Reason::kDraining));
  Tile(1, "a");
  EXPECT_THAT(log_.lines(), ElementsAre("drop a"));
}

TEST_F(StoppingTest, EveryJobOfManyThreadsEndsOnce) {
  constexpr int kThreads = 4;
  constexpr int kJobs = 500;
  std::atomic<int> answered = 0;
  {
    Scheduler scheduler(2);
    std::atomic<int> submitted = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < kJobs; ++i) {
          scheduler.SubmitTile(t, std::make_unique<LoggingTile>(log_, ""));
          scheduler.SubmitControl([&](const absl::Status&) { ++answered; });
          ++submitted;
        }
      });
    }
    while (submitted < kThreads * kJobs / 2) std::this_thread::yield();
    scheduler.Stop();
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(answered, kThreads * kJobs);
  int starts = 0, finishes = 0, drops = 0;
  for (const std::string& line : log_.lines()) {
    starts += line == "start ";
    finishes += line == "finish ";
    drops += line == "drop ";
  }
  EXPECT_EQ(starts, finishes);
  EXPECT_EQ(finishes + drops, kThreads * kJobs);
}

}  // namespace
}  // namespace shardmlp::testing
