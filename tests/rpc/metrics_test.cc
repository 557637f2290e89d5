// What /metrics says, read as Prometheus reads it.
#include "server/metrics.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "absl/strings/str_cat.h"

namespace shardmlp {
namespace {

using testing::HasSubstr;

// Each line of an exposition on its own, so that a missing one does not print all others.
bool HasLine(const Metrics& metrics, const std::string& line) {
  return absl::StrCat("\n", metrics.Text()).find(absl::StrCat("\n", line, "\n")) != std::string::npos;
}

TEST(MetricsTest, EverySeriesIsThereFromTheStart) {
  const Metrics metrics;
  for (const char* line :
       {"shardmlp_rows_total{pass=\"forward\"} 0", "shardmlp_open_calls 0", "shardmlp_queued_tiles 0",
        "shardmlp_stage_seconds_count{pass=\"backward\",stage=\"copy_out\"} 0", "shardmlp_sessions{role=\"train\"} 0",
        "shardmlp_planned_memory_bytes{use=\"optimizer\"} 0", "shardmlp_steps_total{outcome=\"aborted\"} 0",
        "shardmlp_step_phase_seconds_count{phase=\"sync\"} 0", "shardmlp_gemm_flops_total{kind=\"recomputed\"} 0",
        "shardmlp_payload_bytes_total{direction=\"received\"} 0", "shardmlp_non_finite_steps_total 0"}) {
    EXPECT_TRUE(HasLine(metrics, line)) << line;
  }
}

TEST(MetricsTest, CountsAndGaugesGoWhereTheyBelong) {
  Metrics metrics;
  metrics.AddRows(Pass::kBackward, 100);
  metrics.AddPayloadBytes(1000, 500);
  metrics.AddFlops(9, 2);
  metrics.SetQueuedTiles(3);
  metrics.SetOpenCalls(4);
  metrics.SetSessions(2, 5);
  metrics.SetPlannedBytes(MemoryUse::kStaging, 77);
  metrics.SetStep(12, 1);
  metrics.CountStep(StepOutcome::kDiscarded);
  metrics.CountRepeatedRows(6);
  metrics.SetReplicas(8, 3);
  metrics.CountLostGeneration();
  metrics.AddSyncedBytes(640);
  metrics.CountNonFinite();
  metrics.SetStashBytes(88);
  metrics.SetPlannedBytes(MemoryUse::kStash, 99);
  metrics.CountTicket(TicketEvent::kHit);
  EXPECT_FALSE(HasLine(metrics, "shardmlp_certificate_expiry_timestamp_seconds 0")) << "there is none so far";
  metrics.SetCertificateExpiry(absl::FromUnixSeconds(2000));
  metrics.SetMemoryBound(4096);
  metrics.SetReplicaCount(4);
  metrics.CountFailure("STALLED");
  metrics.ObserveStage(Pass::kForward, Stage::kCompute, absl::Milliseconds(30));
  metrics.ObserveStepPhase(StepPhase::kApply, absl::Seconds(2));
  for (const char* line : {"shardmlp_stash_bytes 88",
                           "shardmlp_planned_memory_bytes{use=\"stash\"} 99",
                           "shardmlp_certificate_expiry_timestamp_seconds 2000",
                           "shardmlp_memory_bound_bytes 4096",
                           "shardmlp_replicas 4",
                           "shardmlp_stash_tickets_total{event=\"hit\"} 1",
                           "shardmlp_stash_tickets_total{event=\"missed\"} 0",
                           "shardmlp_rows_total{pass=\"backward\"} 100",
                           "shardmlp_payload_bytes_total{direction=\"received\"} 1000",
                           "shardmlp_payload_bytes_total{direction=\"sent\"} 500",
                           "shardmlp_gemm_flops_total{kind=\"useful\"} 9",
                           "shardmlp_queued_tiles 3",
                           "shardmlp_open_calls 4",
                           "shardmlp_sessions{role=\"train\"} 2",
                           "shardmlp_sessions{role=\"read\"} 5",
                           "shardmlp_planned_memory_bytes{use=\"staging\"} 77",
                           "shardmlp_step 12",
                           "shardmlp_attempt 1",
                           "shardmlp_steps_total{outcome=\"discarded\"} 1",
                           "shardmlp_repeated_rows_total 6",
                           "shardmlp_replica_generation 8",
                           "shardmlp_replica_members 0",
                           "shardmlp_replica_generations_lost_total 1",
                           "shardmlp_synced_bytes_total 640",
                           "shardmlp_non_finite_steps_total 1",
                           "shardmlp_failures_total{reason=\"STALLED\"} 1",
                           "shardmlp_stage_seconds_bucket{pass=\"forward\",stage=\"compute\",le=\"0.025\"} 0",
                           "shardmlp_stage_seconds_bucket{pass=\"forward\",stage=\"compute\",le=\"0.05\"} 1",
                           "shardmlp_step_phase_seconds_sum{phase=\"apply\"} 2"}) {
    EXPECT_TRUE(HasLine(metrics, line)) << line;
  }
}

TEST(MetricsTest, RpcsAreCountedAsStockDashboardsExpect) {
  Metrics metrics;
  RpcMetrics& forward = metrics.ForMethod("shardmlp.v1.Compute", "Forward", RpcKind::kBidiStream);
  forward.Started();
  forward.Started();
  forward.Handled(absl::StatusCode::kInvalidArgument, absl::Milliseconds(3));
  const std::string labels = "grpc_method=\"Forward\",grpc_service=\"shardmlp.v1.Compute\",grpc_type=\"bidi_stream\"";
  for (const std::string& line :
       {absl::StrCat("grpc_server_started_total{", labels, "} 2"),
        absl::StrCat("grpc_server_handled_total{grpc_code=\"InvalidArgument\",", labels, "} 1"),
        absl::StrCat("grpc_server_handled_total{grpc_code=\"OK\",", labels, "} 0"),
        absl::StrCat("grpc_server_handling_seconds_count{", labels, "} 1"),
        absl::StrCat("grpc_server_handling_seconds_bucket{", labels, ",le=\"0.005\"} 1")}) {
    EXPECT_TRUE(HasLine(metrics, line)) << line;
  }
}

// A connection to /metrics on loopback.
class Scraper {
 public:
  explicit Scraper(int port) : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }
  ~Scraper() { close(socket_); }
  Scraper(const Scraper&) = delete;
  Scraper& operator=(const Scraper&) = delete;

  void Send(const std::string& bytes) const {
    EXPECT_EQ(write(socket_, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }
  // All that comes until the server closes.
  std::string Receive() const {
    std::string answer;
    char buffer[4096];
    for (ssize_t count; (count = read(socket_, buffer, sizeof(buffer))) > 0;) answer.append(buffer, count);
    return answer;
  }
  // Neither answered nor closed so far.
  bool waiting() const {
    char byte;
    return recv(socket_, &byte, 1, MSG_DONTWAIT | MSG_PEEK) < 0 && errno == EAGAIN;
  }

 private:
  const int socket_;
};

constexpr char kScrape[] = "GET /metrics HTTP/1.0\r\n\r\n";

TEST(MetricsTest, ConnectionsThatAskForNothingHoldUpNoScrape) {
  Metrics metrics;
  const auto port = metrics.Expose("127.0.0.1:0");
  ASSERT_TRUE(port.ok()) << port.status();
  const Scraper idle(*port), begun(*port), scraper(*port);
  begun.Send("GET /metr");
  scraper.Send(kScrape);
  EXPECT_THAT(scraper.Receive(), HasSubstr("200 OK"));
  EXPECT_TRUE(idle.waiting() && begun.waiting()) << "the scrape had to wait until the others were closed";
}

TEST(MetricsTest, TheEndpointServesTheSameText) {
  Metrics metrics;
  metrics.SetStep(41, 0);
  const auto port = metrics.Expose("127.0.0.1:0");
  ASSERT_TRUE(port.ok()) << port.status();
  const Scraper scraper(*port);
  scraper.Send(kScrape);
  const std::string answer = scraper.Receive();
  EXPECT_NE(answer.find("200 OK"), std::string::npos);
  EXPECT_NE(answer.find("\nshardmlp_step 41\n"), std::string::npos);
  EXPECT_NE(answer.find("\nprocess_resident_memory_bytes "), std::string::npos);
}

TEST(MetricsTest, ATakenAddressIsSaidSo) {
  Metrics first;
  const auto port = first.Expose("127.0.0.1:0");
  ASSERT_TRUE(port.ok());
  const std::string address = absl::StrCat("127.0.0.1:", *port);
  Metrics second;
  const auto refused = second.Expose(address);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr(address));
}

}  // namespace
}  // namespace shardmlp
