#include "server/sync/rendezvous/gloo_transport.h"

#include <string>
#include <utility>

#include "kernels/status.h"
#include "server/sync/gloo_group.h"
#include "server/sync/rendezvous/local_address.h"

namespace shardmlp {
namespace {

absl::StatusOr<GlooDevice> OpenDevice(std::string host, const std::string& coordinator) {
  if (host.empty()) {
    SHARDMLP_ASSIGN_OR_RETURN(host, LocalAddressTowards(coordinator));
  }
  return OpenGlooDevice(host);
}

}  // namespace

Transport GlooTransport(const ReplicasOptions& options) {
  const GlooOptions gloo{.connect_timeout = options.connect_timeout, .timeout = options.sum_timeout};
  auto listen = [gloo, host = options.sync_host, coordinator = options.coordinator, device = GlooDevice()](
                    int rank, int size) mutable -> absl::StatusOr<std::shared_ptr<PeerGroup>> {
    if (device == nullptr) {
      SHARDMLP_ASSIGN_OR_RETURN(device, OpenDevice(host, coordinator));
    }
    return GlooGroup::Listen(device, rank, size, gloo);
  };
  return {"gloo", std::move(listen)};
}

}  // namespace shardmlp
