// The end of an engine: whatever is open, queued or waiting ends, nothing hangs, and what was answered stays readable.
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "tests/engine/bytes.h"
#include "tests/engine/lazy_device.h"
#include "tests/engine/outcome.h"
#include "tests/engine/trainer.h"
#include "tests/kernels/layer.h"

namespace shardmlp::testing {
namespace {

constexpr int64_t kTileRows = 4;

template <typename T>
::testing::AssertionResult ShutDown(const T& result) {
  return Fails(result, absl::StatusCode::kUnavailable, Reason::kDraining);
}

// For what the engine may have got to before it stopped.
template <typename T>
::testing::AssertionResult EndedOrShutDown(const T& result) {
  return result.ok() ? Succeeds(result) : ShutDown(result);
}

// Keeps the device thread busy from its making until Release.
class HeldDevice {
 public:
  explicit HeldDevice(Engine& engine) {
    engine.ReadTensor(0, 0, 1, [this](const absl::StatusOr<TensorRows>&) {
      held_.Notify();
      released_.WaitForNotification();
    });
    held_.WaitForNotification();
  }
  void Release() { released_.Notify(); }

 private:
  absl::Notification held_, released_;
};

class ShutdownTest : public ::testing::Test {
 protected:
  const TinyModel model_{{OddMlp()}};
  TestEngine engine_{model_, TilesOf(kTileRows, model_)};
  const Dense x_ = RandomDense(20, 13, 1);
  const Dense dy_ = RandomDense(20, 7, 2);
};

TEST_F(ShutdownTest, CallsInEveryStateEnd) {
  Trainer trainer(*engine_);
  const auto empty = trainer.Start(trainer.ForwardHeader(0, 20), x_);
  const auto half_a_tile = trainer.Start(trainer.BackwardHeader(0, 20), x_, dy_);
  ASSERT_TRUE(Succeeds(half_a_tile->Send(2)));
  const auto unread = trainer.Start(trainer.ForwardHeader(0, 20), x_);
  unread->StopReading();
  ASSERT_TRUE(Succeeds(unread->Send(4 * kTileRows)));
  unread->WaitForRows(2 * kTileRows);
  const auto without_end = trainer.Start(trainer.ForwardHeader(0, kTileRows), RowsOf(x_, 0, kTileRows));
  ASSERT_TRUE(Succeeds(without_end->Send(kTileRows)));
  without_end->WaitForRows(kTileRows);
  const auto ended = trainer.Start(trainer.ForwardHeader(0, 20), x_);
  ASSERT_TRUE(Succeeds(ended->SendAll()));
  ASSERT_TRUE(Succeeds(ended->Wait()));
  EXPECT_EQ(engine_->open_call_count(), 4);

  engine_->Shutdown();
  EXPECT_EQ(engine_->open_call_count(), 0);
  for (const auto* call : {&empty, &half_a_tile, &unread, &without_end}) EXPECT_TRUE(ShutDown((*call)->Wait()));
  engine_->Shutdown();
}

TEST_F(ShutdownTest, WhatIsQueuedForTheDeviceEnds) {
  Trainer trainer(*engine_), reader(*engine_, 0, 1, SessionRole::kRead);
  trainer.Backward(0, x_, dy_);
  HeldDevice device(*engine_);
  std::vector<std::unique_ptr<RunningCall>> calls;
  for (int i = 0; i < 4; ++i) {
    calls.push_back(reader.Start(reader.ForwardHeader(0, 20), x_));
    ASSERT_TRUE(Succeeds(calls.back()->Send(2 * kTileRows)));
  }
  const Reply<SealResult> seal = trainer.StartSeal();
  Reply<TensorRows> rows;
  engine_->ReadTensor(0, 0, 1, rows.done());
  Reply<std::vector<uint64_t>> checksums;
  engine_->Checksums(checksums.done());

  std::thread shutdown([&] { engine_->Shutdown(); });
  EXPECT_TRUE(ShutDown(seal.Wait())) << "it waits for nothing on the device";
  device.Release();
  shutdown.join();
  EXPECT_TRUE(EndedOrShutDown(rows.Wait()));
  EXPECT_TRUE(EndedOrShutDown(checksums.Wait()));
  for (const auto& call : calls) EXPECT_TRUE(ShutDown(call->Wait())) << "none was sent whole";
}

TEST_F(ShutdownTest, SealsThatWaitForOtherTrainersEnd) {
  Trainer first(*engine_, 0, 3), second(*engine_, 1, 3);
  const Reply<SealResult> one = first.StartSeal(), two = second.StartSeal();
  engine_->Shutdown();
  for (const auto* seal : {&one, &two}) EXPECT_TRUE(ShutDown(seal->Wait()));
}

TEST_F(ShutdownTest, ADrainWaitsUntilAllHaveHeardWhatBecameOfASealedStep) {
  Trainer first(*engine_, 0, 2), second(*engine_, 1, 2);
  first.Backward(0, x_, dy_);
  const Reply<SealResult> one = first.StartSeal();
  ASSERT_TRUE(Succeeds(second.Seal()));
  ASSERT_TRUE(Succeeds(one.Wait()));
  ASSERT_TRUE(Succeeds(first.Commit()));
  engine_->StartDraining();
  EXPECT_FALSE(engine_->SettleStep(absl::InfinitePast())) << "the second has yet to hear that the step is committed";
  EXPECT_TRUE(Succeeds(second.Commit()));
  EXPECT_TRUE(engine_->SettleStep(absl::InfiniteFuture()));
  EXPECT_EQ(engine_->position().step, 1);
  EXPECT_TRUE(ShutDown(first.Seal()));
}

TEST_F(ShutdownTest, ADrainHandsBackAStepThatIsNotSealedByAll) {
  Trainer first(*engine_, 0, 2), second(*engine_, 1, 2);
  first.Backward(0, x_, dy_);
  const Reply<SealResult> seal = first.StartSeal();
  engine_->StartDraining();
  EXPECT_TRUE(engine_->SettleStep(absl::InfiniteFuture()));
  EXPECT_TRUE(Fails(seal.Wait(), absl::StatusCode::kAborted, Reason::kStepAborted, {"the server is shutting down"}));
  EXPECT_TRUE(ShutDown(second.Seal()));
  EXPECT_EQ(engine_->position().step, 0);
}

TEST_F(ShutdownTest, ADrainHandsBackASealedStepThatNobodyDecidesOnInTime) {
  Trainer trainer(*engine_);
  trainer.Backward(0, x_, dy_);
  ASSERT_TRUE(Succeeds(trainer.Seal()));
  engine_->StartDraining();
  EXPECT_TRUE(engine_->SettleStep(absl::InfinitePast()));
  EXPECT_TRUE(
      Fails(trainer.Commit(), absl::StatusCode::kAborted, Reason::kStepAborted, {"the server is shutting down"}));
  EXPECT_EQ(engine_->position().step, 0);
}

TEST_F(ShutdownTest, ACommitThatWaitsForTheDeviceEnds) {
  Trainer trainer(*engine_);
  trainer.Backward(0, x_, dy_);
  ASSERT_TRUE(Succeeds(trainer.Seal()));
  HeldDevice device(*engine_);
  const Reply<StepPosition> commit = trainer.StartCommit(trainer.CommitOf(Sgd{.learning_rate = 1}));
  std::thread shutdown([&] { engine_->Shutdown(); });
  EXPECT_TRUE(ShutDown(commit.Wait()));
  device.Release();
  shutdown.join();
}

TEST_F(ShutdownTest, NothingIsTakenAfterwards) {
  Trainer trainer(*engine_);
  engine_->Shutdown();
  EXPECT_TRUE(ShutDown(RunningCall::Forward(*engine_, trainer.ForwardHeader(0, 20), x_)));
  EXPECT_TRUE(ShutDown(engine_->OpenSession({"run", SessionRole::kRead, 1, 0})));
  EXPECT_TRUE(ShutDown(trainer.Seal()));
  EXPECT_TRUE(ShutDown(trainer.Commit()));
  EXPECT_TRUE(ShutDown(trainer.Discard()));
  Reply<TensorRows> rows;
  engine_->ReadTensor(0, 0, 1, rows.done());
  EXPECT_TRUE(ShutDown(rows.Wait()));
  EXPECT_TRUE(Succeeds(engine_->CloseSession(trainer.session())));
}

TEST_F(ShutdownTest, UnderThreadsThatCallWithoutPause) {
  for (int round = 0; round < 20; ++round) {
    TestEngine engine(model_, TilesOf(kTileRows, model_));
    std::atomic<int> answered = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t, reader = Trainer(*engine, 0, 1, SessionRole::kRead)] {
        while (true) {
          auto call = RunningCall::Forward(*engine, reader.ForwardHeader(0, 20), x_);
          if (!call.ok()) {
            EXPECT_TRUE(ShutDown(call));
            return;
          }
          if (t == 2) {
            (*call)->Send(6).IgnoreError();
            (*call)->Cancel();
          } else if ((*call)->SendAll(3).ok()) {  // not where it was shut down between two shards
            EXPECT_TRUE(EndedOrShutDown((*call)->Wait()));
          }
          ++answered;
        }
      });
    }
    while (answered < 10) std::this_thread::yield();
    engine->Shutdown();
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(engine->open_call_count(), 0);
  }
}

// Keeps what it is answered, as gRPC does with what it has yet to send.
class KeepingSink final : public CallSink {
 public:
  void OnRoom() override {}
  void OnResult(CallResult result) override {
    results.push_back(std::move(result));
    if (results.size() == expected) answered.Notify();
  }
  void OnFinished(absl::StatusOr<CallSummary>) override { finished.Notify(); }

  const size_t expected = 2;
  absl::Notification answered, finished;
  std::vector<CallResult> results;  // the test's once `answered`
};

TEST(OutlivingTest, ResultsAndCallsOutliveTheEngineAndItsDevice) {
  const TinyModel model({OddMlp()});
  const Dense x = RandomDense(3 * kTileRows, 13, 1);
  for (const bool lazy : {false, true}) {
    std::unique_ptr<Backend> backend = OneThread();
    if (lazy) backend = std::make_unique<LazyDevice>();
    auto engine =
        std::make_unique<TestEngine>(model, TilesOf(lazy ? 2 * kTileRows : kTileRows, model), std::move(backend));
    Trainer trainer(**engine);
    KeepingSink sink;
    const std::shared_ptr<Call> call = (*engine)->StartForward(trainer.ForwardHeader(0, x.rows), sink).value();
    const PieceSource shard(Encode(RowsOf(x, 0, 2 * kTileRows), DType::kF64));
    ASSERT_EQ(*call->Place(0, 2 * kTileRows, 0, shard, nullptr), 2 * kTileRows);
    sink.answered.WaitForNotification();
    engine->engine.reset();
    EXPECT_TRUE(sink.finished.HasBeenNotified());

    const Dense expected = NaiveForward(model.layers()[0], x);
    for (CallResult& result : sink.results) {
      const Dense rows = Decode(result.data, result.row_count, 7, DType::kF64);
      EXPECT_LE(RelativeDifference(rows, RowsOf(expected, result.row_offset, result.row_count)), 1e-12);
      result.hold = nullptr;
    }
    const PieceSource late(Encode(RowsOf(x, 2 * kTileRows, kTileRows), DType::kF64));
    EXPECT_TRUE(Fails(call->Place(2 * kTileRows, kTileRows, 0, late, nullptr), absl::StatusCode::kCancelled,
                      Reason::kCancelled));
    call->Cancel();
  }
}

}  // namespace
}  // namespace shardmlp::testing
