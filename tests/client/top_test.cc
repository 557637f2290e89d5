// shardmlpctl top: Prometheus' formulas, what it shows of them, and a server that goes away and comes back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "client/cli/top/activity.h"
#include "client/cli/top/top_report.h"
#include "client/cli/top/window.h"
#include "client/cli/units.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::Pair;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

ClientSeries Plain(const std::string& name, const Labels& labels, double value) {
  return {.name = name, .labels = labels, .value = value, .buckets = {}, .sum = 0};
}

ClientSeries Histogram(const std::string& name, const Labels& labels, const std::vector<ClientBucket>& buckets,
                       double sum) {
  return {.name = name, .labels = labels, .value = 0, .buckets = buckets, .sum = sum};
}

TEST(WindowTest, RatesAreTheGrowthASecondOfWhatHasTheLabels) {
  const Window window(
      {Plain("rows", {{"pass", "forward"}, {"at", "a"}}, 100), Plain("rows", {{"pass", "forward"}, {"at", "b"}}, 10),
       Plain("rows", {{"pass", "backward"}}, 5)},
      {Plain("rows", {{"pass", "forward"}, {"at", "a"}}, 140), Plain("rows", {{"pass", "forward"}, {"at", "b"}}, 20),
       Plain("rows", {{"pass", "backward"}}, 5), Plain("rows", {{"pass", "new"}}, 1000)},
      4);
  EXPECT_EQ(window.Rate("rows", {{"pass", "forward"}}), 12.5);
  EXPECT_EQ(window.Rate("rows", {{"pass", "forward"}, {"at", "b"}}), 2.5);
  EXPECT_EQ(window.Rate("rows"), 12.5) << "what was not there before has no rate";
  EXPECT_EQ(window.Rate("columns"), 0);
  EXPECT_THAT(window.RatesBy("pass", "rows"), ElementsAre(Pair("backward", 0), Pair("forward", 12.5)));
  EXPECT_EQ(window.Value("rows", {{"pass", "new"}}), 1000);
  EXPECT_EQ(window.ValuesBy("pass", "rows").at("forward"), 160);
}

// As rate() has it: 7 of 12 were counted by the server that is there now.
TEST(WindowTest, ACounterThatFellWasStartedAgain) {
  EXPECT_EQ(Window({Plain("steps", {}, 12)}, {Plain("steps", {}, 7)}, 2).Rate("steps"), 3.5);
  const std::vector<ClientBucket> before = {{1, 8}, {kInfinity, 9}}, now = {{1, 3}, {kInfinity, 4}};
  const Window window({Histogram("s", {}, before, 50)}, {Histogram("s", {}, now, 20)}, 2);
  EXPECT_EQ(window.CountRate("s"), 2);
  EXPECT_EQ(window.SumRate("s"), 10);
}

double QuantileOf(double q, const std::vector<ClientBucket>& grown) {
  std::vector<ClientBucket> before = grown;
  for (ClientBucket& bucket : before) bucket.cumulative_count = 0;
  return Window({Histogram("s", {}, before, 0)}, {Histogram("s", {}, grown, 0)}, 1).Quantile(q, "s");
}

// The values are those of `promtool test rules` for histogram_quantile() over the same buckets.
TEST(WindowTest, QuantilesAreThoseOfPrometheus) {
  const std::vector<ClientBucket> buckets = {{0.1, 10}, {0.25, 30}, {1, 38}, {kInfinity, 40}};
  EXPECT_DOUBLE_EQ(QuantileOf(0.1, buckets), 0.04);
  EXPECT_DOUBLE_EQ(QuantileOf(0.25, buckets), 0.1) << "exactly a bucket's bound";
  EXPECT_DOUBLE_EQ(QuantileOf(0.5, buckets), 0.175);
  EXPECT_DOUBLE_EQ(QuantileOf(0.9, buckets), 0.8125);
  EXPECT_DOUBLE_EQ(QuantileOf(0.99, buckets), 1) << "above the last bound";
  EXPECT_DOUBLE_EQ(QuantileOf(0.5, {{0.1, 0}, {0.25, 4}, {kInfinity, 4}}), 0.175) << "an empty bucket before";
  EXPECT_TRUE(std::isnan(QuantileOf(0.5, {{0.1, 0}, {kInfinity, 0}}))) << "nothing was observed";
  EXPECT_TRUE(std::isnan(QuantileOf(0.5, {{kInfinity, 4}}))) << "no bounds";
  EXPECT_TRUE(std::isnan(QuantileOf(0.5, {{0.1, 4}}))) << "no last bucket";
  EXPECT_TRUE(std::isnan(QuantileOf(0.5, {}))) << "no histogram";
}

TEST(WindowTest, AQuantileIsOfAllThatHaveTheLabels) {
  const std::vector<ClientBucket> none = {{1, 0}, {2, 0}, {kInfinity, 0}};
  const std::vector<ClientSeries> before = {Histogram("s", {{"pass", "a"}, {"stage", "x"}}, none, 0),
                                            Histogram("s", {{"pass", "b"}, {"stage", "x"}}, none, 0)};
  const Window window(before,
                      {Histogram("s", {{"pass", "a"}, {"stage", "x"}}, {{1, 4}, {2, 4}, {kInfinity, 4}}, 4),
                       Histogram("s", {{"pass", "b"}, {"stage", "x"}}, {{1, 0}, {2, 4}, {kInfinity, 4}}, 6)},
                      1);
  EXPECT_DOUBLE_EQ(window.Quantile(0.5, "s", {{"stage", "x"}}), 1);
  EXPECT_DOUBLE_EQ(window.Quantile(0.5, "s", {{"pass", "b"}}), 1.5);
}

// A restart between the looks: the first bucket fell, the others had grown past what they were.
TEST(WindowTest, BucketsThatDoNotFitTogetherStillGiveAQuantileWithinThem) {
  const Window window({Histogram("s", {}, {{1, 5}, {2, 5}, {kInfinity, 5}}, 0)},
                      {Histogram("s", {}, {{1, 4}, {2, 6}, {kInfinity, 6}}, 0)}, 1);
  const double median = window.Quantile(0.5, "s");
  EXPECT_GE(median, 0);
  EXPECT_LE(median, 2);
}

// A server's series, `times` the work of one second.
std::vector<ClientSeries> Work(double times) {
  const auto tiles = static_cast<int64_t>(times * 20);
  std::vector<ClientSeries> series = {
      Plain("shardmlp_step", {}, 7),
      Plain("shardmlp_steps_total", {{"outcome", "committed"}}, 2 * times),
      Plain("shardmlp_rows_total", {{"pass", "forward"}}, 10240 * times),
      Plain("shardmlp_gemm_flops_total", {{"kind", "useful"}}, 9e9 * times),
      Plain("shardmlp_gemm_flops_total", {{"kind", "recomputed"}}, 1e9 * times),
      Plain("shardmlp_sessions", {{"role", "train"}}, 2),
      Plain("shardmlp_sessions", {{"role", "read"}}, 1),
      Plain("shardmlp_open_calls", {}, 3),
      Plain("shardmlp_planned_memory_bytes", {{"use", "weights"}}, 1 << 20),
      Plain("shardmlp_planned_memory_bytes", {{"use", "stash"}}, 1 << 20),
      Plain("shardmlp_stash_bytes", {}, 1 << 18),
      Plain("shardmlp_stash_tickets_total", {{"event", "hit"}}, 3 * times),
      Plain("shardmlp_stash_tickets_total", {{"event", "missed"}}, 1 * times),
      Plain("process_resident_memory_bytes", {}, 3 << 20),
      Plain("shardmlp_memory_bound_bytes", {}, 4 << 20),
      Plain("shardmlp_replicas", {}, 2),
      Plain("shardmlp_replica_members", {}, 1),
      Plain("shardmlp_failures_total", {{"reason", "OVERLOADED"}}, 5 * times),
      Plain("shardmlp_failures_total", {{"reason", "STALLED"}}, 0),
      Plain("grpc_server_started_total", {{"grpc_method", "Forward"}}, 20 * times),
      Plain("grpc_server_started_total", {{"grpc_method", "Backward"}}, 0),
      Plain("grpc_server_handled_total", {{"grpc_method", "Forward"}, {"grpc_code", "OK"}}, 12 * times),
      Plain("grpc_server_handled_total", {{"grpc_method", "Forward"}, {"grpc_code", "Canceled"}}, 3 * times),
      Plain("grpc_server_handled_total", {{"grpc_method", "Forward"}, {"grpc_code", "ResourceExhausted"}}, 5 * times),
      Histogram("shardmlp_stage_seconds", {{"pass", "forward"}, {"stage", "compute"}},
                {{0.01, 0}, {0.05, tiles}, {kInfinity, tiles}}, 0.5 * times),
  };
  return series;
}

TopReport Report() {
  TopReport report{.target = "there:1",
                   .time = absl::FromUnixSeconds(1000),
                   .reached = {},
                   .away = {},
                   .activity = ActivityIn(Window(Work(1), Work(3), 2)),
                   .model = {}};
  report.model.model_type = "llama";
  report.model.trainers = {{.run_id = "mine", .trainer_rank = 1, .trainer_count = 2, .sealed = true}};
  return report;
}

TEST(TopReportTest, TheActivityIsTheDashboards) {
  const Activity a = Report().activity;
  EXPECT_EQ(a.step, 7);
  EXPECT_EQ(a.attempts.at("committed"), 2);
  EXPECT_EQ(a.rows.at("forward"), 10240);
  EXPECT_EQ(a.tile_rows.at("forward"), 512);
  EXPECT_TRUE(std::isnan(a.tile_rows.at("backward")));
  EXPECT_DOUBLE_EQ(a.busy_ratio, 0.5);
  EXPECT_DOUBLE_EQ(a.recomputed_ratio, 0.1);
  EXPECT_DOUBLE_EQ(a.stages.at("forward").at("compute").per_second, 20);
  EXPECT_DOUBLE_EQ(a.stages.at("forward").at("compute").p50_seconds, 0.03);
  EXPECT_TRUE(std::isnan(a.stages.at("backward").at("send").p99_seconds));
  EXPECT_DOUBLE_EQ(a.failed_ratio, 0.25) << "by clients that went away it is not";
  EXPECT_THAT(a.failures, ElementsAre(Pair("OVERLOADED", 5)));
  EXPECT_THAT(a.rpcs, ElementsAre(Pair("Forward", testing::Field(&Durations::per_second, 20))));
  EXPECT_DOUBLE_EQ(a.stash_full_ratio, 0.25);
  EXPECT_DOUBLE_EQ(a.stash_found_ratio, 0.75);
}

TEST(TopReportTest, AnIdleServerDividesByNothing) {
  const Activity a = ActivityIn(Window(Work(1), Work(1), 2));
  EXPECT_TRUE(std::isnan(a.recomputed_ratio) && std::isnan(a.failed_ratio) && std::isnan(a.stash_found_ratio));
  EXPECT_EQ(a.busy_ratio, 0);
  EXPECT_THAT(a.rpcs, IsEmpty());
}

TEST(TopReportTest, JsonIsALineWithUnitsInItsNamesAndNullForNothing) {
  const std::string line = TopJson(Report());
  EXPECT_EQ(line.find('\n'), line.size() - 1);
  const auto json = nlohmann::json::parse(line);
  EXPECT_EQ(json["reached"], true);
  EXPECT_EQ(json["time"], "1970-01-01T00:16:40+00:00");
  EXPECT_EQ(json["seconds"], 2.0);
  EXPECT_EQ(json["rows_per_second"]["forward"], 10240.0);
  EXPECT_EQ(json["tile_rows"]["backward"], nullptr);
  EXPECT_EQ(json["stages"]["forward"]["compute"]["p50_seconds"], 0.03);
  EXPECT_EQ(json["memory"]["planned_bytes"]["weights"], 1048576.0);
  EXPECT_EQ(json["sessions"]["train"], 2.0);
  EXPECT_EQ(json["trainers"][0]["sealed"], true);
  EXPECT_EQ(json["replicas"]["members"], 1);
}

TEST(TopReportTest, TheScreenHasItAllInPlainWords) {
  const std::string screen = absl::StrJoin(TopScreen(Report()), "\n");
  for (const char* part : {"there:1  llama in f32", "step       7, attempt 0; a second: 2 committed",
                           "3 open, 0 tiles queued, the device is busy 50.0 %", "forward 10.2k (512 a tile)",
                           "10.0 GFLOP/s, of which 10.0 % recomputed", "resident 3.00 MiB of 4.00 MiB (75.0 %)",
                           "stash      256 KiB of 1.00 MiB, 75.0 % found", "1 of 2 together", "2 train, 1 read",
                           "run 'mine' rank 1 of 2, sealed", "Forward", "OVERLOADED", "failed     25.0 %"}) {
    EXPECT_THAT(screen, HasSubstr(part));
  }
  EXPECT_THAT(screen, Not(HasSubstr("STALLED")));
  EXPECT_THAT(screen, Not(HasSubstr("NOT FINITE")));
}

TEST(TopReportTest, AServerThatIsAwayIsShownSoWithWhatItDidBefore) {
  TopReport report = Report();
  report.reached = Error(absl::StatusCode::kUnavailable, Reason::kUnreachable, "gave up on there:1");
  report.away = absl::Milliseconds(7200);
  EXPECT_THAT(absl::StrJoin(TopScreen(report), "\n"),
              AllOf(HasSubstr("NOT REACHED for 8s: gave up on there:1"), HasSubstr("forward 10.2k")));
  EXPECT_THAT(TopLine(report), HasSubstr("not reached for 8s: gave up on there:1"));
  const auto json = nlohmann::json::parse(TopJson(report));
  EXPECT_EQ(json["reached"], false);
  EXPECT_EQ(json["reason"], "UNREACHABLE");
  EXPECT_EQ(json["away_seconds"], 7.2);
  EXPECT_FALSE(json.contains("step"));
}

TEST(TopReportTest, ColumnsStandUnderTheirHeadings) {
  const std::string heading = TopLineHeading(), line = TopLine(Report());
  EXPECT_EQ(heading.size(), line.size());
  for (const char* part : {"10.2k", "50.0 %", "10.0G", "25.0 %", "3.00 MiB"}) EXPECT_THAT(line, HasSubstr(part));
}

TEST(UnitsTest, NumbersHaveThreeDigitsAndAUnit) {
  EXPECT_THAT((std::vector<std::string>{Bytes(0), Bytes(1023), Bytes(1536), Bytes(-2048), Bytes(5.5 * (1 << 30))}),
              ElementsAre("0 B", "1023 B", "1.50 KiB", "-2.00 KiB", "5.50 GiB"));
  EXPECT_THAT((std::vector<std::string>{Count(0), Count(0.125), Count(7), Count(999.9), Count(1234567), Count(2e15)}),
              ElementsAre("0", "0.12", "7", "1.00k", "1.23M", "2.00P"));
  EXPECT_THAT((std::vector<std::string>{Seconds(0), Seconds(25e-6), Seconds(0.0123), Seconds(0.9999), Seconds(90)}),
              ElementsAre("0 us", "25 us", "12.3 ms", "1.00 s", "90.0 s"));
  EXPECT_EQ(Flops(1.5e12), "1.50 TFLOP/s");
  EXPECT_THAT((std::vector<std::string>{Percent(0.123), Percent(1), Percent(std::nan("")), Seconds(std::nan(""))}),
              ElementsAre("12.3 %", "100 %", "-", "-"));
}

}  // namespace
}  // namespace shardmlp
