// Whether a server's memory depends on the number of tokens: prints lines `name value`.
//
// memory_256k_over_4k is the peak resident memory of a server process that trained on a call of 256K tokens over that
// of one that trained on a call of 4K (one layer, H 2048, I 5632, f32).
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "tests/bench/loopback_server.h"
#include "tests/bench/random_model.h"
#include "tests/bench/small_values.h"

ABSL_FLAG(int64_t, few_tokens, 4 << 10, "Tokens of the small call");
ABSL_FLAG(int64_t, many_tokens, 256 << 10, "Tokens of the large call");

namespace shardmlp {
namespace {

constexpr int64_t kHidden = 2048;
constexpr int64_t kIntermediate = 5632;

double PeakMiB(pid_t process) {
  std::ifstream status(absl::StrCat("/proc/", process, "/status"));
  for (std::string line; std::getline(status, line);) {
    double kib = 0;
    if (std::sscanf(line.c_str(), "VmHWM: %lf kB", &kib) == 1) return kib / 1024;
  }
  return 0;
}

// The server process: says its address on `out`, and serves until its parent closes `in`.
[[noreturn]] void Serve(int in, int out) {
  {
    const LoopbackServer server(RandomModel(1, kHidden, kIntermediate, DType::kF32));
    const std::string address = server.address() + "\n";
    if (write(out, address.data(), address.size()) < 0) std::exit(1);
    char end = 0;
    while (read(in, &end, 1) > 0) continue;
  }
  std::exit(0);
}

void Train(const std::string& address, int64_t tokens) {
  const auto client = Client::Connect(address).value();
  const auto session = client->OpenSession({}).value();
  // One block of memory for all four matrices: what is computed does not matter, and a trainer of 256K tokens needs
  // only as much as one of them here.
  std::vector<char> bytes(2 * tokens * kHidden * SizeOf(DType::kF32));
  const MatrixView x(bytes.data(), tokens, kHidden, DType::kF32);
  const MatrixView result(bytes.data() + x.byte_count(), tokens, kHidden, DType::kF32);
  FillSmall(x);
  const auto forwarded = session->Forward(0, x, result);
  Require(forwarded.status());
  Require(session->Backward(0, forwarded->weights_version, x, x, result));
  const auto sealed = session->SealStep();
  Require(sealed.status());
  CommitOptions options;
  options.groups = {{{}, Sgd{.learning_rate = 1e-3}}};
  for (const ClientTensor& tensor : client->model().tensors) options.groups[0].tensors.push_back(tensor.name);
  Require(session->CommitStep(options).status());
}

double ServerPeakMiB(int64_t tokens) {
  int to_server[2];
  int from_server[2];
  if (pipe(to_server) != 0 || pipe(from_server) != 0) Require(absl::InternalError("no pipe"));
  const pid_t server = fork();
  if (server == 0) {
    close(to_server[1]);
    close(from_server[0]);
    Serve(to_server[0], from_server[1]);
  }
  close(to_server[0]);
  close(from_server[1]);
  // The client has a process of its own too: gRPC does not survive the next fork.
  const pid_t trainer = fork();
  if (trainer == 0) {
    std::string address;
    for (char c = 0; read(from_server[0], &c, 1) == 1 && c != '\n';) address += c;
    Train(address, tokens);
    std::exit(0);
  }
  int status = 0;
  waitpid(trainer, &status, 0);
  const double peak = PeakMiB(server);
  close(to_server[1]);
  close(from_server[0]);
  waitpid(server, nullptr, 0);
  if (status != 0) Require(absl::InternalError("the trainer failed; its message is above"));
  return peak;
}

}  // namespace
}  // namespace shardmlp

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const double few = shardmlp::ServerPeakMiB(absl::GetFlag(FLAGS_few_tokens));
  const double many = shardmlp::ServerPeakMiB(absl::GetFlag(FLAGS_many_tokens));
  std::printf("memory_256k_over_4k %.3f\nmemory_4k_mib %.1f\nmemory_256k_mib %.1f\n", many / few, few, many);
  return 0;
}
