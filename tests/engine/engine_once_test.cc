// Exactly once: whatever is sent twice, cut or cancelled, gradients and weights are bit for bit those of the run that
// nothing happened to.
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/engine/bytes.h"
#include "tests/engine/outcome.h"
#include "tests/engine/trainer.h"

namespace shardmlp::testing {
namespace {

constexpr int64_t kTileRows = 4;
constexpr int64_t kRows = 22;  // six tiles, the last of two rows
constexpr int kTiles = 6;

// What a step came to, to the bit.
struct Outcome {
  Dense dx;
  std::vector<double> squares;
  std::vector<Dense> weights;
  bool operator==(const Outcome&) const = default;
};

class ExactlyOnceTest : public ::testing::Test {
 protected:
  // An engine of its own for each run; a first micro-batch, the backward that `backward` runs, a second micro-batch,
  // seal and commit.
  using RunBackward = std::function<Dense(Trainer&)>;
  Outcome Step(const RunBackward& backward, const std::function<void(TestEngine&, Trainer&)>& meanwhile = {}) {
    TestEngine engine(model_, TilesOf(kTileRows, model_));
    Trainer trainer(*engine);
    trainer.Backward(0, x_before_, dy_before_);
    Outcome outcome;
    outcome.dx = backward(trainer);
    trainer.Backward(0, x_before_, dy_before_);
    if (meanwhile) meanwhile(engine, trainer);
    const absl::StatusOr<SealResult> seal = trainer.Seal();
    EXPECT_TRUE(Succeeds(seal));
    if (!seal.ok()) return outcome;
    outcome.squares = seal->tensor_sums_of_squares;
    EXPECT_TRUE(Succeeds(trainer.Commit(AdamW{.learning_rate = 0.01})));
    for (const TensorSpec& tensor : model_.spec().tensors) outcome.weights.push_back(engine.Read(tensor));
    return outcome;
  }
  Outcome Undisturbed() {
    return Step([this](Trainer& trainer) { return trainer.Backward(0, x_, dy_); });
  }

  // The backward of x_ and dy_ under `header` once more, to its end; the trainer does not count its rows again.
  std::unique_ptr<RunningCall> Again(Trainer& trainer, const BackwardSpec& header, int64_t shards = 1) {
    auto call = RunningCall::Backward(trainer.engine(), header, x_, dy_).value();
    EXPECT_TRUE(Succeeds(call->SendAll(shards)));
    EXPECT_TRUE(Succeeds(call->Wait()));
    return call;
  }

  const TinyModel model_{{OddMlp(), UngatedMlp()}};
  const Dense x_ = RandomDense(kRows, 13, 1);
  const Dense dy_ = RandomDense(kRows, 7, 2);
  const Dense x_before_ = RandomDense(9, 13, 3);
  const Dense dy_before_ = RandomDense(9, 7, 4);
};

TEST_F(ExactlyOnceTest, TheSameRunComesOutTheSame) { EXPECT_EQ(Undisturbed(), Undisturbed()); }

TEST_F(ExactlyOnceTest, ABackwardThatIsSentAgainAfterItsEnd) {
  const Outcome undisturbed = Undisturbed();
  for (const int64_t shards : {1, 3, 9}) {
    EXPECT_EQ(Step([&](Trainer& trainer) {
                const BackwardSpec header = trainer.BackwardHeader(0, kRows);
                const auto first = trainer.Start(header, x_, dy_);
                EXPECT_TRUE(Succeeds(first->SendAll()));
                EXPECT_TRUE(Succeeds(first->Wait()));
                const auto again = Again(trainer, header, shards);
                EXPECT_EQ(again->Wait()->repeated_row_count, kRows);
                EXPECT_EQ(again->rows(), first->rows());
                return again->rows();
              }),
              undisturbed);
  }
}

TEST_F(ExactlyOnceTest, ABackwardThatIsCutAfterAnyNumberOfTilesAndSentAgain) {
  const Outcome undisturbed = Undisturbed();
  for (int tiles = 0; tiles <= kTiles; ++tiles) {
    for (const int64_t rows_beyond : {0, 1, 3}) {  // of a tile that never gets full
      SCOPED_TRACE(absl::StrCat("cut after ", tiles, " tiles and ", rows_beyond, " rows"));
      const int64_t answered = std::min(kTileRows * tiles, kRows);
      if (answered + rows_beyond > kRows - (answered < kRows ? 1 : 0)) continue;
      EXPECT_EQ(Step([&](Trainer& trainer) {
                  const BackwardSpec header = trainer.BackwardHeader(0, kRows);
                  const auto first = trainer.Start(header, x_, dy_);
                  if (answered > 0) {
                    EXPECT_TRUE(Succeeds(first->Send(answered)));
                  }
                  if (rows_beyond > 0) {
                    EXPECT_TRUE(Succeeds(first->Send(rows_beyond)));
                  }
                  first->WaitForRows(answered);
                  first->Cancel();
                  const auto again = Again(trainer, header);
                  EXPECT_EQ(again->Wait()->repeated_row_count, answered);
                  return again->rows();
                }),
                undisturbed);
    }
  }
}

TEST_F(ExactlyOnceTest, ABackwardThatIsCutWhileItsTilesAreInFlight) {
  const Outcome undisturbed = Undisturbed();
  for (int round = 0; round < 50; ++round) {
    EXPECT_EQ(Step([&](Trainer& trainer) {
                const BackwardSpec header = trainer.BackwardHeader(0, kRows);
                EXPECT_TRUE(Succeeds(trainer.Start(header, x_, dy_)->Send(1 + 7 * round % kRows)));
                for (int tries = 0; tries < 3; ++tries) {
                  const auto cut = RunningCall::Backward(trainer.engine(), header, x_, dy_).value();
                  EXPECT_TRUE(Succeeds(cut->Send(1 + (11 * round + 5 * tries) % kRows)));
                }
                return Again(trainer, header)->rows();
              }),
              undisturbed)
        << "round " << round;
  }
}

TEST_F(ExactlyOnceTest, ARetryThatOvertakesTheFirstTry) {
  const Outcome undisturbed = Undisturbed();
  EXPECT_EQ(Step([&](Trainer& trainer) {
              const BackwardSpec header = trainer.BackwardHeader(0, kRows);
              const auto first = trainer.Start(header, x_, dy_);
              EXPECT_TRUE(Succeeds(first->Send(2 * kTileRows)));
              first->WaitForRows(2 * kTileRows);
              const auto retry = Again(trainer, header);
              EXPECT_EQ(retry->Wait()->repeated_row_count, 2 * kTileRows);
              EXPECT_TRUE(Succeeds(first->SendAll()));
              EXPECT_EQ(first->Wait()->repeated_row_count, kRows - 2 * kTileRows);
              EXPECT_EQ(first->rows(), retry->rows());
              return first->rows();
            }),
            undisturbed);
}

TEST_F(ExactlyOnceTest, AnotherDyUnderTheSameCallIsRefusedAndLeavesNoTrace) {
  const Outcome undisturbed = Undisturbed();
  for (const int64_t bad_row : {0, 5, 21}) {
    EXPECT_EQ(Step([&](Trainer& trainer) {
                const BackwardSpec header = trainer.BackwardHeader(0, kRows);
                const auto first = trainer.Start(header, x_, dy_);
                EXPECT_TRUE(Succeeds(first->SendAll()));
                EXPECT_TRUE(Succeeds(first->Wait()));
                Dense other = dy_;
                other.at(bad_row, 3) += 1e-9;
                const auto refused = RunningCall::Backward(trainer.engine(), header, x_, other).value();
                refused->SendAll(4).IgnoreError();  // it may be over by then
                EXPECT_TRUE(Fails(refused->Wait(), absl::StatusCode::kFailedPrecondition, Reason::kContributionConflict,
                                  {absl::StrCat("call ", header.call_id)}));
                EXPECT_EQ(refused->rows(), RowsOf(first->rows(), 0, bad_row / kTileRows * kTileRows));
                return first->rows();
              }),
              undisturbed);
  }
}

TEST_F(ExactlyOnceTest, AnotherLengthOrLayerUnderTheSameCallIsRefusedAndLeavesNoTrace) {
  const Outcome undisturbed = Undisturbed();
  EXPECT_EQ(
      Step([&](Trainer& trainer) {
        const BackwardSpec header = trainer.BackwardHeader(0, kRows);
        const auto first = trainer.Start(header, x_, dy_);
        EXPECT_TRUE(Succeeds(first->SendAll()));
        EXPECT_TRUE(Succeeds(first->Wait()));
        BackwardSpec other_length = header;
        other_length.row_count = kRows - 1;
        BackwardSpec other_layer = header;
        other_layer.layer = LayerIndex(1);
        for (const BackwardSpec& other : {other_length, other_layer}) {
          const auto refused = RunningCall::Backward(trainer.engine(), other, RowsOf(x_, 0, other.row_count),
                                                     RowsOf(dy_, 0, other.row_count))
                                   .value();
          EXPECT_TRUE(Succeeds(refused->SendAll()));
          EXPECT_TRUE(Fails(refused->Wait(), absl::StatusCode::kFailedPrecondition, Reason::kContributionConflict));
        }
        return first->rows();
      }),
      undisturbed);
}

TEST_F(ExactlyOnceTest, ABackwardWhoseAnswerWasLostMayBeSentAgainAfterTheSeal) {
  const Outcome undisturbed = Undisturbed();
  BackwardSpec header;
  EXPECT_EQ(Step(
                [&](Trainer& trainer) {
                  header = trainer.BackwardHeader(0, kRows);
                  const auto call = trainer.Start(header, x_, dy_);
                  EXPECT_TRUE(Succeeds(call->SendAll()));
                  EXPECT_TRUE(Succeeds(call->Wait()));
                  return call->rows();
                },
                [&](TestEngine&, Trainer& trainer) {
                  EXPECT_TRUE(Succeeds(trainer.Seal()));
                  EXPECT_EQ(Again(trainer, header)->Wait()->repeated_row_count, kRows);
                }),
            undisturbed);
}

TEST_F(ExactlyOnceTest, SealsCommitsAndDiscardsThatAreSentTwice) {
  TestEngine engine(model_, TilesOf(kTileRows, model_));
  Trainer trainer(*engine);
  trainer.Backward(0, x_, dy_);
  // Discarded twice, once.
  const Reply<StepPosition> discard = trainer.StartDiscard(), discard_again = trainer.StartDiscard();
  EXPECT_EQ(*discard.Wait(), (StepPosition{0, 1, 1}));
  EXPECT_EQ(*discard_again.Wait(), (StepPosition{0, 1, 1}));
  trainer.CatchUp();
  // Done over, sealed and committed twice, once.
  trainer.Backward(0, x_, dy_);
  const Reply<SealResult> replaced = trainer.StartSeal(), seal = trainer.StartSeal();
  ASSERT_TRUE(Succeeds(seal.Wait()));
  if (const absl::StatusOr<SealResult> early = replaced.Wait(); early.ok()) {  // where it had no need to wait
    EXPECT_EQ(early->tensor_sums_of_squares, seal.Wait()->tensor_sums_of_squares);
  } else {
    EXPECT_TRUE(Fails(early, absl::StatusCode::kCancelled, Reason::kCancelled));
  }
  const std::vector<NaiveMlp> before = engine.Weights();
  const CommitSpec commit = trainer.CommitOf(Sgd{.learning_rate = 1});
  const Reply<StepPosition> first = trainer.StartCommit(commit), again = trainer.StartCommit(commit);
  EXPECT_EQ(*first.Wait(), (StepPosition{1, 1, 2}));
  EXPECT_EQ(*again.Wait(), (StepPosition{1, 1, 2}));
  const std::vector<NaiveMlp> once = engine.Weights();
  EXPECT_EQ(*trainer.StartCommit(commit).Wait(), (StepPosition{1, 1, 2}));
  EXPECT_EQ(trainer.Seal()->tensor_sums_of_squares, seal.Wait()->tensor_sums_of_squares);
  EXPECT_TRUE(Fails(trainer.StartCommit(trainer.CommitOf(Sgd{.learning_rate = 2})).Wait(),
                    absl::StatusCode::kFailedPrecondition, Reason::kDecisionConflict));
  EXPECT_TRUE(Fails(trainer.StartDiscard().Wait(), absl::StatusCode::kFailedPrecondition, Reason::kDecisionConflict));
  EXPECT_EQ(engine->position(), (StepPosition{1, 1, 2}));
  EXPECT_EQ(engine.Weights()[0].gate_up, once[0].gate_up);
  EXPECT_NE(engine.Weights()[0].gate_up, before[0].gate_up);
}

TEST_F(ExactlyOnceTest, AStepThatWasDiscardedAndDoneOver) {
  const Outcome undisturbed = Undisturbed();
  for (const bool sealed : {false, true}) {
    EXPECT_EQ(Step([&](Trainer& trainer) {
                trainer.Backward(1, x_before_, dy_before_);
                trainer.Backward(0, x_, dy_);
                if (sealed) {
                  EXPECT_TRUE(Succeeds(trainer.Seal()));
                }
                EXPECT_TRUE(Succeeds(trainer.Discard()));
                trainer.Backward(0, x_before_, dy_before_);
                return trainer.Backward(0, x_, dy_);
              }),
              undisturbed)
        << (sealed ? "sealed" : "not sealed");
  }
}

}  // namespace
}  // namespace shardmlp::testing
