// shardmlpctl top and drain: what they print, and their exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "tests/client/run_ctl.h"

namespace shardmlp {
namespace {

using fake::FakeModel;
using fake::FakeServer;
using fake::FakeServerOptions;
using fake::Moment;
using fake::Refuse;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// A server that computes 100 rows between two looks.
v1::GetMetricsResponse HundredRows(int look) {
  v1::GetMetricsResponse response;
  v1::MetricFamily& family = *response.add_families();
  family.set_name("shardmlp_rows_total");
  v1::MetricSeries& series = *family.add_series();
  (*series.mutable_labels())["pass"] = "forward";
  series.set_value(100.0 * look);
  return response;
}

std::vector<std::string> Lines(const Outcome& outcome) {
  return absl::StrSplit(outcome.output, '\n', absl::SkipEmpty());
}

std::vector<nlohmann::json> Objects(const Outcome& outcome) {
  std::vector<nlohmann::json> objects;
  for (const std::string& line : Lines(outcome)) objects.push_back(nlohmann::json::parse(line));
  return objects;
}

double Rows(const nlohmann::json& report) {
  return report["rows_per_second"]["forward"].get<double>() * report["seconds"].get<double>();
}

TEST(CtlTopTest, AReportIsOfWhatWasDoneSinceTheLast) {
  FakeServer server({.model = FakeModel(), .metrics = HundredRows});
  const Outcome outcome = RunAgainst(server, "top --json --count=3 --interval=20ms");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  const auto reports = Objects(outcome);
  ASSERT_EQ(reports.size(), 3u);
  for (const auto& report : reports) {
    EXPECT_NEAR(Rows(report), 100, 1e-6);
    EXPECT_GT(report["seconds"], 0);
    EXPECT_EQ(report["model_type"], "llama");
  }
}

TEST(CtlTopTest, OffATerminalItIsAHeadingAndALineAReport) {
  FakeServer server({.model = FakeModel(), .metrics = HundredRows});
  const Outcome outcome = RunAgainst(server, "top --count=21 --interval=1ms");
  EXPECT_EQ(outcome.exit_code, 0);
  const auto lines = Lines(outcome);
  ASSERT_EQ(lines.size(), 23u) << "21, and a heading above the first and the 21st";
  EXPECT_THAT(lines[0], HasSubstr("FLOP/s"));
  EXPECT_THAT(lines[21], HasSubstr("FLOP/s"));
  EXPECT_THAT(outcome.output, Not(HasSubstr("\x1b"))) << "control sequences are for terminals";
}

TEST(CtlTopTest, ItGoesOnWhenTheServerIsAwayAndWhatWasDoneMeanwhileIsNotLost) {
  FakeServer server({.model = FakeModel(), .metrics = HundredRows});
  server.SetHook([](const Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method != "GetMetrics" || moment.try_number != 2) return std::nullopt;
    return Refuse(absl::StatusCode::kUnavailable, Reason::kLoading, "still loading");
  });
  const Outcome outcome = RunAgainst(server, "top --json --count=4 --interval=20ms");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  const auto reports = Objects(outcome);
  ASSERT_EQ(reports.size(), 4u);
  EXPECT_FALSE(reports[1]["reached"]);
  EXPECT_THAT(reports[1]["error"].get<std::string>(), HasSubstr("still loading"));
  EXPECT_GT(reports[1]["away_seconds"], 0);
  EXPECT_TRUE(reports[2]["reached"]);
  EXPECT_NEAR(Rows(reports[2]), 200, 1e-6);
  EXPECT_NEAR(Rows(reports[3]), 100, 1e-6);
}

TEST(CtlTopTest, WhoseLastLookFailedSaysSoByItsExitCode) {
  FakeServer server({.model = FakeModel(), .metrics = HundredRows});
  server.SetHook([](const Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method != "GetMetrics" || moment.try_number == 0) return std::nullopt;
    return Refuse(absl::StatusCode::kUnauthenticated, Reason::kUnauthenticated, "the token is none");
  });
  const Outcome outcome = RunAgainst(server, "top --count=1 --interval=1ms");
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(outcome.output, HasSubstr("not reached"));
  EXPECT_THAT(outcome.output, HasSubstr("the token is none [UNAUTHENTICATED, UNAUTHENTICATED]"));
}

// Of a server that is at step 12 then.
v1::DrainResponse Drained(int64_t weights_version) {
  v1::DrainResponse response;
  response.mutable_position()->set_step(12);
  response.mutable_position()->set_weights_version(weights_version);
  return response;
}

constexpr int64_t kItsVersion = 11;  // FakeServer's, which therefore still stands
constexpr int64_t kOther = 99;       // so that what answers now is another server

TEST(CtlDrainTest, WhatWasLeftIsToldOnceTheServerIsGone) {
  v1::DrainResponse drained = Drained(kOther);
  drained.mutable_checkpoint()->set_name("drain");
  drained.mutable_checkpoint()->set_step(12);
  drained.mutable_checkpoint()->set_byte_count(4096);
  FakeServer server({.model = FakeModel(), .drain = drained});
  const Outcome text = RunAgainst(server, "drain");
  EXPECT_EQ(text.exit_code, 0) << text.output;
  EXPECT_THAT(text.output, HasSubstr("drained at step 12, and gone\nsaved drain: step 12, 4096 bytes\n"));
  const auto json = nlohmann::json::parse(RunAgainst(server, "drain --json 2>/dev/null").output);
  EXPECT_EQ(json["step"], 12);
  EXPECT_EQ(json["checkpoint"]["byte_count"], 4096);
  EXPECT_EQ(json["cut_off"], false);
}

TEST(CtlDrainTest, WhatWasCutOffOrLeftUndecidedIsAnExitCodeOfItsOwn) {
  v1::DrainResponse cut = Drained(kOther), undecided = Drained(kOther);
  cut.set_cut_off(true);
  undecided.set_step_undecided(true);
  for (const auto& [drained, word] : {std::pair(cut, "CUT OFF"), std::pair(undecided, "UNDECIDED")}) {
    FakeServer server({.model = FakeModel(), .drain = drained});
    const Outcome outcome = RunAgainst(server, "drain");
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_THAT(outcome.output, HasSubstr(word));
  }
}

TEST(CtlDrainTest, AServerThatIsNotGoneInTimeIsAnExitCodeOfItsOwn) {
  FakeServer stands({.model = FakeModel(), .drain = Drained(kItsVersion)});
  const Outcome there = RunAgainst(stands, "drain --timeout=300ms");
  EXPECT_EQ(there.exit_code, 4);
  EXPECT_THAT(there.output, HasSubstr("has drained, and is still there"));

  absl::Notification over;
  FakeServer busy({.model = FakeModel()});
  busy.SetHook([&](const Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method == "Drain") over.WaitForNotification();
    return std::nullopt;
  });
  const Outcome late = RunAgainst(busy, "drain --timeout=500ms");
  over.Notify();
  EXPECT_EQ(late.exit_code, 4);
  EXPECT_THAT(late.output, HasSubstr("0 calls open, 0 of 0 trainers have sealed"));
  EXPECT_THAT(late.output, HasSubstr("has not drained in time, and goes on"));
}

TEST(CtlDrainTest, ARefusalAndAServerThatDiesAreFailures) {
  FakeServer server({.model = FakeModel()});
  grpc::Status answer = Refuse(absl::StatusCode::kPermissionDenied, Reason::kPermissionDenied, "not you");
  server.SetHook([&](const Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method != "Drain") return std::nullopt;
    return answer;
  });
  const Outcome refused = RunAgainst(server, "drain");
  EXPECT_EQ(refused.exit_code, 3);
  EXPECT_THAT(refused.output, HasSubstr("not you [PERMISSION_DENIED, PERMISSION_DENIED]"));
  answer = grpc::Status(grpc::StatusCode::UNAVAILABLE, "Socket closed");
  const Outcome died = RunAgainst(server, "drain");
  EXPECT_EQ(died.exit_code, 3);
  EXPECT_THAT(died.output, HasSubstr("went away without a word of what it left"));
  EXPECT_EQ(server.Count("Drain"), 2) << "none was sent again";
}

}  // namespace
}  // namespace shardmlp
