// Replicas on GPUs, which sum over NCCL: engines over the emulation, that meet over gRPC on loopback.
#include <memory>

#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "server/sync/nccl_group.h"
#include "tests/cuda_emulation/emulation.h"
#include "tests/engine/replica_set.h"
#include "tests/kernels/layer.h"
#include "tests/sync/free_port.h"
#include "tests/sync/replica_options.h"

namespace shardmlp::testing {
namespace {

class EmulatedReplicasTest : public ::testing::TestWithParam<int> {
 protected:
  EmulatedReplicasTest() { emulation::SetSeed(GetParam()); }
  ~EmulatedReplicasTest() override {
    emulation::Reset();
    EXPECT_EQ(emulation::live_object_count(), 0);
  }

  // Each on a GPU of its own.
  ReplicaParts Parts() const {
    ReplicaParts parts;
    parts.backend = [](int rank) { return MakeCudaBackend({.device = rank}).value(); };
    parts.replicas = [this](int rank) {
      ReplicasOptions options = FastOptions(rank, GetParam(), coordinator_);
      options.transport = NcclTransport({.device = rank}).value();
      return MakeReplicas(options).value();
    };
    return parts;
  }

  const TinyModel model_{{OddMlp(DType::kF32), UngatedMlp(DType::kF32)}};
  const std::string coordinator_ = FreeAddress();
};

TEST_P(EmulatedReplicasTest, AreOneEngineThatSawTheWholeBatch) {
  ReplicaSet replicas(model_, GetParam(), OnLoss::kWait, Parts());
  ExpectAsOneEngine(replicas, model_, {7, 0, 3}, 1e-5);
}

// What it missed comes to its GPU from the others'.
TEST_P(EmulatedReplicasTest, OneThatComesBackHasWhatTheOthersHave) {
  ReplicaSet replicas(model_, GetParam(), OnLoss::kWait, Parts());
  std::vector<std::unique_ptr<Trainer>> trainers;
  trainers.push_back(std::make_unique<Trainer>(*replicas[0]));
  const Batch batch(model_, {6}, 1);
  TrainStep(trainers, batch, AdamW{.learning_rate = 0.01});
  replicas.ExpectAlike();
  replicas.Kill(1);
  replicas.Start(1);
  replicas.ExpectAlike();
  TrainStep(trainers, batch, AdamW{.learning_rate = 0.01});
  EXPECT_EQ(replicas[0]->position().step, 2);
  replicas.ExpectAlike();
}

INSTANTIATE_TEST_SUITE_P(Sizes, EmulatedReplicasTest, ::testing::Values(2, 3, 4));

}  // namespace
}  // namespace shardmlp::testing
