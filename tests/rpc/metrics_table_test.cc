// docs/operations.md shows the table of series as the code has it, and what is exported is the table.
#include "server/metrics_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <set>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/metrics.h"

namespace shardmlp {
namespace {

constexpr const char* kTypes[] = {"counter", "gauge", "histogram"};

std::string LabelsOf(const SeriesSpec& spec) {
  std::vector<std::string> labels;
  for (const SeriesLabel& label : spec.labels) {
    labels.push_back(absl::StrCat("`", label.name,
                                  "`: ", label.values.empty() ? label.described : absl::StrJoin(label.values, ", ")));
  }
  return absl::StrJoin(labels, "; ");
}

// A row of the page's table.
std::string RowFor(const SeriesSpec& spec) {
  return absl::StrCat("| `", spec.name, "` | ", kTypes[static_cast<int>(spec.type)], " | ", spec.unit, " | ",
                      LabelsOf(spec), " | ", spec.meaning, " |");
}

TEST(MetricsTableTest, ThePageHasItRowByRow) {
  std::ifstream page(SHARDMLP_OPERATIONS_PAGE);
  std::vector<std::string> shown;
  for (std::string line; std::getline(page, line);) {
    for (const char* family : {"| `shardmlp_", "| `grpc_server_", "| `process_"}) {
      if (absl::StartsWith(line, family)) shown.push_back(line);
    }
  }
  std::vector<std::string> table;
  for (const SeriesSpec& spec : SeriesTable()) table.push_back(RowFor(spec));
  EXPECT_THAT(shown, testing::ElementsAreArray(table)) << "the page's table should be:\n" << absl::StrJoin(table, "\n");
}

// "name{labels}" of every sample, and the names of families.
struct Exposition {
  std::set<std::string> families;
  std::multiset<std::string> series;
};

Exposition Read(const Metrics& metrics) {
  Exposition read;
  for (const absl::string_view line : absl::StrSplit(metrics.Text(), '\n', absl::SkipEmpty())) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    if (absl::StartsWith(line, "# TYPE")) read.families.insert(words[2]);
    if (line[0] != '#') read.series.insert(std::string(line.substr(0, line.rfind(' '))));
  }
  return read;
}

TEST(MetricsTableTest, WhatIsExportedIsTheTable) {
  Metrics metrics;
  metrics.ExpectFailures({"STALLED"});
  metrics.SetCertificateExpiry(absl::FromUnixSeconds(1));
  metrics.SetFilesInOrder(ServerFiles::kTokens, true);
  metrics.ForMethod("shardmlp.v1.Compute", "Forward", RpcKind::kBidiStream);
  std::set<std::string> names;
  for (const SeriesSpec& spec : SeriesTable()) names.insert(spec.name);
  const Exposition exported = Read(metrics);
  EXPECT_EQ(exported.families, names);
  EXPECT_EQ(std::set<std::string>(exported.series.begin(), exported.series.end()).size(), exported.series.size())
      << "a series is there twice";
}

TEST(MetricsTableTest, NamesHaveTheirUnitsAndCountersEndInTotal) {
  for (const SeriesSpec& spec : SeriesTable()) {
    EXPECT_EQ(spec.type == SeriesType::kCounter, absl::EndsWith(spec.name, "_total")) << spec.name;
    EXPECT_EQ(spec.type == SeriesType::kHistogram, !spec.buckets.empty()) << spec.name;
    const std::string unit = spec.unit;
    if (unit == "seconds" || unit == "bytes") {
      EXPECT_TRUE(absl::StrContains(spec.name, unit)) << spec.name;
    }
    EXPECT_TRUE(absl::EndsWith(spec.meaning, ".")) << spec.name;
  }
}

// What thousands of sessions, steps and calls bring is values, not series.
TEST(MetricsTableTest, NothingThatClientsDoAddsASeries) {
  Metrics metrics;
  metrics.ExpectFailures({"STALLED", "UNKNOWN_SESSION"});
  RpcMetrics& forward = metrics.ForMethod("shardmlp.v1.Compute", "Forward", RpcKind::kBidiStream);
  const Exposition before = Read(metrics);
  for (int i = 0; i < 5000; ++i) {
    metrics.SetSessions(i, 2 * i);
    metrics.SetOpenCalls(i);
    metrics.SetStep(i, i / 2);
    metrics.SetReplicas(i, i % 3);
    metrics.CountStep(static_cast<StepOutcome>(i % 3));
    metrics.ObserveStage(static_cast<Pass>(i % 2), static_cast<Stage>(i % 6), absl::Microseconds(i));
    metrics.CountTicket(static_cast<TicketEvent>(i % 3));
    metrics.CountFailure(i % 2 == 0 ? "STALLED" : "UNKNOWN_SESSION");
    forward.Started();
    forward.Handled(static_cast<absl::StatusCode>(i % 40), absl::Microseconds(i));
  }
  EXPECT_EQ(Read(metrics).series, before.series);
}

}  // namespace
}  // namespace shardmlp
