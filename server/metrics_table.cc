#include "server/metrics_table.h"

namespace shardmlp {
namespace {

constexpr auto kCounter = SeriesType::kCounter;
constexpr auto kGauge = SeriesType::kGauge;
constexpr auto kHistogram = SeriesType::kHistogram;

const SeriesLabel kPass = {"pass", {"forward", "backward"}};
const SeriesLabel kService = {"grpc_service", {}, "shardmlp.v1.Compute, Training, Model or Operation"};
const SeriesLabel kMethod = {"grpc_method", {}, "an rpc of the service"};
const SeriesLabel kKind = {"grpc_type", {}, "unary, server_stream or bidi_stream"};
const SeriesLabel kCode = {"grpc_code", {}, "a status code of gRPC: OK, Aborted"};
const SeriesLabel kReason = {"reason", {}, "a reason of [the protocol](protocol.md)"};

const std::vector<double> kStageBuckets = {25e-6, 50e-6, 1e-4, 25e-5, 5e-4, 1e-3, 25e-4, 5e-3, 0.01,
                                           0.025, 0.05,  0.1,  0.25,  0.5,  1,    2.5,   5,    10};
const std::vector<double> kPhaseBuckets = {1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300};
const std::vector<double> kRpcBuckets = {5e-4, 1e-3, 25e-4, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25,
                                         0.5,  1,    2.5,   5,    10,   30,    60,   300};

}  // namespace

const std::array<SeriesSpec, kSeriesCount>& SeriesTable() {
  static const auto* const table = new std::array<SeriesSpec, kSeriesCount>{{
      {"shardmlp_rows_total", kCounter, "rows", {kPass}, "Rows computed."},
      {"shardmlp_repeated_rows_total", kCounter, "rows", {}, "Backward rows sent again and not counted again."},
      {"shardmlp_payload_bytes_total",
       kCounter,
       "bytes",
       {{"direction", {"received", "sent"}}},
       "Activations and their gradients that came and went."},
      {"shardmlp_gemm_flops_total",
       kCounter,
       "FLOP",
       {{"kind", {"useful", "recomputed"}}},
       "Floating-point operations of matrix products: useful are 3 products forward and 6 backward, recomputed the "
       "backward's 2 that run again."},
      {"shardmlp_stage_seconds",
       kHistogram,
       "seconds",
       {kPass, {"stage", {"receive", "queue", "copy_in", "compute", "copy_out", "send"}}},
       "Time of a message (receive, send) or of a tile (the others) in a stage.",
       kStageBuckets},
      {"shardmlp_queued_tiles", kGauge, "tiles", {}, "Tiles that wait for the device, looked at once a second."},
      {"shardmlp_open_calls", kGauge, "calls", {}, "Forward and backward calls that are open."},
      {"shardmlp_sessions", kGauge, "sessions", {{"role", {"train", "read"}}}, "Open sessions."},
      {"shardmlp_step", kGauge, "steps", {}, "Committed steps of the weights that are served."},
      {"shardmlp_attempt", kGauge, "attempts", {}, "The open step's attempt."},
      {"shardmlp_steps_total",
       kCounter,
       "attempts",
       {{"outcome", {"committed", "discarded", "aborted"}}},
       "Attempts of steps that ended."},
      {"shardmlp_step_phase_seconds",
       kHistogram,
       "seconds",
       {{"phase", {"seal", "sync", "apply"}}},
       "Parts of a step: the last seal after the first, the replicas' sum, the optimizer.",
       kPhaseBuckets},
      {"shardmlp_non_finite_steps_total", kCounter, "attempts", {}, "Attempts with a NaN or infinite gradient."},
      {"shardmlp_planned_memory_bytes",
       kGauge,
       "bytes",
       {{"use", {"weights", "gradients", "master_weights", "optimizer", "workspace", "staging", "ledger", "stash"}}},
       "The memory plan, as the start prints it."},
      {"shardmlp_memory_bound_bytes",
       kGauge,
       "bytes",
       {},
       "Host memory that the server keeps to: its part of the plan, and what messages under way may take."},
      {"shardmlp_stash_bytes", kGauge, "bytes", {}, "What forwards keep for their backward."},
      {"shardmlp_stash_tickets_total",
       kCounter,
       "tickets",
       {{"event", {"granted", "hit", "missed"}}},
       "Tickets that a forward got, that a backward named and found, and that were missing."},
      {"shardmlp_replicas", kGauge, "servers", {}, "Servers that are to be one to a run (--replicas)."},
      {"shardmlp_replica_members", kGauge, "servers", {}, "Those that are together; 0 once one was lost."},
      {"shardmlp_replica_generation", kGauge, "generations", {}, "The last set of replicas that formed."},
      {"shardmlp_replica_generations_lost_total", kCounter, "generations", {}, "Sets that lost a replica."},
      {"shardmlp_synced_bytes_total", kCounter, "bytes", {}, "Gradients summed with other replicas."},
      {.name = "shardmlp_certificate_expiry_timestamp_seconds",
       .type = kGauge,
       .unit = "seconds",
       .labels = {},
       .meaning = "When the server's TLS certificate ends, since 1970; none without TLS.",
       .late = true},
      {.name = "shardmlp_files_in_order",
       .type = kGauge,
       .unit = "",
       .labels = {{"file", {"tokens", "certificate", "replica_ca"}}},
       .meaning =
           "1 where the files that the flags name were right when they were last read, which is each second, else "
           "0; none without --token-file, --tls-cert or --replica-ca.",
       .late = true},
      {"shardmlp_failures_total", kCounter, "rpcs", {kReason}, "Rpcs that failed."},
      {"grpc_server_started_total", kCounter, "rpcs", {kService, kMethod, kKind}, "Rpcs started on the server."},
      {"grpc_server_handled_total",
       kCounter,
       "rpcs",
       {kService, kMethod, kKind, kCode},
       "Rpcs completed on the server, whatever the outcome."},
      {"grpc_server_handling_seconds",
       kHistogram,
       "seconds",
       {kService, kMethod, kKind},
       "Time from an rpc's start to its status.",
       kRpcBuckets},
      {"process_cpu_seconds_total", kCounter, "seconds", {}, "User and system CPU time."},
      {"process_resident_memory_bytes", kGauge, "bytes", {}, "Resident memory."},
      {"process_virtual_memory_bytes", kGauge, "bytes", {}, "Virtual memory."},
      {"process_open_fds", kGauge, "files", {}, "Open file descriptors."},
  }};
  return *table;
}

}  // namespace shardmlp
