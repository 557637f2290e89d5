#include "server/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <array>
#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/metrics_endpoint.h"
#include "server/process_metrics.h"

namespace shardmlp {
namespace {

using prometheus::Counter;
using prometheus::Gauge;
using prometheus::Histogram;
using Buckets = Histogram::BucketBoundaries;

constexpr std::array<const char*, 2> kPasses = {"forward", "backward"};
constexpr std::array<const char*, 6> kStages = {"receive", "queue", "copy_in", "compute", "copy_out", "send"};
constexpr std::array<const char*, 3> kOutcomes = {"committed", "discarded", "aborted"};
constexpr std::array<const char*, 3> kPhases = {"seal", "sync", "apply"};
constexpr std::array<const char*, 8> kUses = {"weights",   "gradients", "master_weights", "optimizer",
                                              "workspace", "staging",   "ledger",         "stash"};
constexpr std::array<const char*, 3> kTicketEvents = {"granted", "hit", "missed"};
constexpr std::array<const char*, 3> kRpcKinds = {"unary", "server_stream", "bidi_stream"};
// absl's and gRPC's codes in order, spelled as go-grpc-prometheus does.
constexpr std::array<const char*, 17> kCodes = {
    "OK",       "Canceled",       "Unknown",          "InvalidArgument",   "DeadlineExceeded",
    "NotFound", "AlreadyExists",  "PermissionDenied", "ResourceExhausted", "FailedPrecondition",
    "Aborted",  "OutOfRange",     "Unimplemented",    "Internal",          "Unavailable",
    "DataLoss", "Unauthenticated"};

const Buckets kStageBuckets = {25e-6, 50e-6, 1e-4, 25e-5, 5e-4, 1e-3, 25e-4, 5e-3, 0.01,
                               0.025, 0.05,  0.1,  0.25,  0.5,  1,    2.5,   5,    10};
const Buckets kPhaseBuckets = {1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300};
const Buckets kRpcBuckets = {5e-4, 1e-3, 25e-4, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300};

template <typename Enum>
constexpr size_t Index(Enum value) {
  return static_cast<size_t>(value);
}

class MethodSeries final : public RpcMetrics {
 public:
  MethodSeries(Counter& started, std::vector<std::reference_wrapper<Counter>> handled, Histogram& seconds)
      : started_(started), handled_(std::move(handled)), seconds_(seconds) {}

  void Started() override { started_.Increment(); }
  void Handled(absl::StatusCode code, absl::Duration duration) override {
    const auto index = static_cast<size_t>(code) < kCodes.size() ? Index(code) : Index(absl::StatusCode::kUnknown);
    handled_[index].get().Increment();
    seconds_.Observe(absl::ToDoubleSeconds(duration));
  }

 private:
  Counter& started_;
  std::vector<std::reference_wrapper<Counter>> handled_;  // a code each
  Histogram& seconds_;
};

}  // namespace

struct Metrics::Series {
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  std::shared_ptr<prometheus::Collectable> process = std::make_shared<ProcessMetrics>();

  std::array<std::array<Histogram*, kStages.size()>, kPasses.size()> stage_seconds;
  std::array<Counter*, kPasses.size()> rows;
  std::array<Histogram*, kPhases.size()> phase_seconds;
  std::array<Counter*, kOutcomes.size()> steps;
  std::array<Gauge*, kUses.size()> planned_bytes;
  Counter* received_bytes;
  Counter* sent_bytes;
  Counter* useful_flops;
  Counter* recomputed_flops;
  Gauge* stash_bytes;
  std::array<Counter*, kTicketEvents.size()> tickets;
  Gauge* queued_tiles;
  Gauge* open_calls;
  Gauge* trainers;
  Gauge* readers;
  Gauge* step;
  Gauge* attempt;
  Counter* repeated_rows;
  Counter* non_finite;
  Gauge* generation;
  Gauge* members;
  Counter* lost_generations;
  Counter* synced_bytes;

  prometheus::Family<Gauge>* certificate_expiry;
  prometheus::Family<Counter>* failures;
  prometheus::Family<Counter>* rpcs_started;
  prometheus::Family<Counter>* rpcs_handled;
  prometheus::Family<Histogram>* rpc_seconds;
  absl::Mutex mutex;
  std::vector<std::unique_ptr<MethodSeries>> methods ABSL_GUARDED_BY(mutex);

  prometheus::Family<Counter>& Counters(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(*registry);
  }
  prometheus::Family<Gauge>& Gauges(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(*registry);
  }
  prometheus::Family<Histogram>& Histograms(const char* name, const char* help) {
    return prometheus::BuildHistogram().Name(name).Help(help).Register(*registry);
  }

  std::unique_ptr<MetricsEndpoint> endpoint;  // last: it reads the rest until it is gone

  Series() {
    MakeDataPath();
    MakeState();
    MakeStash();
    MakeSteps();
    MakeReplicas();
    certificate_expiry = &Gauges("shardmlp_certificate_expiry_timestamp_seconds",
                                 "When the server's TLS certificate ends; none without TLS.");
    failures = &Counters("shardmlp_failures_total", "Rpcs that failed, by reason.");
    rpcs_started = &Counters("grpc_server_started_total", "Rpcs started on the server.");
    rpcs_handled = &Counters("grpc_server_handled_total", "Rpcs completed on the server, whatever the outcome.");
    rpc_seconds = &Histograms("grpc_server_handling_seconds", "Time from an rpc's start to its status.");
  }

  void MakeDataPath() {
    auto& stages = Histograms("shardmlp_stage_seconds", "Time that a tile, or a message, spends in a stage.");
    auto& row_counters = Counters("shardmlp_rows_total", "Rows computed.");
    for (size_t pass = 0; pass < kPasses.size(); ++pass) {
      rows[pass] = &row_counters.Add({{"pass", kPasses[pass]}});
      for (size_t stage = 0; stage < kStages.size(); ++stage) {
        stage_seconds[pass][stage] = &stages.Add({{"pass", kPasses[pass]}, {"stage", kStages[stage]}}, kStageBuckets);
      }
    }
    auto& bytes = Counters("shardmlp_payload_bytes_total", "Activation bytes received and sent.");
    received_bytes = &bytes.Add({{"direction", "received"}});
    sent_bytes = &bytes.Add({{"direction", "sent"}});
    auto& flops = Counters("shardmlp_gemm_flops_total",
                           "GEMM floating-point operations: useful are 3 GEMMs forward and 6 backward, recomputed 2.");
    useful_flops = &flops.Add({{"kind", "useful"}});
    recomputed_flops = &flops.Add({{"kind", "recomputed"}});
    repeated_rows =
        &Counters("shardmlp_repeated_rows_total", "Backward rows sent again and not counted again.").Add({});
  }

  void MakeState() {
    queued_tiles = &Gauges("shardmlp_queued_tiles", "Tiles that wait for the device.").Add({});
    open_calls = &Gauges("shardmlp_open_calls", "Forward and backward calls that are open.").Add({});
    auto& sessions = Gauges("shardmlp_sessions", "Open sessions.");
    trainers = &sessions.Add({{"role", "train"}});
    readers = &sessions.Add({{"role", "read"}});
    auto& planned = Gauges("shardmlp_planned_memory_bytes", "The memory plan.");
    for (size_t use = 0; use < kUses.size(); ++use) planned_bytes[use] = &planned.Add({{"use", kUses[use]}});
  }

  void MakeStash() {
    stash_bytes = &Gauges("shardmlp_stash_bytes", "What forwards keep for their backward.").Add({});
    auto& events = Counters("shardmlp_stash_tickets_total",
                            "Tickets that a forward got, that a backward named and found, and that were missing.");
    for (size_t i = 0; i < kTicketEvents.size(); ++i) tickets[i] = &events.Add({{"event", kTicketEvents[i]}});
  }

  void MakeSteps() {
    step = &Gauges("shardmlp_step", "Committed steps.").Add({});
    attempt = &Gauges("shardmlp_attempt", "The open step's attempt.").Add({});
    auto& outcomes = Counters("shardmlp_steps_total", "Attempts of steps that ended.");
    for (size_t i = 0; i < kOutcomes.size(); ++i) steps[i] = &outcomes.Add({{"outcome", kOutcomes[i]}});
    auto& phases = Histograms("shardmlp_step_phase_seconds",
                              "Parts of a step: seal (last waits for first), sync (replicas sum), apply (optimizer).");
    for (size_t i = 0; i < kPhases.size(); ++i) phase_seconds[i] = &phases.Add({{"phase", kPhases[i]}}, kPhaseBuckets);
    non_finite = &Counters("shardmlp_non_finite_steps_total", "Attempts with a NaN or infinite gradient.").Add({});
  }

  void MakeReplicas() {
    generation = &Gauges("shardmlp_replica_generation", "The last set of replicas that formed.").Add({});
    members = &Gauges("shardmlp_replica_members", "Replicas in that set, or 0 once it is lost.").Add({});
    lost_generations = &Counters("shardmlp_replica_generations_lost_total", "Sets that lost a replica.").Add({});
    synced_bytes = &Counters("shardmlp_synced_bytes_total", "Gradients summed with other replicas.").Add({});
  }
};

Metrics::Metrics() : series_(std::make_unique<Series>()) {}
Metrics::~Metrics() = default;

absl::StatusOr<int> Metrics::Expose(const std::string& address) {
  absl::StatusOr<std::unique_ptr<MetricsEndpoint>> endpoint =
      MetricsEndpoint::Listen(address, [this] { return Text(); });
  if (!endpoint.ok()) return endpoint.status();
  series_->endpoint = *std::move(endpoint);
  return series_->endpoint->port();
}

std::string Metrics::Text() const {
  std::vector<prometheus::MetricFamily> families = series_->registry->Collect();
  for (prometheus::MetricFamily& family : series_->process->Collect()) families.push_back(std::move(family));
  return prometheus::TextSerializer().Serialize(families);
}

void Metrics::ObserveStage(Pass pass, Stage stage, absl::Duration duration) {
  series_->stage_seconds[Index(pass)][Index(stage)]->Observe(absl::ToDoubleSeconds(duration));
}
void Metrics::AddRows(Pass pass, int64_t rows) { series_->rows[Index(pass)]->Increment(static_cast<double>(rows)); }
void Metrics::AddPayloadBytes(int64_t received, int64_t sent) {
  series_->received_bytes->Increment(static_cast<double>(received));
  series_->sent_bytes->Increment(static_cast<double>(sent));
}
void Metrics::AddFlops(double useful, double recomputed) {
  series_->useful_flops->Increment(useful);
  series_->recomputed_flops->Increment(recomputed);
}
void Metrics::SetQueuedTiles(int64_t tiles) { series_->queued_tiles->Set(static_cast<double>(tiles)); }
void Metrics::SetOpenCalls(int64_t calls) { series_->open_calls->Set(static_cast<double>(calls)); }
void Metrics::SetSessions(int64_t trainers, int64_t readers) {
  series_->trainers->Set(static_cast<double>(trainers));
  series_->readers->Set(static_cast<double>(readers));
}
void Metrics::SetPlannedBytes(MemoryUse use, int64_t bytes) {
  series_->planned_bytes[Index(use)]->Set(static_cast<double>(bytes));
}
void Metrics::SetStep(int64_t step, int64_t attempt) {
  series_->step->Set(static_cast<double>(step));
  series_->attempt->Set(static_cast<double>(attempt));
}
void Metrics::CountStep(StepOutcome outcome) { series_->steps[Index(outcome)]->Increment(); }
void Metrics::ObserveStepPhase(StepPhase phase, absl::Duration duration) {
  series_->phase_seconds[Index(phase)]->Observe(absl::ToDoubleSeconds(duration));
}
void Metrics::CountRepeatedRows(int64_t rows) { series_->repeated_rows->Increment(static_cast<double>(rows)); }
void Metrics::CountNonFinite() { series_->non_finite->Increment(); }
void Metrics::SetStashBytes(int64_t bytes) { series_->stash_bytes->Set(static_cast<double>(bytes)); }
void Metrics::SetCertificateExpiry(absl::Time time) {
  series_->certificate_expiry->Add({}).Set(static_cast<double>(absl::ToUnixSeconds(time)));
}
void Metrics::CountTicket(TicketEvent event) { series_->tickets[Index(event)]->Increment(); }
void Metrics::SetReplicas(int64_t generation, int64_t members) {
  series_->generation->Set(static_cast<double>(generation));
  series_->members->Set(static_cast<double>(members));
}
void Metrics::CountLostGeneration() {
  series_->lost_generations->Increment();
  series_->members->Set(0);
}
void Metrics::AddSyncedBytes(int64_t bytes) { series_->synced_bytes->Increment(static_cast<double>(bytes)); }

void Metrics::CountFailure(absl::string_view reason) {
  series_->failures->Add({{"reason", std::string(reason)}}).Increment();
}

RpcMetrics& Metrics::ForMethod(absl::string_view service, absl::string_view method, RpcKind kind) {
  const prometheus::Labels labels = {{"grpc_service", std::string(service)},
                                     {"grpc_method", std::string(method)},
                                     {"grpc_type", kRpcKinds[Index(kind)]}};
  std::vector<std::reference_wrapper<Counter>> handled;
  for (const char* code : kCodes) {
    prometheus::Labels coded = labels;
    coded["grpc_code"] = code;
    handled.emplace_back(series_->rpcs_handled->Add(coded));
  }
  absl::MutexLock lock(&series_->mutex);
  series_->methods.push_back(std::make_unique<MethodSeries>(series_->rpcs_started->Add(labels), std::move(handled),
                                                            series_->rpc_seconds->Add(labels, kRpcBuckets)));
  return *series_->methods.back();
}

}  // namespace shardmlp
