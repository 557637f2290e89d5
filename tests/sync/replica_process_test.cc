// Replicas of which one is another process: stopped and killed in the middle of a sum.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "gtest/gtest.h"
#include "tests/sync/gloo_mesh.h"
#include "tests/sync/replica_servers.h"

namespace shardmlp::testing {
namespace {

// Runs replica_process.
class Process {
 public:
  Process(int rank, int size, const std::string& coordinator) : pid_(fork()) {
    if (pid_ != 0) return;
    execl(REPLICA_PROCESS, REPLICA_PROCESS, std::to_string(rank).c_str(), std::to_string(size).c_str(),
          coordinator.c_str(), nullptr);
    _exit(127);
  }
  ~Process() {
    Signal(SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void Signal(int signal) const { kill(pid_, signal); }

 private:
  const pid_t pid_;
};

// Two replicas here and rank 2 in a process, that sum all the time.
class ReplicaProcessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const int rank : {0, 1}) servers_.Start(rank).Join();
    process_.emplace(2, 3, servers_.coordinator);
    for (const int rank : {0, 1}) ASSERT_TRUE(servers_.recorder(rank).Hears("formed 1: ranks 0 1 2"));
  }

  // Sums until it fails, and calls `fault` once some sums have succeeded.
  void SumUntil(const std::function<void()>& fault) {
    OnRanks(2, [&](int rank) {
      const auto group = servers_.recorder(rank).generation().group;
      std::vector<float> values(1 << 20);  // more than the sockets hold
      for (int i = 0; group->AllReduceSum({MatrixView(values.data(), 1 << 10, 1 << 10, DType::kF32)}).ok(); ++i) {
        if (i == 20 && rank == 0) fault();
      }
    });
  }
  // Both that are here hear `lost` and join again.
  void FormAgain(const std::string& lost, int64_t generation, const std::string& formed) {
    for (const int rank : {0, 1}) {
      ASSERT_TRUE(servers_.recorder(rank).Hears(lost));
      servers_[rank].Join({.generation = generation});
    }
    for (const int rank : {0, 1}) ASSERT_TRUE(servers_.recorder(rank).Hears(formed));
  }
  void Continue() { FormAgain("lost: rank 2 was lost", 1, "formed 2: ranks 0 1,"); }
  void LetIn() {
    servers_[0].replicas->Admit(2, true);
    FormAgain("rank 2 came back", 2, "formed 3: ranks 0 1 2,");
  }

  ReplicaServers servers_{3, OnLoss::kContinue};
  std::optional<Process> process_;
};

TEST_F(ReplicaProcessTest, AKilledProcessIsLostAtOnceAndASuccessorComesIn) {
  SumUntil([&] { process_->Signal(SIGKILL); });
  Continue();
  process_.reset();
  process_.emplace(2, 3, servers_.coordinator);
  LetIn();
}

TEST_F(ReplicaProcessTest, AStoppedProcessIsLostInTimeAndComesInAgainOnceItGoesOn) {
  SumUntil([&] { process_->Signal(SIGSTOP); });
  Continue();
  process_->Signal(SIGCONT);
  LetIn();
}

TEST_F(ReplicaProcessTest, AStoppedProcessDoesNotKeepItsRankFromASuccessor) {
  process_->Signal(SIGSTOP);
  const Process successor(2, 3, servers_.coordinator);
  FormAgain("lost: rank 2 was lost", 1, "formed 2: ranks 0 1 2,");
}

}  // namespace
}  // namespace shardmlp::testing
