// How replicas start: who is refused and by which name, who is said to be missing, and when they give up.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/status.h"
#include "server/sync/rendezvous/local_address.h"
#include "tests/sync/replica_servers.h"

namespace shardmlp::testing {
namespace {

using ::testing::HasSubstr;

struct Difference {
  std::string name;
  void (*make)(ReplicasOptions&);
  std::string message;
};

class ReplicasRefusalTest : public ::testing::TestWithParam<Difference> {};

TEST_P(ReplicasRefusalTest, AReplicaThatDiffersIsRefusedByNameOnEveryRank) {
  ReplicaServers servers(3);
  for (const int rank : {0, 1}) servers.Start(rank).Join();
  ReplicasOptions options = servers.Options(2);
  GetParam().make(options);
  ReplicaServer other(options);
  other.Join();
  ASSERT_TRUE(other.recorder.Hears("refused: " + GetParam().message));
  EXPECT_EQ(ReasonOf(other.recorder.refused()), Reason::kReplicaConflict);
  EXPECT_EQ(other.recorder.refused().code(), absl::StatusCode::kFailedPrecondition);
  for (const int rank : {0, 1}) EXPECT_TRUE(servers[rank].log.Has(GetParam().message)) << rank;
  servers.Start(2).Join();
  EXPECT_TRUE(servers.recorder(0).Hears("formed 1")) << "and the others are not disturbed";
}

INSTANTIATE_TEST_SUITE_P(
    Differences, ReplicasRefusalTest,
    ::testing::Values(
        Difference{"Model", [](ReplicasOptions& o) { o.model = "large"; }, "rank 2 has model large, rank 0 has tiny"},
        Difference{"Layers", [](ReplicasOptions& o) { o.layers = "4-7"; }, "rank 2 has layers 4-7, rank 0 has 0-3"},
        Difference{"DType", [](ReplicasOptions& o) { o.dtype = "bf16"; }, "rank 2 has dtype bf16, rank 0 has f32"},
        Difference{"Transport",
                   [](ReplicasOptions& o) {
                     o.transport = {"nccl", [](int, int) { return absl::UnavailableError("never asked"); }};
                   },
                   "rank 2 has sums by nccl, rank 0 has gloo"},
        Difference{"Size", [](ReplicasOptions& o) { o.size = 5; }, "rank 2 has number of replicas 5, rank 0 has 3"}),
    [](const auto& info) { return info.param.name; });

TEST(ReplicasStartTest, ASecondServerOfARankIsRefusedWhileTheFirstLives) {
  ReplicaServers servers(2);
  servers.StartAll();
  ReplicaServer second(servers.Options(1));
  second.Join();
  EXPECT_TRUE(second.recorder.Hears("refused: rank 1 is taken by a replica that lives"));
  EXPECT_TRUE(servers[0].log.Has("Refused: rank 1 is taken"));
  servers[0].replicas->Propose(1, "a");
  EXPECT_TRUE(servers.recorder(1).Hears("stable 0"));
}

TEST(ReplicasStartTest, ASecondRankZeroDoesNotStart) {
  ReplicaServers servers(2);
  servers.Start(0);
  const auto second = MakeReplicas(servers.Options(0));
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(servers.coordinator));
}

TEST(ReplicasStartTest, WhoIsMissingIsLoggedAgainAndAgain) {
  ReplicaServers servers(3);
  servers.Start(0).Join();
  servers.Start(1).Join();
  EXPECT_TRUE(servers[0].log.Has("Replicas: rank 2 of 3 missing"));
  EXPECT_TRUE(servers[1].log.Has("Replicas: rank 2 of 3 missing"));
  EXPECT_EQ(servers[1].replicas->Missing(), "rank 2 of 3 missing");
  servers.Start(2).Join();
  ASSERT_TRUE(servers.recorder(1).Hears("formed"));
}

TEST(ReplicasStartTest, AStartThatTakesTooLongIsGivenUpNamingWhoIsMissing) {
  ReplicaServers servers(3);
  ReplicasOptions options = servers.Options(0);
  options.start_timeout = absl::Milliseconds(500);
  ReplicaServer zero(options);
  zero.Join();
  ASSERT_TRUE(zero.recorder.Hears("refused: replicas did not start within 500ms: ranks 1, 2 of 3 missing"));
  EXPECT_EQ(zero.recorder.refused().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(ReplicasStartTest, WithoutRankZeroAStartIsGivenUpNamingItsAddress) {
  ReplicaServers servers(2);
  ReplicasOptions options = servers.Options(1);
  options.start_timeout = absl::Milliseconds(500);
  ReplicaServer one(options);
  one.Join();
  ASSERT_TRUE(
      one.recorder.Hears(absl::StrCat("did not start within 500ms: rank 0 at ", servers.coordinator, " is missing: ")));
}

TEST(ReplicasStartTest, ASetOfOneTouchesNoNetwork) {
  ReplicasOptions options;
  options.coordinator = "nowhere";
  ReplicaServer one(options);
  one.Join();
  EXPECT_TRUE(one.recorder.Hears("formed 1: ranks 0, from rank 0"));
}

TEST(ReplicasOptionsTest, EachWrongOptionIsNamed) {
  const auto message = [](auto change) {
    ReplicasOptions options = FastOptions(1, 3, "host:1");
    EXPECT_TRUE(Validate(options).ok());
    change(options);
    const absl::Status status = Validate(options);
    EXPECT_EQ(ReasonOf(status), Reason::kInvalidArgument);
    EXPECT_EQ(MakeReplicas(options).status(), status);
    return std::string(status.message());
  };
  EXPECT_THAT(message([](auto& o) { o.size = 0; }), HasSubstr("number of replicas is 0"));
  EXPECT_THAT(message([](auto& o) { o.rank = 3; }), HasSubstr("rank is 3, expected 0 to 2"));
  EXPECT_THAT(message([](auto& o) { o.rank = -1; }), HasSubstr("rank is -1"));
  for (const char* address : {"", "host", "host:", ":1", "host:0", "host:65536", "host:x", "::1:1", "[::1:1"}) {
    EXPECT_THAT(message([&](auto& o) { o.coordinator = address; }), HasSubstr(absl::StrCat("\"", address, "\"")));
  }
  EXPECT_THAT(message([](auto& o) { o.coordinator = "0.0.0.0:80"; }), HasSubstr("0.0.0.0:80"));
  EXPECT_THAT(message([](auto& o) { o.start_timeout = absl::ZeroDuration(); }), HasSubstr("start time-out is 0"));
  EXPECT_THAT(message([](auto& o) { o.heartbeat = absl::Hours(25); }), HasSubstr("heartbeat is 25h"));
  EXPECT_THAT(message([](auto& o) { o.connect_timeout = -absl::Seconds(1); }), HasSubstr("connect time-out is -1s"));
  EXPECT_THAT(message([](auto& o) { o.sum_timeout = absl::InfiniteDuration(); }), HasSubstr("sum time-out is inf"));
  EXPECT_THAT(message([](auto& o) { o.loss_timeout = absl::Milliseconds(99); }),
              HasSubstr("loss time-out is 99ms, expected two heartbeats (100ms) to 1h"));
}

TEST(LocalAddressTest, TheOneFromWhichTheAddressIsReached) {
  EXPECT_EQ(LocalAddressTowards("127.0.0.1:80").value(), "127.0.0.1");
  EXPECT_EQ(LocalAddressTowards("localhost:80").status(), absl::OkStatus());
  const auto unknown = LocalAddressTowards("no-such-host.invalid:80");
  EXPECT_EQ(ReasonOf(unknown.status()), Reason::kReplicaLost);
  EXPECT_THAT(std::string(unknown.status().message()), HasSubstr("no-such-host.invalid:80"));
}

}  // namespace
}  // namespace shardmlp::testing
