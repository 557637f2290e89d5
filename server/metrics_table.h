// Every series that a server exports: Metrics makes them from this table, and docs/operations.md shows it.
//
// Names are `shardmlp_` and base units; histograms, not summaries. No label takes a value from a client, a session or a
// step: each has few values, all known when the server starts. Beside them are the grpc_server_ series under the names
// and labels of go-grpc-prometheus, and process_ ones, so that stock dashboards work.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace shardmlp {

// Rows of the table, in order.
enum class SeriesId {
  kRows,
  kRepeatedRows,
  kPayloadBytes,
  kGemmFlops,
  kStageSeconds,
  kQueuedTiles,
  kOpenCalls,
  kSessions,
  kStep,
  kAttempt,
  kSteps,
  kStepPhaseSeconds,
  kNonFiniteSteps,
  kPlannedMemoryBytes,
  kMemoryBoundBytes,
  kStashBytes,
  kStashTickets,
  kReplicas,
  kReplicaMembers,
  kReplicaGeneration,
  kReplicaGenerationsLost,
  kSyncedBytes,
  kCertificateExpiry,
  kFilesInOrder,
  kFailures,
  kRpcsStarted,
  kRpcsHandled,
  kRpcSeconds,
  kProcessCpuSeconds,
  kProcessResidentBytes,
  kProcessVirtualBytes,
  kProcessOpenFiles,
};
inline constexpr size_t kSeriesCount = static_cast<size_t>(SeriesId::kProcessOpenFiles) + 1;

enum class SeriesType { kCounter, kGauge, kHistogram };

// `values` in the order of the enum that they stand for; empty where the server's parts say them at its start, and
// `described` then says what they are.
struct SeriesLabel {
  const char* name;
  std::vector<const char*> values;
  const char* described = "";
};

struct SeriesSpec {
  const char* name;
  SeriesType type;
  const char* unit;
  std::vector<SeriesLabel> labels;
  const char* meaning;
  std::vector<double> buckets = {};  // a histogram's
  bool late = false;                 // there from its first value on; all others from the start
};

const std::array<SeriesSpec, kSeriesCount>& SeriesTable();

constexpr size_t RowOf(SeriesId id) { return static_cast<size_t>(id); }
inline const SeriesSpec& SpecOf(SeriesId id) { return SeriesTable()[RowOf(id)]; }

}  // namespace shardmlp
