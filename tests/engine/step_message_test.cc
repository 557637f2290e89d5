// What replicas tell each other about steps, as it travels.
#include "server/engine/step_message.h"

#include <cmath>

#include "gtest/gtest.h"
#include "tests/engine/outcome.h"

namespace shardmlp::testing {
namespace {

TEST(StepMessageTest, KeepsEveryDouble) {
  for (const double value : {0.1, -0.0, 1e-308, 5e-324, 1.7976931348623157e308, HUGE_VAL}) {
    const auto back = ParseStepMessage(Serialize(SumReport{3, 4, {value}}));
    ASSERT_TRUE(Succeeds(back));
    EXPECT_EQ(std::get<SumReport>(*back).tensor_sums_of_squares[0], value);
  }
  const auto nan = ParseStepMessage(Serialize(SumReport{3, 4, {NAN}}));
  EXPECT_TRUE(std::isnan(std::get<SumReport>(*nan).tensor_sums_of_squares[0]));
}

TEST(StepMessageTest, ACommitComesBackAsItWas) {
  CommitSpec commit;
  commit.session_id = int64_t{1} << 62;
  commit.step = 3;
  commit.attempt = 4;
  commit.groups = {{{"gate", "up"}, AdamW{0.1, 0.2, 0.3, 0.4, 0.5}},
                   {{"down"}, Sgd{0.1, 0.2, -0.3, 0.4, true}},
                   {{"bias"}, KeepFrozen{}}};
  commit.gradient_scale = 1.0 / 3;
  commit.fresh_optimizer = true;
  const auto back = ParseStepMessage(Serialize(commit));
  ASSERT_TRUE(Succeeds(back));
  const CommitSpec& got = std::get<CommitSpec>(*back);
  EXPECT_EQ(got.session_id, commit.session_id);
  EXPECT_EQ(got.step, 3);
  EXPECT_EQ(got.attempt, 4);
  EXPECT_EQ(got.groups, commit.groups);
  EXPECT_EQ(got.gradient_scale, commit.gradient_scale);
  EXPECT_TRUE(got.fresh_optimizer);
}

TEST(StepMessageTest, WhatIsNoMessageIsRefused) {
  for (const char* text : {"", "{}", "[1]", R"({"kind": 9, "body": {}})", R"({"kind": 1, "body": {"step": "x"}})"}) {
    EXPECT_TRUE(Fails(ParseStepMessage(text), absl::StatusCode::kInternal, Reason::kInternal)) << text;
  }
}

}  // namespace
}  // namespace shardmlp::testing
