// Payload bytes a second each way through the shard streams, with an engine that only copies, over those of a bare
// gRPC echo of the same message size and connections. Both servers are one other process; calls alternate.
#include <grpcpp/create_channel.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "server/rpc/rpc_server.h"
#include "server/rpc/transport.h"
#include "tests/bench/wire_echo.h"
#include "tests/rpc/copy_engine.h"

namespace shardmlp {
namespace {

constexpr int64_t kHiddenSize = 2048;
constexpr int64_t kRows = 16384;  // [16384, 2048] f32 is 128 MiB each way
constexpr int64_t kTileRows = 1024;
constexpr int kPairs = 15;

// Serves until `until` closes, having written both addresses to `to`.
int RunServers(int until, int to) {
  Metrics metrics;
  CopyEngine engine({.layer_count = 1, .hidden_size = kHiddenSize, .tile_row_count = kTileRows});
  auto server = RpcServer::Listen({.listen = {"127.0.0.1:0"}}, metrics);
  if (!server.ok()) return EXIT_FAILURE;
  (*server)->Serve(engine);

  EchoService echo;
  grpc::ServerBuilder builder;
  SetTransport({}, builder);
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterCallbackGenericService(&echo);
  const auto echo_server = builder.BuildAndStart();

  const std::string addresses = absl::StrCat((*server)->addresses().front(), " 127.0.0.1:", port);
  if (write(to, addresses.data(), addresses.size()) < 0) return EXIT_FAILURE;
  close(to);
  char byte = 0;
  while (read(until, &byte, 1) > 0) continue;
  return EXIT_SUCCESS;
}

grpc::ChannelArguments Arguments(int connection) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt("shardmlp.connection", connection);
  arguments.SetMaxReceiveMessageSize(-1);
  return arguments;
}

// Seconds that `run` takes on `count` threads at once.
template <typename Run>
double Time(int count, Run run) {
  const absl::Time start = absl::Now();
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&run, i] { run(i); });
  for (std::thread& thread : threads) thread.join();
  return absl::ToDoubleSeconds(absl::Now() - start);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "wire_bench: %s\n", status.ToString().c_str());
  return EXIT_FAILURE;
}

int RunClients(const std::string& server, const std::string& echo, int connections) {
  ClientOptions options;
  options.connections = connections;
  auto client = Client::Connect(server, options);
  if (!client.ok()) return Fail(client.status());
  auto session = (*client)->OpenSession({});
  if (!session.ok()) return Fail(session.status());

  constexpr int64_t kBytes = kRows * kHiddenSize * static_cast<int64_t>(sizeof(float));
  std::vector<std::vector<char>> x(connections, std::vector<char>(kBytes, 1));
  std::vector<std::vector<char>> y(connections, std::vector<char>(kBytes));
  absl::Status failure;
  const auto shards = [&](int i) {
    const auto version = (*session)->Forward(0, ConstMatrixView(x[i].data(), kRows, kHiddenSize, DType::kF32),
                                             MatrixView(y[i].data(), kRows, kHiddenSize, DType::kF32));
    if (!version.ok()) failure = version.status();
  };

  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int i = 0; i < connections; ++i) {
    channels.push_back(grpc::CreateCustomChannel(echo, grpc::InsecureChannelCredentials(), Arguments(i)));
  }
  const std::vector<char> message((*client)->model().preferred_shard_bytes, 1);
  const auto echoes = [&](int i) {
    if (!RunEcho(channels[i], message, kBytes / static_cast<int64_t>(message.size()))) {
      failure = absl::UnavailableError("the echo broke off");
    }
  };

  std::vector<double> ratios;
  std::vector<double> rates;
  for (int pair = -1; pair < kPairs; ++pair) {
    const double shard_seconds = Time(connections, shards);
    const double echo_seconds = Time(connections, echoes);
    if (!failure.ok()) return Fail(failure);
    if (pair < 0) continue;  // warm-up
    ratios.push_back(echo_seconds / shard_seconds);
    rates.push_back(static_cast<double>(connections * kBytes) / shard_seconds * 1e-9);
  }
  for (const auto& result : y) {
    if (result != x[0]) return Fail(absl::DataLossError("y differs from x"));
  }
  std::fprintf(stderr, "%d connections: %.3f GB/s each way\n", connections, Median(rates));
  std::printf("wire_over_grpc_echo %.3f\n", Median(ratios));
  return EXIT_SUCCESS;
}

int Run(int argc, char** argv) {
  int connections = 1;
  if (argc > 1 && !absl::SimpleAtoi(argv[1], &connections)) {
    std::fprintf(stderr, "usage: wire_bench [CONNECTIONS]\n");
    return EXIT_FAILURE;
  }
  int to_child[2];
  int to_parent[2];
  if (pipe(to_child) != 0 || pipe(to_parent) != 0) return EXIT_FAILURE;
  const pid_t child = fork();
  if (child == 0) {
    close(to_child[1]);
    return RunServers(to_child[0], to_parent[1]);
  }
  close(to_parent[1]);
  std::string addresses;
  char buffer[256];
  for (ssize_t count; (count = read(to_parent[0], buffer, sizeof(buffer))) > 0;) addresses.append(buffer, count);
  const std::pair<std::string, std::string> both = absl::StrSplit(addresses, ' ');
  const int result = RunClients(both.first, both.second, connections);
  close(to_child[1]);
  waitpid(child, nullptr, 0);
  return result;
}

}  // namespace
}  // namespace shardmlp

int main(int argc, char** argv) { return shardmlp::Run(argc, argv); }
