// Lines of the log: always one, whatever is in them, and few of a kind.
#include "server/log.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "server/log_limit.h"

namespace shardmlp {
namespace {

const LogFields kFields = {{"session", 7}, {"norm", 0.5}, {"run", "mine-1"}, {"why", "a client's \"text\"\nerror x=1"}};

TEST(LogTest, TextIsOneLineThatPeopleRead) {
  EXPECT_EQ(LogLine(LogFormat::kText, "step committed", kFields),
            R"(step committed session=7 norm=0.5 run=mine-1 why="a client's \"text\"\nerror x=1")");
  EXPECT_EQ(LogLine(LogFormat::kText, "draining", {{"run", ""}}), R"(draining run="")");
}

TEST(LogTest, JsonIsOneLineThatProgramsRead) {
  const std::string line = LogLine(LogFormat::kJson, "step committed", kFields);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const auto read = nlohmann::json::parse("{" + line + "}");
  EXPECT_EQ(read["message"], "step committed");
  EXPECT_EQ(read["session"], 7);
  EXPECT_EQ(read["norm"], 0.5);
  EXPECT_EQ(read["why"], "a client's \"text\"\nerror x=1");
}

TEST(LogTest, WhatAClientSendsNeitherBreaksALineNorFillsADisk) {
  const LogFields fields = {{"bytes", std::string("\xff\x00\x1b[31m", 7)}, {"long", std::string(1 << 20, 'x')}};
  for (const LogFormat format : {LogFormat::kText, LogFormat::kJson}) {
    const std::string line = LogLine(format, "rpc failed", fields);
    EXPECT_LT(line.size(), 2000u);
    for (const char byte : line) EXPECT_GE(byte < 0 ? 256 + byte : byte, 0x20);
  }
  EXPECT_NO_THROW((void)nlohmann::json::parse("{" + LogLine(LogFormat::kJson, "rpc failed", fields) + "}"));
}

TEST(LogTest, NothingIsWrittenBeforeItIsStarted) {
  EXPECT_FALSE(Logs(LogLevel::kError));
  testing::internal::CaptureStderr();
  LogError("lost");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(LogLimitTest, AnEventThatRepeatsIsWrittenNowAndThenAndSaysHowOftenItWasNot) {
  LogLimit limit(/*lines_a_second=*/2, /*burst=*/3);
  const absl::Time start = absl::FromUnixSeconds(1000);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(limit.Admit("refused", start), 0);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(limit.Admit("refused", start), std::nullopt);
  EXPECT_EQ(limit.Admit("refused", start + absl::Milliseconds(400)), std::nullopt);
  EXPECT_EQ(limit.Admit("refused", start + absl::Milliseconds(500)), 6);
  EXPECT_EQ(limit.Admit("refused", start + absl::Milliseconds(600)), std::nullopt);
  // After a rest, the burst and no more.
  for (int i = 0; i < 3; ++i) EXPECT_EQ(limit.Admit("refused", start + absl::Hours(1)), i == 0 ? 1 : 0);
  EXPECT_EQ(limit.Admit("refused", start + absl::Hours(1)), std::nullopt);
}

TEST(LogLimitTest, EventsDoNotTakeEachOthersLines) {
  LogLimit limit(/*lines_a_second=*/1, /*burst=*/1);
  const absl::Time now = absl::FromUnixSeconds(1000);
  EXPECT_EQ(limit.Admit("refused", now), 0);
  EXPECT_EQ(limit.Admit("refused", now), std::nullopt);
  EXPECT_EQ(limit.Admit("step committed", now), 0);
  EXPECT_EQ(limit.Admit("refused", now - absl::Seconds(5)), std::nullopt) << "a clock that is set back earns nothing";
}

}  // namespace
}  // namespace shardmlp
