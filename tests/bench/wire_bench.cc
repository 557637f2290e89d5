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

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cpp/client.h"
#include "server/rpc/rpc_server.h"
#include "server/rpc/transport.h"
#include "tests/bench/small_values.h"
#include "tests/bench/wire_echo.h"
#include "tests/rpc/copy_engine.h"

ABSL_FLAG(int, connections, 1, "Connections, with a call on each");
ABSL_FLAG(int, rounds, 15, "Pairs of subject and reference");
ABSL_FLAG(int64_t, tokens, 4096, "Tokens of a call");
ABSL_FLAG(int64_t, shard_bytes, 0, "Of a message; 0: as the server prefers");

namespace shardmlp {
namespace {

constexpr int64_t kHiddenSize = 2048;
constexpr int64_t kTileRows = 256;

// Serves until `until` closes, having written both addresses to `to`.
int RunServers(int until, int to) {
  Metrics metrics;
  CopyEngine engine({.layer_count = 1, .hidden_size = kHiddenSize, .tile_row_count = kTileRows});
  auto server = RpcServer::Listen({.listen = {"127.0.0.1:0"}}, metrics);
  if (!server.ok()) return EXIT_FAILURE;
  (*server)->Serve(engine);

  EchoService echo;
  grpc::ServerBuilder builder;
  grpc::ResourceQuota quota("echo");
  SetTransport({}, quota, builder);
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
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&run, i] { run(i); });
  for (std::thread& thread : threads) thread.join();
  return SecondsSince(start);
}

// Both ways over connections of their own, on the same memory.
class Wires {
 public:
  Wires(const std::string& server, const std::string& echo, int connections, int64_t rows)
      : rows_(rows), x_(connections, std::vector<char>(rows * kRowBytes)), y_(x_) {
    ClientOptions options;
    options.connections = connections;
    options.shard_bytes = absl::GetFlag(FLAGS_shard_bytes);
    client_ = Client::Connect(server, options).value();
    session_ = client_->OpenSession({}).value();
    for (int i = 0; i < connections; ++i) {
      FillSmall(MatrixView(x_[i].data(), rows, kHiddenSize, DType::kF32));
      channels_.push_back(grpc::CreateCustomChannel(echo, grpc::InsecureChannelCredentials(), Arguments(i)));
    }
  }

  double TimeShards() {
    return Time(connections(), [this](int i) {
      Require(session_
                  ->Forward(0, ConstMatrixView(x_[i].data(), rows_, kHiddenSize, DType::kF32),
                            MatrixView(y_[i].data(), rows_, kHiddenSize, DType::kF32))
                  .status());
    });
  }
  double TimeEcho() {
    const int64_t shard_bytes = absl::GetFlag(FLAGS_shard_bytes);
    const int64_t message_bytes = shard_bytes > 0 ? shard_bytes : client_->model().preferred_shard_bytes;
    return Time(connections(), [&](int i) { Require(RunEcho(channels_[i], x_[i], message_bytes)); });
  }
  bool intact() const { return x_ == y_; }
  double bytes() const { return static_cast<double>(connections() * rows_ * kRowBytes); }

 private:
  static constexpr int64_t kRowBytes = kHiddenSize * static_cast<int64_t>(sizeof(float));
  int connections() const { return static_cast<int>(x_.size()); }

  const int64_t rows_;
  std::vector<std::vector<char>> x_;  // [rows, H] f32, one a connection
  std::vector<std::vector<char>> y_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Session> session_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;
};

void Measure(const std::string& server, const std::string& echo) {
  Wires wires(server, echo, absl::GetFlag(FLAGS_connections), absl::GetFlag(FLAGS_tokens));
  wires.TimeShards();
  wires.TimeEcho();
  if (!wires.intact()) Require(absl::DataLossError("y differs from x"));
  std::vector<double> ratios, rates;
  for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    // The machine drifts: the reference before and after stand for the time in between.
    const double before = wires.TimeEcho();
    const double seconds = wires.TimeShards();
    ratios.push_back((before + wires.TimeEcho()) / 2 / seconds);
    rates.push_back(wires.bytes() / seconds);
  }
  std::printf("wire_over_grpc_echo %.3f\nwire_bytes_per_second %.0f\n", Median(ratios), Median(rates));
}

int Run() {
  int to_child[2];
  int to_parent[2];
  if (pipe(to_child) != 0 || pipe(to_parent) != 0) return EXIT_FAILURE;
  const pid_t child = fork();  // ahead of any use of gRPC
  if (child == 0) {
    close(to_child[1]);
    return RunServers(to_child[0], to_parent[1]);
  }
  close(to_parent[1]);
  std::string addresses;
  char buffer[256];
  for (ssize_t count; (count = read(to_parent[0], buffer, sizeof(buffer))) > 0;) addresses.append(buffer, count);
  const std::pair<std::string, std::string> both = absl::StrSplit(addresses, ' ');
  Measure(both.first, both.second);
  close(to_child[1]);
  waitpid(child, nullptr, 0);
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace shardmlp

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return shardmlp::Run();
}
