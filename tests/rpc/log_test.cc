// Lines of the log: always one, whatever is in them, and few of a kind.
#include "server/log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
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
  const auto read = nlohmann::json::parse(absl::StrCat("{", line, "}"));
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
  EXPECT_TRUE(nlohmann::json::accept(absl::StrCat("{", LogLine(LogFormat::kJson, "rpc failed", fields), "}")));
}

// A viewer takes the first two for ends of a line, a terminal the third for the start of a command; the fourth turns
// around what follows it.
TEST(LogTest, WhatViewersActOnIsEscaped) {
  const std::pair<const char*, const char*> texts[] = {{"\xe2\x80\xa8", "\\u2028"}, {"\xc2\x85", "\\u0085"},
                                                       {"\xc2\x9b", "\\u009b"},     {"\xe2\x80\xae", "\\u202e"},
                                                       {"\x7f", "\\u007f"},         {"\x1b", "\\u001b"}};
  for (const auto& [text, escaped] : texts) {
    const LogFields fields = {{"run", absl::StrCat("a", text, "b")}};
    EXPECT_EQ(LogLine(LogFormat::kText, "x", fields), absl::StrCat("x run=\"a", escaped, "b\""));
    const std::string line = LogLine(LogFormat::kJson, "x", fields);
    EXPECT_EQ(line, absl::StrCat("\"message\":\"x\",\"run\":\"a", escaped, "b\""));
    EXPECT_EQ(nlohmann::json::parse(absl::StrCat("{", line, "}"))["run"], absl::StrCat("a", text, "b"));
  }
}

// Standard error, while it lives: a pipe that holds a page.
class FullPipe {
 public:
  FullPipe() : stderr_(dup(STDERR_FILENO)) {
    EXPECT_EQ(pipe(ends_), 0);
    EXPECT_GT(fcntl(ends_[1], F_SETPIPE_SZ, 4096), 0);
    dup2(ends_[1], STDERR_FILENO);
    close(ends_[1]);
  }
  // What was written, until `stop` has made it all be.
  template <typename Stop>
  std::string Read(Stop stop) {
    std::thread stopping([&] {
      stop();
      dup2(stderr_, STDERR_FILENO);  // the last writing end
    });
    std::string text;
    char buffer[4096];
    for (ssize_t count; (count = read(ends_[0], buffer, sizeof(buffer))) > 0;) text.append(buffer, count);
    stopping.join();
    return text;
  }

 private:
  int ends_[2] = {};
  const int stderr_;
};

TEST(LogTest, AReaderThatStandsStillHoldsUpNobodyAndLosesNothing) {
  EXPECT_FALSE(Logs(LogLevel::kError));
  LogError("lost: the log is not started");
  FullPipe pipe;
  StartLog({.level = LogLevel::kInfo, .format = LogFormat::kText});
  EXPECT_TRUE(Logs(LogLevel::kInfo));
  EXPECT_FALSE(Logs(LogLevel::kDebug));
  const std::string kibibyte(1000, 'x');
  for (int i = 0; i < 20; ++i) LogInfo("waits", {{"number", i}, {"text", kibibyte}});
  Log(LogLevel::kDebug, "not asked for");
  const std::vector<std::string> lines = absl::StrSplit(pipe.Read(&StopLog), '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), 20u);
  for (int i = 0; i < 20; ++i)
    EXPECT_NE(lines[i].find(absl::StrCat("Z info waits number=", i, " ")), std::string::npos);
  LogInfo("lost: the log is stopped");
}

TEST(LogLimitTest, AnEventThatRepeatsIsWrittenNowAndThenAndSaysHowOftenItWasNot) {
  LogLimit limit(/*lines_a_second=*/2, /*burst=*/3);
  const absl::Time start = absl::FromUnixSeconds(1000);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(limit.Admit("refused", "", start), 0);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(limit.Admit("refused", "", start), std::nullopt);
  EXPECT_EQ(limit.Admit("refused", "", start + absl::Milliseconds(400)), std::nullopt);
  EXPECT_EQ(limit.Admit("refused", "", start + absl::Milliseconds(500)), 6);
  EXPECT_EQ(limit.Admit("refused", "", start + absl::Milliseconds(600)), std::nullopt);
  // After a rest, the burst and no more.
  for (int i = 0; i < 3; ++i) EXPECT_EQ(limit.Admit("refused", "", start + absl::Hours(1)), i == 0 ? 1 : 0);
  EXPECT_EQ(limit.Admit("refused", "", start + absl::Hours(1)), std::nullopt);
}

TEST(LogLimitTest, KindsOfAnEventDoNotTakeEachOthersLines) {
  LogLimit limit(/*lines_a_second=*/1, /*burst=*/1);
  const absl::Time now = absl::FromUnixSeconds(1000);
  EXPECT_EQ(limit.Admit("rpc failed", "UNAUTHENTICATED", now), 0);
  EXPECT_EQ(limit.Admit("rpc failed", "UNAUTHENTICATED", now), std::nullopt);
  EXPECT_EQ(limit.Admit("rpc failed", "DEVICE_FAILED", now), 0);
  EXPECT_EQ(limit.Admit("rpc failed", "DEVICE_FAILED", now + absl::Seconds(1)), 0);
  EXPECT_EQ(limit.Admit("rpc failed", "UNAUTHENTICATED", now + absl::Seconds(1)), 1);
}

TEST(LogLimitTest, EventsDoNotTakeEachOthersLines) {
  LogLimit limit(/*lines_a_second=*/1, /*burst=*/1);
  const absl::Time now = absl::FromUnixSeconds(1000);
  EXPECT_EQ(limit.Admit("refused", "", now), 0);
  EXPECT_EQ(limit.Admit("refused", "", now), std::nullopt);
  EXPECT_EQ(limit.Admit("step committed", "", now), 0);
  EXPECT_EQ(limit.Admit("refused", "", now - absl::Seconds(5)), std::nullopt)
      << "a clock that is set back earns nothing";
}

}  // namespace
}  // namespace shardmlp
