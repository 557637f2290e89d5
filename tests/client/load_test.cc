// Loads of calls by a clock that is moved by hand: when calls are due, what is counted, and from when.
#include "client/cli/bench/load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/status.h"

namespace shardmlp {
namespace {

using testing::ElementsAre;
using testing::Pair;

// Time passes by sleeping, and in calls, alone.
class HandClock {
 public:
  LoadClock clock() {
    return {.now = [this] { return absl::Nanoseconds(now_.load()); },
            .sleep = [this](absl::Duration duration) { Pass(duration); }};
  }
  void Pass(absl::Duration duration) { now_ += absl::ToInt64Nanoseconds(duration); }
  absl::Duration now() const { return absl::Nanoseconds(now_.load()); }

 private:
  std::atomic<int64_t> now_ = absl::ToInt64Nanoseconds(absl::Hours(5));
};

// Its n-th call is what `call` makes of n.
class ScriptedClient final : public LoadClient {
 public:
  explicit ScriptedClient(std::function<LoadCall(int)> call) : call_(std::move(call)) {}
  LoadCall Run() override { return call_(count_++); }

 private:
  const std::function<LoadCall(int)> call_;
  int count_ = 0;
};

std::vector<std::unique_ptr<LoadClient>> OneClient(std::function<LoadCall(int)> call) {
  std::vector<std::unique_ptr<LoadClient>> clients;
  clients.push_back(std::make_unique<ScriptedClient>(std::move(call)));
  return clients;
}

void ExpectQuantile(const Latencies& latencies, double quantile, absl::Duration expected) {
  EXPECT_GE(latencies.Quantile(quantile), expected) << quantile;
  EXPECT_LE(latencies.Quantile(quantile), expected * (1 + 1.0 / 256)) << quantile;
}

// 10 calls a second by one client, each answered after 10 ms, but for the sixth, which takes a second. The ten behind
// it were due meanwhile: they are sent one after the other, and each counts from when it was due.
TEST(LoadTest, AStalledCallMakesLaterOnesLateInAnOpenLoop) {
  HandClock clock;
  const auto clients = OneClient([&](int call) {
    clock.Pass(absl::Milliseconds(call == 5 ? 1000 : 10));
    return LoadCall{.kind = CallKind::kForward, .cost = {.rows = 3}, .status = {}};
  });
  const LoadTotals totals = RunLoad(clients, {.pace = {.rate = 10, .call_count = 20}, .clock = clock.clock()});
  EXPECT_EQ(totals.forward.calls, 20);
  EXPECT_EQ(totals.forward.cost.rows, 60);
  // In order: nine of 10 ms; 100, 190, ... and 910 ms, since each makes up 90 ms; a second.
  const Latencies& latencies = totals.forward.latencies;
  ExpectQuantile(latencies, 0.45, absl::Milliseconds(10));
  ExpectQuantile(latencies, 0.5, absl::Milliseconds(100));
  ExpectQuantile(latencies, 0.9, absl::Milliseconds(820));
  ExpectQuantile(latencies, 0.95, absl::Milliseconds(910));
  EXPECT_EQ(latencies.max(), absl::Seconds(1));
  EXPECT_EQ(latencies.mean(), absl::Milliseconds((9 * 10 + 5050 + 1000) / 20.0));
  EXPECT_EQ(totals.unsent_calls, 0);
  EXPECT_EQ(totals.elapsed, absl::Milliseconds(1910)) << "the last was due after 1.9 s";
}

TEST(LoadTest, CallsThatNobodyWasFreeForAreCounted) {
  HandClock clock;
  const auto clients = OneClient([&](int) {
    clock.Pass(absl::Milliseconds(250));
    return LoadCall{.kind = CallKind::kBackward, .cost = {}, .status = {}};
  });
  const LoadTotals totals =
      RunLoad(clients, {.pace = {.rate = 10, .duration = absl::Seconds(1)}, .clock = clock.clock()});
  // Of the ten that were due, at 0, 0.1, ... 0.9 s, four were sent, at 0, 0.25, 0.5 and 0.75 s.
  EXPECT_EQ(totals.backward.calls, 4);
  EXPECT_EQ(totals.unsent_calls, 6);
  EXPECT_EQ(totals.backward.latencies.max(), absl::Milliseconds(700)) << "due at 0.3 s, answered at 1 s";
  EXPECT_EQ(totals.backward.latencies.mean(), absl::Milliseconds((250 + 400 + 550 + 700) / 4.0));
}

TEST(LoadTest, InAClosedLoopACallIsDueOnceTheLastWasAnswered) {
  HandClock clock;
  const auto clients = OneClient([&](int call) {
    clock.Pass(absl::Milliseconds(call == 1 ? 1000 : 10));
    return LoadCall{
        .kind = call % 2 == 0 ? CallKind::kForward : CallKind::kBackward, .cost = {.rows = 1}, .status = {}};
  });
  const LoadTotals totals = RunLoad(clients, {.pace = {.duration = absl::Seconds(2)}, .clock = clock.clock()});
  EXPECT_EQ(totals.calls(), 101) << "99 in the time that the first two left";
  EXPECT_EQ(totals.forward.latencies.max(), absl::Milliseconds(10));
  EXPECT_EQ(totals.backward.latencies.max(), absl::Seconds(1));
  EXPECT_EQ(totals.unsent_calls, 0);
  EXPECT_EQ(totals.elapsed, absl::Seconds(2));
}

TEST(LoadTest, FailuresAreCountedByReasonAndGiveTheServerABreak) {
  HandClock clock;
  const auto refuse = [](Reason reason, absl::string_view message) {
    return Error(absl::StatusCode::kResourceExhausted, reason, message);
  };
  const auto clients = OneClient([&](int call) {
    clock.Pass(absl::Milliseconds(1));
    LoadCall made{.kind = CallKind::kForward, .cost = {.rows = 1}, .status = {}};
    if (call == 1 || call == 2) made.status = refuse(Reason::kOverloaded, call == 1 ? "the first" : "the second");
    if (call == 3) made.status = refuse(Reason::kTooManySessions, "sessions");
    return made;
  });
  const LoadTotals totals = RunLoad(clients, {.pace = {.call_count = 6}, .clock = clock.clock()});
  EXPECT_EQ(totals.calls(), 3);
  EXPECT_EQ(totals.failed_calls(), 3);
  EXPECT_EQ(totals.forward.cost.rows, 3) << "a call that failed has no rows";
  EXPECT_EQ(totals.failures.at("OVERLOADED").calls, 2);
  EXPECT_EQ(totals.failures.at("OVERLOADED").first, "the first");
  EXPECT_EQ(totals.failures.at("TOO_MANY_SESSIONS").calls, 1);
  EXPECT_EQ(totals.elapsed, absl::Milliseconds(6) + 3 * kFailurePause);
}

TEST(LoadTest, WhatIsUnderWayWhenTheLoadIsStoppedIsNoFailure) {
  HandClock clock;
  std::atomic<bool> stopped = false;
  const auto clients = OneClient([&](int call) {
    clock.Pass(absl::Milliseconds(1));
    LoadCall made{.kind = CallKind::kForward, .cost = {.rows = 1}, .status = {}};
    if (call == 0) made.status = Error(absl::StatusCode::kCancelled, Reason::kCancelled, "by the server");
    if (call == 4) {
      stopped = true;
      made.status = Error(absl::StatusCode::kCancelled, Reason::kCancelled, "interrupted");
    }
    return made;
  });
  const LoadTotals totals = RunLoad(clients, {.clock = clock.clock(), .stopped = [&] { return stopped.load(); }});
  EXPECT_EQ(totals.calls(), 3);
  EXPECT_EQ(totals.stopped_calls, 1);
  EXPECT_THAT(totals.failures, ElementsAre(Pair("CANCELLED", testing::Field(&FailureTotals::calls, 1))));
}

TEST(LoadTest, AWaitForTheNextCallEndsWhereTheLoadIsStopped) {
  HandClock clock;
  std::atomic<int> asked = 0;
  const auto clients = OneClient([&](int) { return LoadCall{}; });
  const LoadTotals totals =
      RunLoad(clients, {.pace = {.rate = 1e-6}, .clock = clock.clock(), .stopped = [&] { return ++asked > 20; }});
  EXPECT_EQ(totals.calls(), 1);
  EXPECT_LT(totals.elapsed, absl::Seconds(10)) << "and not in eleven days";
}

TEST(LoadTest, ClientsShareTheCalls) {
  std::vector<std::unique_ptr<LoadClient>> clients;
  for (int i = 0; i < 5; ++i) {
    clients.push_back(std::make_unique<ScriptedClient>(
        [](int) { return LoadCall{.kind = CallKind::kForward, .cost = {.rows = 2}, .status = {}}; }));
  }
  const LoadTotals totals = RunLoad(clients, {.pace = {.call_count = 1001}});
  EXPECT_EQ(totals.calls(), 1001);
  EXPECT_EQ(totals.forward.cost.rows, 2002);
  EXPECT_EQ(totals.forward.latencies.count(), 1001);
}

TEST(FailureNameTest, SaysWhyTheServerRefused) {
  const auto given_up = [](std::string last) {
    return Error(absl::StatusCode::kUnavailable, Reason::kUnreachable, "gave up", {{"last", std::move(last)}});
  };
  EXPECT_EQ(FailureName(Error(absl::StatusCode::kInternal, Reason::kDeviceFailed, "")), "DEVICE_FAILED");
  EXPECT_EQ(FailureName(given_up("DRAINING")), "DRAINING") << "of the last try";
  EXPECT_EQ(FailureName(given_up("UNSPECIFIED")), "UNREACHABLE") << "the transport's has none";
  EXPECT_EQ(FailureName(absl::UnavailableError("cut")), "UNAVAILABLE");
}

}  // namespace
}  // namespace shardmlp
