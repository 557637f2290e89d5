// A replica in a process of its own, for tests that stop and kill it: replica_process RANK SIZE COORDINATOR. It joins,
// joins again whenever a generation is lost, and sums with the others for as long as one lasts.
#include <sys/prctl.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "server/sync/rendezvous/replicas_options.h"
#include "tests/sync/replica_options.h"

namespace shardmlp::testing {
namespace {

class Summer final : public ReplicaObserver {
 public:
  void Formed(const Generation& generation) override {
    generation_ = generation.number;
    thread_ = std::thread([group = generation.group] {
      std::vector<float> values(1 << 20);  // more than the sockets hold
      while (group->AllReduceSum({MatrixView(values.data(), 1 << 10, 1 << 10, DType::kF32)}).ok()) continue;
    });
  }
  void Agreed(int64_t, int, const std::string&) override {}
  void Stable(int64_t) override {}
  void Lost(const absl::Status&, bool) override {
    thread_.join();
    replicas->Join({.generation = generation_}, *this);
  }
  void Refused(const absl::Status& why) override {
    std::fprintf(stderr, "%s\n", why.ToString().c_str());
    std::exit(EXIT_FAILURE);
  }

  Replicas* replicas = nullptr;

 private:
  int64_t generation_ = 0;
  std::thread thread_;
};

int Run(int rank, int size, const char* coordinator) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const auto replicas = MakeReplicas(FastOptions(rank, size, coordinator)).value();
  Summer summer;
  summer.replicas = replicas.get();
  replicas->Join({}, summer);
  while (true) pause();
}

}  // namespace
}  // namespace shardmlp::testing

int main(int argc, char** argv) {
  if (argc != 4) return EXIT_FAILURE;
  return shardmlp::testing::Run(std::atoi(argv[1]), std::atoi(argv[2]), argv[3]);
}
