#include "server/sync/rendezvous/replicas_options.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "server/sync/rendezvous/coordinator_server.h"
#include "server/sync/rendezvous/gloo_transport.h"
#include "server/sync/rendezvous/local_address.h"
#include "server/sync/rendezvous/member.h"

namespace shardmlp {
namespace {

constexpr int kMaxReplicas = 1024;

absl::Status Invalid(absl::string_view message) {
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, message);
}

}  // namespace

absl::Status Validate(const ReplicasOptions& options) {
  if (options.size < 1 || options.size > kMaxReplicas) {
    return Invalid(absl::StrCat("number of replicas is ", options.size, ", expected 1 to ", kMaxReplicas));
  }
  if (options.rank < 0 || options.rank >= options.size) {
    return Invalid(absl::StrCat("rank is ", options.rank, ", expected 0 to ", options.size - 1));
  }
  if (options.size == 1) return absl::OkStatus();
  SHARDMLP_RETURN_IF_ERROR(Annotate(CheckHostAndPort(options.coordinator), "coordinator: "));
  for (const absl::string_view everywhere : {"0.0.0.0:", "[::]:"}) {
    if (!absl::StartsWith(options.coordinator, everywhere)) continue;
    return Invalid(absl::StrCat("coordinator is ", options.coordinator, ", expected an address that others can call"));
  }
  for (const auto& [name, duration] :
       {std::pair("start time-out", options.start_timeout), std::pair("heartbeat", options.heartbeat),
        std::pair("connect time-out", options.connect_timeout), std::pair("sum time-out", options.sum_timeout)}) {
    if (duration >= absl::Milliseconds(10) && duration <= absl::Hours(24)) continue;
    return Invalid(absl::StrCat(name, " is ", absl::FormatDuration(duration), ", expected 10ms to 24h"));
  }
  if (options.loss_timeout < 2 * options.heartbeat || options.loss_timeout > absl::Hours(1)) {
    return Invalid(absl::StrCat("loss time-out is ", absl::FormatDuration(options.loss_timeout),
                                ", expected two heartbeats (", absl::FormatDuration(2 * options.heartbeat), ") to 1h"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Replicas>> MakeReplicas(const ReplicasOptions& options) {
  SHARDMLP_RETURN_IF_ERROR(Validate(options));
  if (options.size == 1) return MakeLocalReplicas();
  std::unique_ptr<CoordinatorServer> server;
  if (options.rank == 0) {
    SHARDMLP_ASSIGN_OR_RETURN(server, CoordinatorServer::Listen(options));
  }
  ReplicasOptions complete = options;
  if (complete.transport.listen == nullptr) complete.transport = GlooTransport(options);
  return std::make_unique<Member>(complete, std::move(server));
}

}  // namespace shardmlp
