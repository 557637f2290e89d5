// A server's metrics over gRPC, and who may have it drain.
#include <cmath>
#include <map>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "shardmlp/v1/operation.grpc.pb.h"
#include "tests/rpc/service_test.h"

namespace shardmlp {
namespace {

using Stub = v1::Operation::Stub;
using testing::HasSubstr;

class OperationServiceTest : public ServiceTest<v1::Operation> {
 protected:
  explicit OperationServiceTest(const RpcServerOptions& options = {}) : ServiceTest(options) {}

  v1::GetMetricsResponse GetMetrics() {
    v1::GetMetricsResponse response;
    EXPECT_TRUE(Call(&Stub::GetMetrics, v1::GetMetricsRequest(), response).ok());
    return response;
  }
  absl::Status Drain(v1::DrainResponse& response) { return Call(&Stub::Drain, v1::DrainRequest(), response); }
  absl::Status Drain() {
    v1::DrainResponse response;
    return Drain(response);
  }
};

// "name{label="value"} 3" as the text exposition has it, but for how numbers are written.
using Exposition = std::map<std::string, double>;

std::string SeriesName(const std::string& name, std::map<std::string, std::string> labels) {
  const auto write = [](std::string* text, const auto& label) {
    absl::StrAppend(text, label.first, "=", label.second);
  };
  return absl::StrCat(name, "{", absl::StrJoin(labels, ",", write), "}");
}

Exposition Written(const v1::GetMetricsResponse& response) {
  Exposition written;
  for (const v1::MetricFamily& family : response.families()) {
    for (const v1::MetricSeries& series : family.series()) {
      std::map<std::string, std::string> labels(series.labels().begin(), series.labels().end());
      if (!series.has_histogram()) {
        written[SeriesName(family.name(), labels)] = series.value();
        continue;
      }
      const auto& buckets = series.histogram().buckets();
      written[SeriesName(family.name() + "_sum", labels)] = series.histogram().sum();
      written[SeriesName(family.name() + "_count", labels)] =
          static_cast<double>(buckets[buckets.size() - 1].cumulative_count());
      for (const v1::MetricBucket& bucket : buckets) {
        labels["le"] = absl::StrCat(bucket.upper_bound());
        written[SeriesName(family.name() + "_bucket", labels)] = static_cast<double>(bucket.cumulative_count());
      }
    }
  }
  return written;
}

Exposition Read(const std::string& text) {
  Exposition read;
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    if (line[0] == '#') continue;
    const std::pair<std::string, std::string> parts = absl::StrSplit(line, absl::MaxSplits(' ', 1));
    const std::pair<std::string, std::string> name = absl::StrSplit(parts.first, absl::MaxSplits('{', 1));
    std::map<std::string, std::string> labels;
    for (const absl::string_view label : absl::StrSplit(name.second, absl::ByAnyChar(",}"), absl::SkipEmpty())) {
      const std::pair<std::string, std::string> entry = absl::StrSplit(label, absl::MaxSplits('=', 1));
      std::string value = entry.second.substr(1, entry.second.size() - 2);  // of its quotes
      if (entry.first == "le") value = absl::StrCat(value == "+Inf" ? HUGE_VAL : std::stod(value));
      labels[entry.first] = value;
    }
    read[SeriesName(name.first, labels)] = std::stod(parts.second);
  }
  return read;
}

// What is not the same twice: the process's, and the rpc that asks.
Exposition Steady(Exposition exposition) {
  std::erase_if(exposition, [](const auto& entry) {
    return entry.first.starts_with("process_") || entry.first.find("grpc_method=GetMetrics") != std::string::npos;
  });
  return exposition;
}

TEST_F(OperationServiceTest, GetMetricsGivesWhatTheExpositionHas) {
  metrics_.SetStep(12, 3);
  metrics_.AddRows(Pass::kBackward, 640);
  metrics_.SetSessions(2, 5);
  metrics_.CountFailure("STALLED");
  for (const int milliseconds : {1, 3, 3, 40, 99'000}) {
    metrics_.ObserveStage(Pass::kForward, Stage::kQueue, absl::Milliseconds(milliseconds));
  }
  const Exposition written = Written(GetMetrics());
  const Exposition text = Read(metrics_.Text());
  EXPECT_EQ(Steady(written), Steady(text));
  EXPECT_GT(Steady(text).size(), 500u) << "the text was read";
  EXPECT_EQ(written.at("shardmlp_stage_seconds_bucket{le=0.005,pass=forward,stage=queue}"), 3);
  EXPECT_EQ(written.at("shardmlp_stage_seconds_bucket{le=inf,pass=forward,stage=queue}"), 5);
  EXPECT_GT(written.at("process_resident_memory_bytes{}"), 1e6);
}

TEST_F(OperationServiceTest, AnAnswerIsSmallAndWhatClientsDoAddsNothing) {
  const v1::GetMetricsResponse before = GetMetrics();
  for (int i = 0; i < 5000; ++i) {
    metrics_.SetSessions(i, i);
    metrics_.SetStep(i, i);
    metrics_.CountFailure("STALLED");
    metrics_.ObserveStage(Pass::kForward, Stage::kQueue, absl::Microseconds(i));
  }
  const v1::GetMetricsResponse after = GetMetrics();
  EXPECT_EQ(Written(after).size(), Written(before).size());
  EXPECT_LT(after.ByteSizeLong(), 128u << 10);
}

TEST_F(OperationServiceTest, AnUnknownClientDrainsNothing) {
  const absl::Status refused = Drain();
  EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(ReasonOf(refused), Reason::kPermissionDenied);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--allow-drain"));
  EXPECT_FALSE(server_->drain_request().asked());
}

class AllowDrainTest : public OperationServiceTest {
 protected:
  AllowDrainTest() : OperationServiceTest({.allow_drain = true}) {}
};

TEST_F(AllowDrainTest, AllWhoAskAreToldWhatCameOfIt) {
  const auto end = [&] {
    while (!server_->drain_request().asked()) std::this_thread::yield();
    server_->drain_request().End(DrainSummary{.position = {.step = 7, .attempt = 1, .weights_version = 9},
                                              .checkpoint = CheckpointInfo{.name = "drain", .step = 7, .byte_count = 5},
                                              .cut_off = true,
                                              .step_undecided = true});
  };
  std::thread server(end);
  v1::DrainResponse first, late;
  ASSERT_TRUE(Drain(first).ok());
  server.join();
  ASSERT_TRUE(Drain(late).ok()) << "it is known by now";
  for (const v1::DrainResponse& response : {first, late}) {
    EXPECT_EQ(response.position().step(), 7);
    EXPECT_EQ(response.position().weights_version(), 9);
    EXPECT_EQ(response.checkpoint().name(), "drain");
    EXPECT_EQ(response.checkpoint().byte_count(), 5);
    EXPECT_TRUE(response.cut_off());
    EXPECT_TRUE(response.step_undecided());
  }
}

TEST_F(AllowDrainTest, AnEndWithoutADrainIsNotTakenForOne) {
  std::thread server([&] {
    while (!server_->drain_request().asked()) std::this_thread::yield();
    server_->Shutdown(Error(absl::StatusCode::kUnavailable, Reason::kDraining, "the device broke"),
                      absl::InfiniteFuture());
  });
  const absl::Status status = Drain();
  server.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("the device broke"));
}

TEST_F(AllowDrainTest, WhoGoesAwayLeavesTheWish) {
  grpc::ClientContext context;
  v1::DrainResponse response;
  absl::Notification over;
  const v1::DrainRequest request;
  stub_->async()->Drain(&context, &request, &response, [&](const grpc::Status&) { over.Notify(); });
  while (!server_->drain_request().asked()) std::this_thread::yield();
  context.TryCancel();
  over.WaitForNotification();
  server_->drain_request().End(DrainSummary{});  // nobody is there any more
  EXPECT_TRUE(Drain().ok());
}

}  // namespace
}  // namespace shardmlp
