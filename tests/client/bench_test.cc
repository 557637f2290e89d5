// `shardmlpctl bench` against a server that counts what comes.
#include "client/cli/bench/bench.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/client/run_ctl.h"

namespace shardmlp {
namespace {

using fake::FakeServer;
using testing::HasSubstr;
using testing::Not;

TEST(BenchTest, CallsAreATrainersWithoutWeightGradients) {
  FakeServer server;
  const Outcome outcome = RunAgainst(server, "bench --layers=0-1 --rows=7 --calls=8 --warm-up=0s --json");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  // Forward of 0 and 1, backward of 1 and 0, twice.
  EXPECT_EQ(server.Count("Forward"), 4);
  EXPECT_EQ(server.Count("Backward"), 4);
  EXPECT_EQ(server.Count("CloseSession"), 1);
  EXPECT_EQ(server.Count("SealStep") + server.Count("CommitStep") + server.Count("DiscardStep"), 0);
  std::string order;
  for (const fake::SeenCall& call : server.calls()) {
    if (!call.complete) continue;
    if (call.method == "Forward") absl::StrAppend(&order, "f", call.forward.layer());
    if (call.method == "Backward") absl::StrAppend(&order, "b", call.backward.layer());
    EXPECT_FALSE(call.backward.weight_gradient());
  }
  EXPECT_EQ(order, "f0f1b1b0f0f1b1b0");
  const auto json = nlohmann::json::parse(outcome.output);
  EXPECT_EQ(json["calls"], 8);
  EXPECT_EQ(json["forward"]["tokens"], 28);
  // Layer 0 is [T, 6] -> [T, 4], layer 1 [T, 5] -> [T, 5]; 7 rows of each, in f32, twice.
  EXPECT_EQ(json["forward"]["sent_bytes"], 2 * 7 * (6 + 5) * 4);
  EXPECT_EQ(json["forward"]["received_bytes"], 2 * 7 * (4 + 5) * 4);
  EXPECT_EQ(json["backward"]["sent_bytes"], 2 * 7 * (6 + 4 + 5 + 5) * 4);
  EXPECT_EQ(json["backward"]["received_bytes"], 2 * 7 * (6 + 5) * 4);
  EXPECT_EQ(json["failed_calls"], 0);
  EXPECT_EQ(json["load"]["loop"], "closed");
}

TEST(BenchTest, AWarmUpIsNotCounted) {
  FakeServer server;
  const Outcome outcome =
      RunAgainst(server, "bench --layers=0 --rows=1 --calls=4 --warm-up=20ms --forward-only --json");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  const auto json = nlohmann::json::parse(outcome.output);
  EXPECT_EQ(json["calls"], 4);
  EXPECT_GT(json["warm_up"]["calls"], 0);
  EXPECT_EQ(server.Count("Forward"), 4 + json["warm_up"]["calls"].get<int>());
  EXPECT_EQ(server.Count("Backward"), 0);
}

TEST(BenchTest, ATrainersStepIsDiscarded) {
  FakeServer server;
  const Outcome outcome = RunAgainst(server, "bench --train --layers=0 --rows=2 --calls=2 --warm-up=0s");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_TRUE(server.calls().back().backward.weight_gradient());
  EXPECT_EQ(server.Count("DiscardStep"), 1);
  EXPECT_EQ(server.Count("CommitStep"), 0);
  EXPECT_THAT(outcome.output, HasSubstr("with weight gradients"));
}

TEST(BenchTest, RefusalsAreCountedAndNotSentAgain) {
  FakeServer server;
  server.SetHook([](const fake::Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method != "Forward" || moment.message != 0 || moment.try_number > 1) return std::nullopt;
    return fake::Refuse(absl::StatusCode::kResourceExhausted, Reason::kOverloaded, "too many calls");
  });
  const Outcome outcome = RunAgainst(server, "bench --layers=0 --rows=1 --calls=4 --warm-up=0s");
  EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
  EXPECT_EQ(server.Count("Forward"), 2) << "and two backward calls";
  EXPECT_THAT(outcome.output, HasSubstr("2 calls failed: OVERLOADED: "));
  EXPECT_THAT(outcome.output, HasSubstr("too many calls"));
  // As a trainer does.
  server.SetHook([](const fake::Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method != "Forward" || moment.message != 0 || moment.try_number > 2) return std::nullopt;
    return fake::Refuse(absl::StatusCode::kResourceExhausted, Reason::kOverloaded, "too many calls");
  });
  EXPECT_EQ(RunAgainst(server, "bench --layers=0 --rows=1 --calls=4 --warm-up=0s --retry=1m").exit_code, 0);
  EXPECT_EQ(server.Count("Forward"), 2 + 3);
}

TEST(BenchTest, ASessionThatTheServerLostIsOpenedAgain) {
  FakeServer server;
  server.SetHook([](const fake::Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method != "Backward" || moment.message != 0 || moment.try_number > 0) return std::nullopt;
    return fake::Refuse(absl::StatusCode::kNotFound, Reason::kUnknownSession, "no such session");
  });
  const Outcome outcome = RunAgainst(server, "bench --layers=0 --rows=1 --calls=5 --warm-up=0s --json");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_EQ(server.Count("OpenSession"), 2);
  const auto json = nlohmann::json::parse(outcome.output);
  EXPECT_EQ(json["failures"]["UNKNOWN_SESSION"]["calls"], 1);
  EXPECT_EQ(json["calls"], 4);
}

TEST(BenchTest, CommandLinesAreChecked) {
  const std::pair<std::string, std::string> refusals[] = {
      {"bench --clients=0", "--clients: Value 0 not in range 1 to 4096"},
      {"bench --rate=-1", "--rate: Value -1 not in range"},
      {"bench --dtype=int8", "--dtype: int8 not in {f32,bf16,f16,f64}"},
      {"bench --duration=10", "--duration: got \"10\", expected a time such as 10s"},
      {"info --clients=2", "not expected: --clients=2"},
  };
  for (const auto& [arguments, message] : refusals) {
    const Outcome outcome = RunCtl(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_THAT(outcome.output, HasSubstr(message)) << arguments;
  }
  const Outcome help = RunCtl("bench --help");
  EXPECT_EQ(help.exit_code, 0);
  for (const char* part : {"shardmlpctl bench", "--target", "--rate", "--json", "--rows", "Examples:", "Exit codes:"}) {
    EXPECT_THAT(help.output, HasSubstr(part));
  }
  EXPECT_THAT(RunCtl("verify --help").output, Not(HasSubstr("--clients")));
  EXPECT_EQ(RunCtl(absl::StrCat("--connect-timeout=50ms --target=unix:", testing::TempDir(), "none bench")).exit_code,
            3);
}

TEST(BenchTest, APlotTakesGnuplot) {
  FakeServer server;
  const std::string path = std::getenv("PATH");
  setenv("PATH", "/nowhere", /*overwrite=*/1);
  const Outcome outcome = RunAgainst(server, absl::StrCat("bench --plot=", testing::TempDir(), "x.png"));
  setenv("PATH", path.c_str(), /*overwrite=*/1);
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(outcome.output, HasSubstr("--plot takes gnuplot, which is not on the PATH"));
  EXPECT_EQ(server.Count("OpenSession"), 0) << "said ahead of the load";
}

}  // namespace
}  // namespace shardmlp
