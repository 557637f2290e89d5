#include "server/rpc/transport.h"

#include "proto/http2.h"

namespace shardmlp {
namespace {

constexpr int kMaxStreams = 100;  // of a connection; a client holds back those beyond
// Reflection alone, of all services, has a thread for each of its streams.
constexpr int kMaxThreads = 16;

int Milliseconds(absl::Duration duration) { return static_cast<int>(absl::ToInt64Milliseconds(duration)); }

}  // namespace

void SetTransport(const MessageLimits& limits, grpc::ResourceQuota& quota, grpc::ServerBuilder& builder) {
  builder.SetResourceQuota(quota.SetMaxThreads(kMaxThreads));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
  // The streams themselves refuse a message above the limit, with a reason; gRPC cuts what is far above it.
  builder.SetMaxReceiveMessageSize(static_cast<int>(2 * limits.max_message_bytes));
  // Two servers that shared a port would each get some of the connections.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kStreamWindowBytes);
  // Clients may ping idle connections too; never "too many pings".
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, Milliseconds(kMinPingInterval));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(kKeepaliveInterval));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Milliseconds(kKeepaliveTimeout));
}

}  // namespace shardmlp
