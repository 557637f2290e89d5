// The engine whole, against the naive twin in f64: outputs, input gradients, and every weight gradient, seen through
// the seal's sums of squares and through what a commit of SGD with learning rate 1 takes from the weights.
#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/engine/bytes.h"
#include "tests/engine/lazy_device.h"
#include "tests/engine/outcome.h"
#include "tests/engine/trainer.h"
#include "tests/engine/twin.h"
#include "tests/kernels/layer.h"

namespace shardmlp::testing {
namespace {

struct TwinCase {
  std::string name;
  MlpConfig mlp;
  int64_t tile_rows;  // 0: all rows
};

std::vector<TwinCase> TwinCases() {
  std::vector<TwinCase> cases;
  for (const int64_t tile_rows : {1, 2, 3, 7, 64, 0}) {
    const std::string tiles = tile_rows == 0 ? "AllRows" : absl::StrCat("TilesOf", tile_rows);
    cases.push_back({absl::StrCat("GatedWithBiases", tiles), OddMlp(), tile_rows});
    cases.push_back({absl::StrCat("Gated", tiles), PlainMlp(), tile_rows});
    cases.push_back({absl::StrCat("UngatedWithBiases", tiles), UngatedMlp(), tile_rows});
  }
  return cases;
}

class EngineTwinTest : public ::testing::TestWithParam<TwinCase> {};

TEST_P(EngineTwinTest, EveryTokenCountInEveryNumberOfShardsIsTheTwins) {
  const MlpConfig& mlp = GetParam().mlp;
  const TinyModel model({mlp});
  const TestEngine engine(model, GetParam().tile_rows == 0 ? EngineOptions() : TilesOf(GetParam().tile_rows, model));
  ASSERT_EQ(engine->limits().tile_row_count, GetParam().tile_rows == 0 ? 1024 : GetParam().tile_rows);
  Trainer trainer(*engine);
  for (const int64_t tokens : {0, 1, 2, 5, 125, 257, 1000}) {
    // Each number of shards is a step of its own: the weights change, and the next step is as right as the first.
    for (int64_t shards = 1; shards <= 9; ++shards) {
      SCOPED_TRACE(absl::StrCat(tokens, " tokens in ", shards, " shards"));
      const NaiveMlp weights = engine.Weights()[0];
      const Dense x = InputOf(mlp, tokens, shards);
      const Dense dy = OutputGradientOf(mlp, tokens, shards);
      const NaiveGradients expected = NaiveBackward(weights, x, dy);
      EXPECT_LE(testing::RelativeDifference(trainer.Forward(0, x, shards), NaiveForward(weights, x)), kTwinBound);
      EXPECT_LE(testing::RelativeDifference(trainer.Backward(0, x, dy, shards), expected.dx), kTwinBound);
      ExpectStep(engine, trainer, {expected});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layers, EngineTwinTest, ::testing::ValuesIn(TwinCases()),
                         [](const auto& info) { return info.param.name; });

TEST(EngineDeviceTest, ItsMemoryIsWhatWasPlanned) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const TinyModel model({OddMlp(dtype), PlainMlp(dtype), UngatedMlp(dtype)});
    for (const bool frozen : {false, true}) {
      auto backend = std::make_unique<LazyDevice>();
      const LazyDevice& device = *backend;
      EngineOptions options;
      options.frozen = frozen;
      const TestEngine engine(model, options, std::move(backend));
      const int64_t allocated = device.allocation_count();
      Trainer reader(*engine, 0, 1, SessionRole::kRead);
      reader.Forward(1, InputOf(PlainMlp(), 10, 1));
      EXPECT_EQ(device.allocation_count(), allocated) << "a call allocates nothing";
      EXPECT_EQ(device.reserved_bytes(), engine->memory_plan().device_bytes());
      EXPECT_EQ(device.peak_bytes(Memory::kDevice), device.reserved_bytes() - kBounceBytes) << "there is no replica";
      const int64_t padding = 5 * 3 * 4 * 64;
      EXPECT_GE(device.peak_bytes(Memory::kStaging), engine->memory_plan().staging_bytes);
      EXPECT_LE(device.peak_bytes(Memory::kStaging), engine->memory_plan().staging_bytes + padding);
    }
  }
}

class EngineStepTest : public ::testing::Test {
 protected:
  const TinyModel model_{{OddMlp(), PlainMlp(), UngatedMlp()}};
  const TestEngine engine_{model_, TilesOf(4, model_)};

  const MlpConfig& mlp(size_t n) const { return model_.spec().layers[n].mlp; }
};

TEST_F(EngineStepTest, MicroBatchesOfAStepAddUp) {
  Trainer trainer(*engine_);
  std::vector<NaiveGradients> expected = ZeroGradients(model_.layers());
  std::vector<Dense> xs, dys;
  for (int micro_batch = 0; micro_batch < 4; ++micro_batch) {
    xs.push_back(InputOf(mlp(1), 5 + micro_batch, micro_batch));
    dys.push_back(OutputGradientOf(mlp(1), 5 + micro_batch, micro_batch));
    EXPECT_LE(testing::RelativeDifference(trainer.Backward(1, xs.back(), dys.back(), 2),
                                          NaiveBackward(model_.layers()[1], xs.back(), dys.back()).dx),
              kTwinBound);
  }
  expected[1] = NaiveBackward(model_.layers()[1], Stacked(xs), Stacked(dys));
  ExpectStep(engine_, trainer, expected);
}

TEST_F(EngineStepTest, TrainersWithUnequalTokenCountsAndOneWithNoneAddUp) {
  const int64_t tokens[] = {17, 0, 5};  // of ranks 0 to 2
  Trainer trainers[] = {Trainer(*engine_, 0, 3), Trainer(*engine_, 1, 3), Trainer(*engine_, 2, 3)};
  std::vector<NaiveGradients> expected;
  for (size_t n = 0; n < 3; ++n) {
    std::vector<Dense> xs, dys;
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == 1) continue;
      xs.push_back(InputOf(mlp(n), tokens[rank], rank));
      dys.push_back(OutputGradientOf(mlp(n), tokens[rank], rank));
      EXPECT_LE(testing::RelativeDifference(trainers[rank].Backward(n, xs.back(), dys.back(), 3),
                                            NaiveBackward(model_.layers()[n], xs.back(), dys.back()).dx),
                kTwinBound);
    }
    expected.push_back(NaiveBackward(model_.layers()[n], Stacked(xs), Stacked(dys)));
  }
  const Reply<SealResult> first = trainers[0].StartSeal();
  const Reply<SealResult> second = trainers[1].StartSeal();
  EXPECT_FALSE(first.answered());
  const Reply<SealResult> third = trainers[2].StartSeal();
  for (const Reply<SealResult>& seal : {first, second, third}) {
    ASSERT_TRUE(Succeeds(seal.Wait()));
    EXPECT_LE(RelativeDifference(seal.Wait()->tensor_sums_of_squares, Squares(engine_->model(), expected)), kTwinBound);
    EXPECT_EQ(seal.Wait()->rows, (LayerRows{{10, 22}, {13, 22}, {16, 22}}));
  }
  const std::vector<NaiveMlp> before = engine_.Weights();
  for (Trainer& trainer : trainers) ASSERT_TRUE(Succeeds(trainer.Commit()));
  const std::vector<NaiveGradients> got = Difference(before, engine_.Weights());
  for (size_t n = 0; n < 3; ++n) {
    expected[n].dx = Dense();
    EXPECT_LE(testing::RelativeDifference(got[n], expected[n]), kTwinBound) << "applied once, not once a trainer";
  }
  EXPECT_EQ(engine_->position(), (StepPosition{1, 0, 2}));
}

TEST_F(EngineStepTest, TwoSessionsInterleavedTileByTileAreEachRight) {
  Trainer trainers[] = {Trainer(*engine_, 0, 2), Trainer(*engine_, 1, 2)};
  std::vector<Dense> xs, dys;
  std::vector<std::unique_ptr<RunningCall>> calls;
  for (int rank = 0; rank < 2; ++rank) {
    xs.push_back(InputOf(mlp(0), 32, rank));
    dys.push_back(OutputGradientOf(mlp(0), 32, rank));
    calls.push_back(trainers[rank].Start(trainers[rank].BackwardHeader(0, 32), xs.back(), dys.back()));
  }
  for (int64_t tile = 1; tile <= 8; ++tile) {
    for (const auto& call : calls) {
      ASSERT_TRUE(Succeeds(call->Send(4)));
      call->WaitForRows(4 * tile);
    }
  }
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(Succeeds(calls[rank]->End()));
    ASSERT_TRUE(Succeeds(calls[rank]->Wait()));
    EXPECT_LE(
        testing::RelativeDifference(calls[rank]->rows(), NaiveBackward(model_.layers()[0], xs[rank], dys[rank]).dx),
        kTwinBound);
  }
  const Reply<SealResult> first = trainers[0].StartSeal();
  ASSERT_TRUE(Succeeds(trainers[1].Seal()));
  ASSERT_TRUE(Succeeds(first.Wait()));
  std::vector<NaiveGradients> expected = ZeroGradients(model_.layers());
  expected[0] = NaiveBackward(model_.layers()[0], Stacked(xs), Stacked(dys));
  EXPECT_LE(RelativeDifference(first.Wait()->tensor_sums_of_squares, Squares(engine_->model(), expected)), kTwinBound);
}

TEST_F(EngineStepTest, WithoutTheInputGradientTheWeightsGetTheirs) {
  Trainer trainer(*engine_);
  const Dense x = InputOf(mlp(0), 9, 1), dy = OutputGradientOf(mlp(0), 9, 1);
  BackwardSpec header = trainer.BackwardHeader(0, 9);
  header.input_gradient = false;
  const auto call = trainer.Start(header, x, dy);
  ASSERT_TRUE(Succeeds(call->SendAll(2)));
  ASSERT_TRUE(Succeeds(call->Wait()));
  EXPECT_EQ(call->Wait()->row_count, 9);
  EXPECT_EQ(call->rows().rows, 0) << "the answer is an end alone";
  std::vector<NaiveGradients> expected = ZeroGradients(model_.layers());
  expected[0] = NaiveBackward(model_.layers()[0], x, dy);
  ExpectStep(engine_, trainer, expected);
}

TEST_F(EngineStepTest, WithoutTheWeightGradientTheInputGetsItsOwnAndNothingIsCounted) {
  Trainer trainer(*engine_);
  const Dense x = InputOf(mlp(0), 9, 1), dy = OutputGradientOf(mlp(0), 9, 1);
  for (const bool input_gradient : {true, false}) {
    BackwardSpec header = trainer.BackwardHeader(0, 9);
    header.weight_gradient = false;
    header.input_gradient = input_gradient;
    header.call_id = 0;
    header.step = header.attempt = -7;  // read only where weight gradients are wanted
    const auto call = trainer.Start(header, x, dy);
    ASSERT_TRUE(Succeeds(call->SendAll(2)));
    ASSERT_TRUE(Succeeds(call->Wait()));
    if (input_gradient) {
      EXPECT_LE(testing::RelativeDifference(call->rows(), NaiveBackward(model_.layers()[0], x, dy).dx), kTwinBound);
    }
  }
  ExpectStep(engine_, trainer, ZeroGradients(model_.layers()));
}

TEST(EngineFrozenTest, AFrozenServerGivesInputGradientsAndTakesPartInNoStep) {
  const TinyModel model({OddMlp()});
  EngineOptions options = TilesOf(4, model);
  options.frozen = true;
  const TestEngine engine(model, options);
  EXPECT_TRUE(engine->frozen());
  Trainer trainer(*engine), same_rank_of_another(*engine);
  const Dense x = InputOf(OddMlp(), 9, 1), dy = OutputGradientOf(OddMlp(), 9, 1);
  EXPECT_LE(testing::RelativeDifference(trainer.Forward(0, x), NaiveForward(model.layers()[0], x)), kTwinBound);
  EXPECT_TRUE(Fails(RunningCall::Backward(*engine, trainer.BackwardHeader(0, 9), x, dy),
                    absl::StatusCode::kFailedPrecondition, Reason::kFrozen));
  BackwardSpec header = trainer.BackwardHeader(0, 9);
  header.weight_gradient = false;
  const auto call = trainer.Start(header, x, dy);
  ASSERT_TRUE(Succeeds(call->SendAll()));
  ASSERT_TRUE(Succeeds(call->Wait()));
  EXPECT_LE(testing::RelativeDifference(call->rows(), NaiveBackward(model.layers()[0], x, dy).dx), kTwinBound);
  EXPECT_TRUE(Fails(trainer.Seal(), absl::StatusCode::kFailedPrecondition, Reason::kFrozen));
  EXPECT_TRUE(Fails(trainer.Commit(), absl::StatusCode::kFailedPrecondition, Reason::kFrozen));
  EXPECT_TRUE(Fails(trainer.Discard(), absl::StatusCode::kFailedPrecondition, Reason::kFrozen));
  EXPECT_TRUE(engine->trainers().empty());
  EXPECT_EQ(engine.Weights()[0].gate_up, model.layers()[0].gate_up);
}

}  // namespace
}  // namespace shardmlp::testing
