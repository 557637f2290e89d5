#include "tests/engine/twin.h"

#include <algorithm>

#include "gtest/gtest.h"
#include "tests/engine/outcome.h"

namespace shardmlp::testing {

std::vector<NaiveGradients> ZeroGradients(const std::vector<NaiveMlp>& weights) { return Difference(weights, weights); }

double RelativeDifference(const std::vector<double>& got, const std::vector<double>& reference) {
  Dense a(1, static_cast<int64_t>(got.size())), b(1, static_cast<int64_t>(reference.size()));
  a.values = got;
  b.values = reference;
  return RelativeDifference(a, b);
}

Dense InputOf(const MlpConfig& mlp, int64_t tokens, uint64_t seed) {
  return RandomDense(tokens, mlp.hidden_size, seed);
}
Dense OutputGradientOf(const MlpConfig& mlp, int64_t tokens, uint64_t seed) {
  return RandomDense(tokens, mlp.output_size, seed + 1000, 0.05 / static_cast<double>(std::max<int64_t>(tokens, 1)));
}

void ExpectStep(const TestEngine& engine, Trainer& trainer, std::vector<NaiveGradients> expected) {
  const absl::StatusOr<SealResult> seal = trainer.Seal();
  ASSERT_TRUE(Succeeds(seal));
  EXPECT_TRUE(seal->finite);
  EXPECT_EQ(seal->rows, trainer.sent());
  EXPECT_LE(RelativeDifference(seal->tensor_sums_of_squares, Squares(engine->model(), expected)), kTwinBound);
  const std::vector<NaiveMlp> before = engine.Weights();
  ASSERT_TRUE(Succeeds(trainer.Commit()));
  const std::vector<NaiveGradients> got = Difference(before, engine.Weights());
  for (size_t n = 0; n < expected.size(); ++n) {
    expected[n].dx = Dense();
    EXPECT_LE(RelativeDifference(got[n], expected[n]), kTwinBound) << "layer " << n;
  }
}

}  // namespace shardmlp::testing
