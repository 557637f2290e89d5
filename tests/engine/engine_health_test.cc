// A device that is too small, and one that breaks.
#include "gtest/gtest.h"
#include "tests/engine/lazy_device.h"
#include "tests/engine/outcome.h"
#include "tests/engine/trainer.h"

namespace shardmlp::testing {
namespace {

TEST(EngineHealthTest, AModelThatDoesNotFitIsRefusedBeforeAnythingIsAllocated) {
  const TinyModel model({OddMlp()});
  Metrics metrics;
  auto backend = std::make_unique<LazyDevice>(/*memory_bytes=*/100'000);
  const auto engine = Engine::Create({}, std::move(backend), model, MakeLocalReplicas(), nullptr, metrics);
  EXPECT_TRUE(Fails(engine, absl::StatusCode::kResourceExhausted, Reason::kOutOfMemory,
                    {"100000 are available", "gradients", "tiles of 1024 rows"}));
}

TEST(EngineHealthTest, AWorkspaceWithoutRoomForARowIsRefused) {
  const TinyModel model({OddMlp()});
  Metrics metrics;
  EXPECT_TRUE(Fails(Engine::Create({.workspace_bytes = 10}, OneThread(), model, MakeLocalReplicas(), nullptr, metrics),
                    absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, {"10 bytes"}));
}

class BrokenDeviceTest : public ::testing::Test {
 protected:
  BrokenDeviceTest() {
    auto backend = std::make_unique<LazyDevice>();
    device_ = backend.get();
    engine_ = std::make_unique<TestEngine>(model_, TilesOf(8, model_), std::move(backend));
    trainer_ = std::make_unique<Trainer>(**engine_);
  }

  template <typename T>
  static ::testing::AssertionResult Broken(const T& result) {
    return Fails(result, absl::StatusCode::kInternal, Reason::kDeviceFailed);
  }
  // Once it is known to be broken, it answers nothing from its memory and changes nothing.
  void ExpectBroken() {
    EXPECT_TRUE(Broken((*engine_)->health()));
    EXPECT_TRUE(Broken(RunningCall::Forward(**engine_, trainer_->ForwardHeader(0, 5), x_)));
    EXPECT_TRUE(Broken(trainer_->Seal()));
    EXPECT_TRUE(Broken(trainer_->Commit()));
    EXPECT_TRUE(Broken(trainer_->Discard()));
    Reply<TensorRows> read;
    (*engine_)->ReadTensor(0, 0, 1, read.done());
    EXPECT_TRUE(Broken(read.Wait()));
    Reply<std::vector<uint64_t>> checksums;
    (*engine_)->Checksums(checksums.done());
    EXPECT_TRUE(Broken(checksums.Wait()));
  }

  const TinyModel model_{{OddMlp()}};
  LazyDevice* device_ = nullptr;
  std::unique_ptr<TestEngine> engine_;
  std::unique_ptr<Trainer> trainer_;
  const Dense x_ = RandomDense(5, 13, 1);
  const Dense dy_ = RandomDense(5, 7, 2);
};

TEST_F(BrokenDeviceTest, UnderAForward) {
  const auto call = trainer_->Start(trainer_->ForwardHeader(0, 5), x_);
  device_->Break();
  ASSERT_TRUE(Succeeds(call->SendAll()));
  EXPECT_TRUE(Broken(call->Wait()));
  EXPECT_EQ(call->rows().rows, 0);
  ExpectBroken();
}

TEST_F(BrokenDeviceTest, UnderABackward) {
  const auto call = trainer_->Start(trainer_->BackwardHeader(0, 5), x_, dy_);
  device_->Break();
  ASSERT_TRUE(Succeeds(call->SendAll()));
  EXPECT_TRUE(Broken(call->Wait()));
  ExpectBroken();
}

TEST_F(BrokenDeviceTest, UnderTheSums) {
  trainer_->Backward(0, x_, dy_);
  device_->Break();
  EXPECT_TRUE(Fails(trainer_->Seal(), absl::StatusCode::kAborted, Reason::kStepAborted, {"the lazy device broke"}));
  ExpectBroken();
}

TEST_F(BrokenDeviceTest, HalfWayThroughAStep) {
  trainer_->Backward(0, x_, dy_);
  ASSERT_TRUE(Succeeds(trainer_->Seal()));
  device_->BreakUpdate(3);  // two tensors of six have new weights
  const CommitSpec commit = trainer_->CommitOf(Sgd{.learning_rate = 1});
  const Reply<StepPosition> first = trainer_->StartCommit(commit), again = trainer_->StartCommit(commit);
  EXPECT_TRUE(Broken(first.Wait()));
  EXPECT_TRUE(Broken(again.Wait()));
  EXPECT_TRUE(Broken(trainer_->StartCommit(commit).Wait()));
  EXPECT_EQ((*engine_)->position().step, 0);
  ExpectBroken();
}

TEST_F(BrokenDeviceTest, AnotherSessionsSealIsAnsweredToo) {
  auto backend = std::make_unique<LazyDevice>();
  LazyDevice& device = *backend;
  TestEngine two(model_, TilesOf(8, model_), std::move(backend));
  Trainer first(*two, 0, 2), second(*two, 1, 2);
  const Reply<SealResult> waiting = first.StartSeal();
  device.Break();
  const auto call = second.Start(second.BackwardHeader(0, 5), x_, dy_);
  ASSERT_TRUE(Succeeds(call->SendAll()));
  EXPECT_TRUE(Broken(call->Wait()));
  ASSERT_TRUE(Succeeds(two->CloseSession(second.session())));
  EXPECT_TRUE(Fails(waiting.Wait(), absl::StatusCode::kAborted, Reason::kStepAborted));
}

}  // namespace
}  // namespace shardmlp::testing
