// What a server counts and measures, as /metrics shows it (server/metrics_table.h). A leaf: knows no other room. Series
// are looked up once and kept by reference.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace shardmlp {

// Where time goes: receive and send a message of a call, the others a tile.
enum class Stage { kReceive, kQueue, kCopyIn, kCompute, kCopyOut, kSend };
enum class Pass { kForward, kBackward };
enum class StepOutcome { kCommitted, kDiscarded, kAborted };
enum class StepPhase { kSeal, kSync, kApply };  // last seal waits for first; replicas sum; the optimizer runs
enum class MemoryUse { kWeights, kGradients, kMasterWeights, kOptimizer, kWorkspace, kStaging, kLedger, kStash };
enum class TicketEvent { kGranted, kHit, kMissed };  // a forward left its input; a backward found it, or did not

enum class ServerFiles { kTokens, kCertificate, kReplicaCa };  // the certificate with its key and the clients' CA

enum class RpcKind { kUnary, kServerStream, kBidiStream };

// A histogram's bucket: how many were observed up to the bound, those of the buckets before included.
struct MetricBucket {
  double upper_bound = 0;
  int64_t cumulative_count = 0;
};

// A series as it is at one time.
struct MetricSeries {
  std::vector<std::pair<std::string, std::string>> labels;  // names and values
  double value = 0;                                         // of a counter or gauge
  std::vector<MetricBucket> buckets = {};                   // of a histogram; the last has no bound
  double sum = 0;                                           // of a histogram
};

// All series of a name.
struct MetricFamily {
  std::string name;
  std::vector<MetricSeries> series;
};

// The grpc_server_ series of one method. Thread-safe.
class RpcMetrics {
 public:
  virtual ~RpcMetrics() = default;
  virtual const std::string& name() const = 0;  // "Forward"
  virtual void Started() = 0;
  virtual void Handled(absl::StatusCode code, absl::Duration duration) = 0;
};

// Thread-safe; every method is cheap and takes no lock that is held for long.
class Metrics {
 public:
  Metrics();
  ~Metrics();

  // Serves /metrics on `address` ("127.0.0.1:9464"; port 0 takes a free one) until destroyed, and returns the port.
  // UNAVAILABLE where it can't listen. Several scrapes may be under way, and a connection that sends no whole request
  // is closed after 5 s.
  absl::StatusOr<int> Expose(const std::string& address);
  // The text exposition, as /metrics gives it.
  std::string Text() const;
  // The same as values.
  std::vector<MetricFamily> Families() const;

  void ObserveStage(Pass pass, Stage stage, absl::Duration duration);
  void AddRows(Pass pass, int64_t rows);
  void AddPayloadBytes(int64_t received, int64_t sent);
  // `useful` counts 3 GEMMs forward and 6 backward; `recomputed` the backward's 2 that run again.
  void AddFlops(double useful, double recomputed);
  void SetQueuedTiles(int64_t tiles);
  void SetOpenCalls(int64_t calls);
  void SetSessions(int64_t trainers, int64_t readers);
  void SetPlannedBytes(MemoryUse use, int64_t bytes);
  // Of host memory: its part of the plan, and what messages under way may take.
  void SetMemoryBound(int64_t bytes);
  void SetStep(int64_t step, int64_t attempt);
  void CountStep(StepOutcome outcome);
  void ObserveStepPhase(StepPhase phase, absl::Duration duration);
  // How many there are to be.
  void SetReplicaCount(int64_t replicas);
  // The generation of replicas that formed, and how many are in it; one that was lost; gradients that they summed.
  void SetReplicas(int64_t generation, int64_t members);
  void CountLostGeneration();
  void AddSyncedBytes(int64_t bytes);
  void CountRepeatedRows(int64_t rows);
  void CountNonFinite();
  void SetStashBytes(int64_t bytes);
  // When the server's certificate ends. The series is there from then on.
  void SetCertificateExpiry(absl::Time time);
  // As they were read last. The series is there from then on.
  void SetFilesInOrder(ServerFiles files, bool in_order);
  void CountTicket(TicketEvent event);

  // Failed rpcs by their reason: one of kernels/status.h's names. Those that are expected are there, as 0, before the
  // first of them, so that its rate is seen.
  void ExpectFailures(absl::Span<const absl::string_view> reasons);
  void CountFailure(absl::string_view reason);
  // `service` is "shardmlp.v1.Compute", `method` "Forward"; asked for once a method, when its service is made. Lives as
  // long as these metrics.
  RpcMetrics& ForMethod(absl::string_view service, absl::string_view method, RpcKind kind);

 private:
  struct Series;
  std::unique_ptr<Series> series_;
};

}  // namespace shardmlp
