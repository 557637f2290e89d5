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
#include "server/metrics_table.h"
#include "server/process_metrics.h"

namespace shardmlp {
namespace {

using prometheus::Counter;
using prometheus::Gauge;
using prometheus::Histogram;

constexpr std::array<const char*, 3> kRpcKinds = {"unary", "server_stream", "bidi_stream"};
// absl's and gRPC's codes in order, spelled as go-grpc-prometheus does.
constexpr std::array<const char*, 17> kCodes = {
    "OK",       "Canceled",       "Unknown",          "InvalidArgument",   "DeadlineExceeded",
    "NotFound", "AlreadyExists",  "PermissionDenied", "ResourceExhausted", "FailedPrecondition",
    "Aborted",  "OutOfRange",     "Unimplemented",    "Internal",          "Unavailable",
    "DataLoss", "Unauthenticated"};

template <typename Enum>
constexpr size_t Index(Enum value) {
  return static_cast<size_t>(value);
}

class MethodSeries final : public RpcMetrics {
 public:
  MethodSeries(absl::string_view name, Counter& started, std::vector<std::reference_wrapper<Counter>> handled,
               Histogram& seconds)
      : name_(name), started_(started), handled_(std::move(handled)), seconds_(seconds) {}

  const std::string& name() const override { return name_; }
  void Started() override { started_.Increment(); }
  void Handled(absl::StatusCode code, absl::Duration duration) override {
    const auto index = static_cast<size_t>(code) < kCodes.size() ? Index(code) : Index(absl::StatusCode::kUnknown);
    handled_[index].get().Increment();
    seconds_.Observe(absl::ToDoubleSeconds(duration));
  }

 private:
  const std::string name_;
  Counter& started_;
  std::vector<std::reference_wrapper<Counter>> handled_;  // a code each
  Histogram& seconds_;
};

MetricSeries ToSeries(const prometheus::ClientMetric& metric, prometheus::MetricType type) {
  MetricSeries series;
  for (const auto& label : metric.label) series.labels.emplace_back(label.name, label.value);
  switch (type) {
    case prometheus::MetricType::Counter: series.value = metric.counter.value; break;
    case prometheus::MetricType::Histogram:
      for (const auto& bucket : metric.histogram.bucket) {
        series.buckets.push_back({bucket.upper_bound, static_cast<int64_t>(bucket.cumulative_count)});
      }
      series.sum = metric.histogram.sample_sum;
      break;
    default: series.value = metric.gauge.value; break;
  }
  return series;
}

// Label sets of a row of the table, the last label's values counting fastest; none where values are not in the table.
std::vector<prometheus::Labels> LabelSets(const SeriesSpec& spec) {
  std::vector<prometheus::Labels> sets = {{}};
  for (const SeriesLabel& label : spec.labels) {
    std::vector<prometheus::Labels> longer;
    for (const prometheus::Labels& set : sets) {
      for (const char* value : label.values) {
        longer.push_back(set);
        longer.back()[label.name] = value;
      }
    }
    sets = std::move(longer);
  }
  return sets;
}

// The series of one type, by row of the table, and in a row in the order of its label sets.
template <typename Metric>
class OfType {
 public:
  template <typename Builder, typename... Buckets>
  void Make(SeriesId id, Builder builder, prometheus::Registry& registry, const Buckets&... buckets) {
    const SeriesSpec& spec = SpecOf(id);
    families_[RowOf(id)] = &builder.Name(spec.name).Help(spec.meaning).Register(registry);
    if (spec.late) return;
    for (const prometheus::Labels& labels : LabelSets(spec)) {
      series_[RowOf(id)].push_back(&families_[RowOf(id)]->Add(labels, buckets...));
    }
  }
  Metric& At(SeriesId id, size_t label_set = 0) const { return *series_[RowOf(id)][label_set]; }
  prometheus::Family<Metric>& FamilyOf(SeriesId id) const { return *families_[RowOf(id)]; }

 private:
  std::array<prometheus::Family<Metric>*, kSeriesCount> families_ = {};
  std::array<std::vector<Metric*>, kSeriesCount> series_;
};

}  // namespace

struct Metrics::Series {
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  std::shared_ptr<prometheus::Collectable> process = std::make_shared<ProcessMetrics>();
  OfType<Counter> counters;
  OfType<Gauge> gauges;
  OfType<Histogram> histograms;
  absl::Mutex mutex;
  std::vector<std::unique_ptr<MethodSeries>> methods ABSL_GUARDED_BY(mutex);
  std::unique_ptr<MetricsEndpoint> endpoint;  // last: it reads the rest until it is gone

  Series() {
    for (size_t row = 0; row < RowOf(SeriesId::kProcessCpuSeconds); ++row) {
      const auto id = static_cast<SeriesId>(row);
      switch (SpecOf(id).type) {
        case SeriesType::kCounter: counters.Make(id, prometheus::BuildCounter(), *registry); break;
        case SeriesType::kGauge: gauges.Make(id, prometheus::BuildGauge(), *registry); break;
        case SeriesType::kHistogram:
          histograms.Make(id, prometheus::BuildHistogram(), *registry, SpecOf(id).buckets);
          break;
      }
    }
  }

  Counter& FailuresOf(absl::string_view reason) const {
    return counters.FamilyOf(SeriesId::kFailures).Add({{"reason", std::string(reason)}});
  }
  std::vector<prometheus::MetricFamily> Collect() const {
    std::vector<prometheus::MetricFamily> families = registry->Collect();
    for (prometheus::MetricFamily& family : process->Collect()) families.push_back(std::move(family));
    return families;
  }
  void Add(SeriesId id, double count, size_t label_set = 0) const { counters.At(id, label_set).Increment(count); }
  void Set(SeriesId id, int64_t value, size_t label_set = 0) const {
    gauges.At(id, label_set).Set(static_cast<double>(value));
  }
  void Observe(SeriesId id, absl::Duration duration, size_t label_set) const {
    histograms.At(id, label_set).Observe(absl::ToDoubleSeconds(duration));
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

std::string Metrics::Text() const { return prometheus::TextSerializer().Serialize(series_->Collect()); }

std::vector<MetricFamily> Metrics::Families() const {
  std::vector<MetricFamily> families;
  for (const prometheus::MetricFamily& family : series_->Collect()) {
    MetricFamily& to = families.emplace_back(MetricFamily{.name = family.name, .series = {}});
    for (const prometheus::ClientMetric& metric : family.metric) to.series.push_back(ToSeries(metric, family.type));
  }
  return families;
}

void Metrics::ObserveStage(Pass pass, Stage stage, absl::Duration duration) {
  series_->Observe(SeriesId::kStageSeconds, duration, Index(pass) * (Index(Stage::kSend) + 1) + Index(stage));
}
void Metrics::AddRows(Pass pass, int64_t rows) {
  series_->Add(SeriesId::kRows, static_cast<double>(rows), Index(pass));
}
void Metrics::AddPayloadBytes(int64_t received, int64_t sent) {
  series_->Add(SeriesId::kPayloadBytes, static_cast<double>(received), 0);
  series_->Add(SeriesId::kPayloadBytes, static_cast<double>(sent), 1);
}
void Metrics::AddFlops(double useful, double recomputed) {
  series_->Add(SeriesId::kGemmFlops, useful, 0);
  series_->Add(SeriesId::kGemmFlops, recomputed, 1);
}
void Metrics::SetQueuedTiles(int64_t tiles) { series_->Set(SeriesId::kQueuedTiles, tiles); }
void Metrics::SetOpenCalls(int64_t calls) { series_->Set(SeriesId::kOpenCalls, calls); }
void Metrics::SetSessions(int64_t trainers, int64_t readers) {
  series_->Set(SeriesId::kSessions, trainers, 0);
  series_->Set(SeriesId::kSessions, readers, 1);
}
void Metrics::SetPlannedBytes(MemoryUse use, int64_t bytes) {
  series_->Set(SeriesId::kPlannedMemoryBytes, bytes, Index(use));
}
void Metrics::SetMemoryBound(int64_t bytes) { series_->Set(SeriesId::kMemoryBoundBytes, bytes); }
void Metrics::SetStep(int64_t step, int64_t attempt) {
  series_->Set(SeriesId::kStep, step);
  series_->Set(SeriesId::kAttempt, attempt);
}
void Metrics::CountStep(StepOutcome outcome) { series_->Add(SeriesId::kSteps, 1, Index(outcome)); }
void Metrics::ObserveStepPhase(StepPhase phase, absl::Duration duration) {
  series_->Observe(SeriesId::kStepPhaseSeconds, duration, Index(phase));
}
void Metrics::CountRepeatedRows(int64_t rows) { series_->Add(SeriesId::kRepeatedRows, static_cast<double>(rows)); }
void Metrics::CountNonFinite() { series_->Add(SeriesId::kNonFiniteSteps, 1); }
void Metrics::SetStashBytes(int64_t bytes) { series_->Set(SeriesId::kStashBytes, bytes); }
void Metrics::SetCertificateExpiry(absl::Time time) {
  series_->gauges.FamilyOf(SeriesId::kCertificateExpiry).Add({}).Set(static_cast<double>(absl::ToUnixSeconds(time)));
}
void Metrics::SetFilesInOrder(ServerFiles files, bool in_order) {
  const SeriesLabel& label = SpecOf(SeriesId::kFilesInOrder).labels.front();
  series_->gauges.FamilyOf(SeriesId::kFilesInOrder).Add({{label.name, label.values[Index(files)]}}).Set(in_order);
}
void Metrics::CountTicket(TicketEvent event) { series_->Add(SeriesId::kStashTickets, 1, Index(event)); }
void Metrics::SetReplicaCount(int64_t replicas) { series_->Set(SeriesId::kReplicas, replicas); }
void Metrics::SetReplicas(int64_t generation, int64_t members) {
  series_->Set(SeriesId::kReplicaGeneration, generation);
  series_->Set(SeriesId::kReplicaMembers, members);
}
void Metrics::CountLostGeneration() {
  series_->Add(SeriesId::kReplicaGenerationsLost, 1);
  series_->Set(SeriesId::kReplicaMembers, 0);
}
void Metrics::AddSyncedBytes(int64_t bytes) { series_->Add(SeriesId::kSyncedBytes, static_cast<double>(bytes)); }

void Metrics::ExpectFailures(absl::Span<const absl::string_view> reasons) {
  for (const absl::string_view reason : reasons) series_->FailuresOf(reason);
}
void Metrics::CountFailure(absl::string_view reason) { series_->FailuresOf(reason).Increment(); }

RpcMetrics& Metrics::ForMethod(absl::string_view service, absl::string_view method, RpcKind kind) {
  const prometheus::Labels labels = {{"grpc_service", std::string(service)},
                                     {"grpc_method", std::string(method)},
                                     {"grpc_type", kRpcKinds[Index(kind)]}};
  std::vector<std::reference_wrapper<Counter>> handled;
  for (const char* code : kCodes) {
    prometheus::Labels coded = labels;
    coded["grpc_code"] = code;
    handled.emplace_back(series_->counters.FamilyOf(SeriesId::kRpcsHandled).Add(coded));
  }
  absl::MutexLock lock(&series_->mutex);
  series_->methods.push_back(std::make_unique<MethodSeries>(
      method, series_->counters.FamilyOf(SeriesId::kRpcsStarted).Add(labels), std::move(handled),
      series_->histograms.FamilyOf(SeriesId::kRpcSeconds).Add(labels, SpecOf(SeriesId::kRpcSeconds).buckets)));
  return *series_->methods.back();
}

}  // namespace shardmlp
