// The engine over devices with memory of their own, against the naive twin: two tiles in flight, copies on streams of
// their own. Each device runs work as late as it may, or in an order of its own, and memory begins as NaN, so that
// every wait that is missing is seen. Whoever links this says in Backends() over which.
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/bytes.h"
#include "tests/engine/outcome.h"
#include "tests/engine/trainer.h"
#include "tests/engine/twin.h"
#include "tests/kernels/backends.h"

namespace shardmlp::testing {
namespace {

class DeviceTwinTest : public ::testing::TestWithParam<BackendFactory> {
 protected:
  const TinyModel model_{{OddMlp(), PlainMlp(), UngatedMlp()}};

  const MlpConfig& mlp(size_t n) const { return model_.spec().layers[n].mlp; }
};

TEST_P(DeviceTwinTest, ThreeStepsOfThreeLayersAreTheTwins) {
  for (const int64_t tile_rows : {1, 4, 64}) {
    const TestEngine engine(model_, TilesOf(2 * tile_rows, model_), GetParam().make());
    ASSERT_EQ(engine->limits().tile_row_count, tile_rows);
    Trainer trainer(*engine);
    for (int step = 0; step < 3; ++step) {
      const std::vector<NaiveMlp> weights = engine.Weights();
      std::vector<NaiveGradients> expected;
      for (size_t n = 0; n < weights.size(); ++n) {
        const Dense x = InputOf(mlp(n), 125, n + 10 * step);
        const Dense dy = OutputGradientOf(mlp(n), 125, n + 10 * step);
        expected.push_back(NaiveBackward(weights[n], x, dy));
        EXPECT_LE(RelativeDifference(trainer.Forward(n, x, 3), NaiveForward(weights[n], x)), kTwinBound);
        EXPECT_LE(RelativeDifference(trainer.Backward(n, x, dy, 3), expected[n].dx), kTwinBound);
      }
      ExpectStep(engine, trainer, expected);
    }
  }
}

// Forwards leave x, and G and U, on the device; its memory is lent again as soon as a backward is done with it.
TEST_P(DeviceTwinTest, BackwardByTicketIsTheTwins) {
  EngineOptions options = TilesOf(8, model_);
  options.stash_bytes = 3 * 22 * (13 + 2 * 37 + 2) * 8;
  const TestEngine engine(model_, options, GetParam().make());
  Trainer trainer(*engine);
  for (int round = 0; round < 4; ++round) {
    std::vector<Dense> xs;
    std::vector<int64_t> tickets;
    for (size_t n = 0; n < 3; ++n) {
      xs.push_back(InputOf(mlp(n), 22, n + 10 * round));
      ForwardSpec spec = trainer.ForwardHeader(n, 22);
      spec.keep_input = KeepInput::kIfRoom;
      const auto call = trainer.Start(spec, xs[n]);
      ASSERT_TRUE(Succeeds(call->SendAll(2)));
      ASSERT_TRUE(Succeeds(call->Wait()));
      tickets.push_back(call->Wait()->ticket);
      EXPECT_NE(tickets[n], 0);
      EXPECT_LE(RelativeDifference(call->rows(), NaiveForward(model_.layers()[n], xs[n])), kTwinBound);
    }
    for (size_t n = 3; n-- > 0;) {
      const Dense dy = OutputGradientOf(mlp(n), 22, n + 10 * round);
      BackwardSpec header = trainer.BackwardHeader(n, 22);
      header.ticket = tickets[n];
      const auto call = trainer.Start(header, Dense(22, 0), dy);
      ASSERT_TRUE(Succeeds(call->SendAll(3)));
      ASSERT_TRUE(Succeeds(call->Wait()));
      EXPECT_LE(RelativeDifference(call->rows(), NaiveBackward(model_.layers()[n], xs[n], dy).dx), kTwinBound);
    }
  }
}

TEST_P(DeviceTwinTest, ThreeTrainersAtOnceAreTheTwin) {
  const TestEngine engine(model_, TilesOf(8, model_), GetParam().make());
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (int rank = 0; rank < 3; ++rank) trainers.push_back(std::make_unique<Trainer>(*engine, rank, 3));
  for (int step = 0; step < 2; ++step) {
    const std::vector<NaiveMlp> weights = engine.Weights();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        Trainer& trainer = *trainers[rank];
        for (size_t n = 0; n < weights.size(); ++n) {
          const Dense x = InputOf(mlp(n), 10 + 20 * rank, n + 10 * rank);
          const Dense dy = OutputGradientOf(mlp(n), 10 + 20 * rank, n + 10 * rank);
          EXPECT_LE(RelativeDifference(trainer.Forward(n, x, 3), NaiveForward(weights[n], x)), kTwinBound);
          EXPECT_LE(RelativeDifference(trainer.Backward(n, x, dy, 2), NaiveBackward(weights[n], x, dy).dx), kTwinBound);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::vector<NaiveGradients> expected;
    for (size_t n = 0; n < weights.size(); ++n) {
      std::vector<Dense> xs, dys;
      for (int rank = 0; rank < 3; ++rank) {
        xs.push_back(InputOf(mlp(n), 10 + 20 * rank, n + 10 * rank));
        dys.push_back(OutputGradientOf(mlp(n), 10 + 20 * rank, n + 10 * rank));
      }
      expected.push_back(NaiveBackward(weights[n], Stacked(xs), Stacked(dys)));
    }
    std::vector<Reply<SealResult>> seals;
    for (const auto& trainer : trainers) seals.push_back(trainer->StartSeal());
    for (const Reply<SealResult>& seal : seals) {
      ASSERT_TRUE(Succeeds(seal.Wait()));
      EXPECT_LE(RelativeDifference(seal.Wait()->tensor_sums_of_squares, Squares(model_.spec(), expected)), kTwinBound);
    }
    for (const auto& trainer : trainers) ASSERT_TRUE(Succeeds(trainer->Commit()));
    const std::vector<NaiveGradients> got = Difference(weights, engine.Weights());
    for (size_t n = 0; n < expected.size(); ++n) {
      expected[n].dx = Dense();
      EXPECT_LE(RelativeDifference(got[n], expected[n]), kTwinBound) << "layer " << n;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, DeviceTwinTest, ::testing::ValuesIn(Backends()), BackendName);

}  // namespace
}  // namespace shardmlp::testing
