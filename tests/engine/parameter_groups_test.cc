#include "server/engine/parameter_groups.h"

#include <limits>

#include "gtest/gtest.h"
#include "tests/engine/outcome.h"

namespace shardmlp::testing {
namespace {

ModelSpec Model() {
  ModelSpec model;
  for (const char* name : {"gate", "up", "down"}) {
    TensorSpec tensor;
    tensor.name = name;
    model.tensors.push_back(tensor);
  }
  return model;
}

::testing::AssertionResult Refuses(const std::vector<ParameterGroup>& groups, Reason reason,
                                   std::initializer_list<absl::string_view> named) {
  return Fails(ResolveGroups(groups, Model()), absl::StatusCode::kInvalidArgument, reason, named);
}

TEST(ParameterGroupsTest, EveryTensorGetsTheHyperparametersOfItsGroupInTheModelsOrder) {
  const Sgd sgd{.learning_rate = 0.5};
  const AdamW adamw{.learning_rate = 0.25};
  const auto resolved = ResolveGroups({{{"down"}, KeepFrozen{}}, {{"up", "gate"}, sgd}}, Model());
  ASSERT_TRUE(Succeeds(resolved));
  EXPECT_EQ(*resolved, (std::vector<Hyperparameters>{sgd, sgd, KeepFrozen{}}));
  EXPECT_EQ(*ResolveGroups({{{"gate", "up", "down"}, adamw}}, Model()),
            (std::vector<Hyperparameters>{adamw, adamw, adamw}));
}

TEST(ParameterGroupsTest, AnEmptyGroupIsNoHarm) {
  EXPECT_TRUE(Succeeds(ResolveGroups({{{}, Sgd{}}, {{"gate", "up", "down"}, Sgd{}}}, Model())));
}

TEST(ParameterGroupsTest, ATensorInNoGroupInTwoOrUnknownIsNamed) {
  EXPECT_TRUE(Refuses({}, Reason::kInvalidArgument, {"'gate'", "no parameter group"}));
  EXPECT_TRUE(Refuses({{{"gate", "up"}, Sgd{}}}, Reason::kInvalidArgument, {"'down'", "no parameter group"}));
  EXPECT_TRUE(Refuses({{{"gate", "up"}, Sgd{}}, {{"up", "down"}, Sgd{}}}, Reason::kInvalidArgument,
                      {"'up'", "two parameter groups"}));
  EXPECT_TRUE(
      Refuses({{{"gate", "up", "down", "gate"}, Sgd{}}}, Reason::kInvalidArgument, {"'gate'", "two parameter groups"}));
  EXPECT_TRUE(
      Refuses({{{"gate", "up", "down", "bias"}, Sgd{}}}, Reason::kUnknownTensor, {"parameter group 0", "'bias'"}));
}

TEST(ParameterGroupsTest, AHyperparameterOutOfRangeIsNamedWithItsGroup) {
  const auto second = [](const Hyperparameters& hyperparameters) {
    return std::vector<ParameterGroup>{{{"gate", "up"}, Sgd{}}, {{"down"}, hyperparameters}};
  };
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(Refuses(second(Sgd{.learning_rate = -1}), Reason::kInvalidArgument,
                      {"parameter group 1", "learning_rate", "-1"}));
  EXPECT_TRUE(Refuses(second(Sgd{.learning_rate = kNan}), Reason::kInvalidArgument, {"learning_rate", "nan"}));
  EXPECT_TRUE(Refuses(second(AdamW{.beta2 = 1}), Reason::kInvalidArgument, {"parameter group 1", "beta2"}));
  EXPECT_TRUE(Refuses(second(Sgd{.nesterov = true}), Reason::kInvalidArgument, {"nesterov"}));
}

}  // namespace
}  // namespace shardmlp::testing
