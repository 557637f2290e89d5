// NaN and infinity: answered, counted, never added, named by the seal, and gone with the discard.
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/bytes.h"
#include "tests/engine/outcome.h"
#include "tests/engine/trainer.h"
#include "tests/kernels/layer.h"

namespace shardmlp::testing {
namespace {

using ::testing::StartsWith;

constexpr int64_t kRows = 10;  // tiles of 4, 4 and 2

class NonFiniteTest : public ::testing::Test {
 protected:
  // A step without fault, to the bit.
  struct Outcome {
    Dense dx;
    std::vector<double> squares;
    std::vector<Dense> weights;
    bool operator==(const Outcome&) const = default;
  };
  Outcome CleanStep(TestEngine& engine, Trainer& trainer) {
    Outcome outcome;
    outcome.dx = trainer.Backward(0, x_, dy_);
    const absl::StatusOr<SealResult> seal = trainer.Seal();
    EXPECT_TRUE(Succeeds(seal));
    EXPECT_TRUE(seal->finite);
    EXPECT_EQ(seal->non_finite_origin, "");
    outcome.squares = seal->tensor_sums_of_squares;
    EXPECT_TRUE(Succeeds(trainer.Commit(AdamW{.learning_rate = 0.01})));
    for (const TensorSpec& tensor : model_.spec().tensors) outcome.weights.push_back(engine.Read(tensor));
    return outcome;
  }
  // Of an engine that saw nothing else.
  Outcome CleanStep() {
    TestEngine engine(model_, TilesOf(4, model_));
    Trainer trainer(*engine);
    return CleanStep(engine, trainer);
  }

  const TinyModel model_{{OddMlp()}};
  const Dense x_ = RandomDense(kRows, 13, 1);
  const Dense dy_ = RandomDense(kRows, 7, 2);
};

TEST_F(NonFiniteTest, OneBadElementIsNamedAndADiscardLeavesNoTraceOfIt) {
  const Outcome clean = CleanStep();
  for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
    for (const bool in_dy : {false, true}) {
      for (const int64_t row : {0, 5, 9}) {
        SCOPED_TRACE(absl::StrCat(bad, in_dy ? " in dy" : " in x", ", row ", row));
        TestEngine engine(model_, TilesOf(4, model_));
        Trainer trainer(*engine);
        Dense x = x_, dy = dy_;
        (in_dy ? dy : x).at(row, 2) = bad;
        const Dense dx = trainer.Backward(0, x, dy, 3);
        EXPECT_EQ(RowsOf(dx, 0, row / 4 * 4), RowsOf(clean.dx, 0, row / 4 * 4)) << "the tiles ahead are answered right";
        const absl::StatusOr<SealResult> seal = trainer.Seal();
        ASSERT_TRUE(Succeeds(seal)) << "its rows are counted";
        EXPECT_FALSE(seal->finite);
        EXPECT_EQ(seal->non_finite_origin,
                  absl::StrCat("trainer rank 0, session ", trainer.session(), ", layer 10, call 1, row ", row));
        EXPECT_TRUE(Fails(trainer.Commit(), absl::StatusCode::kFailedPrecondition, Reason::kNonFinite,
                          {absl::StrCat("row ", row)}));
        ASSERT_TRUE(Succeeds(trainer.Discard()));
        EXPECT_EQ(CleanStep(engine, trainer), clean);
      }
    }
  }
}

TEST_F(NonFiniteTest, TheTilesAroundItAreAddedAndItIsNot) {
  TestEngine engine(model_, TilesOf(4, model_));
  Trainer trainer(*engine);
  Dense dy = dy_;
  dy.at(5, 0) = NAN;
  trainer.Backward(0, x_, dy);
  const std::vector<NaiveGradients> expected = {NaiveBackward(model_.layers()[0],
                                                              Stacked({RowsOf(x_, 0, 4), RowsOf(x_, 8, 2)}),
                                                              Stacked({RowsOf(dy_, 0, 4), RowsOf(dy_, 8, 2)}))};
  const std::vector<double> squares = Squares(model_.spec(), expected);
  const absl::StatusOr<SealResult> seal = trainer.Seal();
  ASSERT_TRUE(Succeeds(seal));
  EXPECT_EQ(seal->rows, (LayerRows{{10, kRows}}));
  for (size_t i = 0; i < squares.size(); ++i) {
    EXPECT_NEAR(seal->tensor_sums_of_squares[i] / squares[i], 1, 1e-12) << model_.spec().tensors[i].name;
  }
}

TEST_F(NonFiniteTest, ARetryOfABadTileIsARepeat) {
  TestEngine engine(model_, TilesOf(4, model_));
  Trainer trainer(*engine);
  Dense dy = dy_;
  dy.at(5, 0) = NAN;
  const BackwardSpec header = trainer.BackwardHeader(0, kRows);
  for (const int64_t repeated : {int64_t{0}, kRows}) {
    const auto call = RunningCall::Backward(*engine, header, x_, dy).value();
    ASSERT_TRUE(Succeeds(call->SendAll()));
    ASSERT_TRUE(Succeeds(call->Wait()));
    EXPECT_EQ(call->Wait()->repeated_row_count, repeated);
  }
  trainer.sent()[header.layer] = kRows;
  EXPECT_FALSE(trainer.Seal()->finite);
}

TEST_F(NonFiniteTest, EveryTrainerLearnsWhoseItWas) {
  TestEngine engine(model_, TilesOf(4, model_));
  Trainer good(*engine, 0, 2), bad(*engine, 1, 2);
  good.Backward(0, x_, dy_);
  Dense dy = dy_;
  dy.at(9, 6) = INFINITY;
  bad.Backward(0, x_, dy);
  const Reply<SealResult> good_seal = good.StartSeal(), bad_seal = bad.StartSeal();
  for (const Reply<SealResult>& seal : {good_seal, bad_seal}) {
    ASSERT_TRUE(Succeeds(seal.Wait()));
    EXPECT_FALSE(seal.Wait()->finite);
    EXPECT_THAT(seal.Wait()->non_finite_origin, StartsWith("trainer rank 1, session "));
  }
  EXPECT_TRUE(Fails(good.Commit(), absl::StatusCode::kFailedPrecondition, Reason::kNonFinite, {"trainer rank 1"}));
}

TEST_F(NonFiniteTest, AGradientThatOverflowsIsFoundBySealingAndGoneAfterTheDiscard) {
  const Outcome clean = CleanStep();
  TestEngine engine(model_, TilesOf(4, model_));
  Trainer trainer(*engine);
  Dense x = x_, dy = dy_;
  for (double& value : x.values) value *= 1e4;
  for (double& value : dy.values) value *= 1e307;
  trainer.Backward(0, x, dy);
  const absl::StatusOr<SealResult> seal = trainer.Seal();
  ASSERT_TRUE(Succeeds(seal));
  EXPECT_FALSE(seal->finite);
  EXPECT_THAT(seal->non_finite_origin, StartsWith("the gradient of layers.10.mlp."));
  EXPECT_TRUE(Fails(trainer.Commit(), absl::StatusCode::kFailedPrecondition, Reason::kNonFinite));
  ASSERT_TRUE(Succeeds(trainer.Discard()));
  EXPECT_EQ(CleanStep(engine, trainer), clean);
}

TEST_F(NonFiniteTest, WhereNothingIsAddedItIsTheCallersOwnAffair) {
  TestEngine engine(model_, TilesOf(4, model_));
  Trainer trainer(*engine);
  Dense x = x_;
  x.at(5, 0) = NAN;
  const Dense y = trainer.Forward(0, x);
  EXPECT_TRUE(std::isnan(y.at(5, 0)));
  EXPECT_TRUE(std::isfinite(y.at(4, 0)) && std::isfinite(y.at(6, 0))) << "tokens are independent";
  BackwardSpec header = trainer.BackwardHeader(0, kRows);
  header.weight_gradient = false;
  const auto call = trainer.Start(header, x, dy_);
  ASSERT_TRUE(Succeeds(call->SendAll()));
  ASSERT_TRUE(Succeeds(call->Wait()));
  EXPECT_TRUE(trainer.Seal()->finite);
}

}  // namespace
}  // namespace shardmlp::testing
