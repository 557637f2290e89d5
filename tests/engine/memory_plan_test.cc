#include "server/engine/memory_plan.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/ledger.h"
#include "tests/engine/outcome.h"

namespace shardmlp::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

MlpConfig Mlp(int64_t hidden, int64_t intermediate, int64_t output, bool gated, bool biases) {
  MlpConfig mlp;
  mlp.hidden_size = hidden;
  mlp.intermediate_size = intermediate;
  mlp.output_size = output;
  mlp.activation.gated = gated;
  mlp.gate_up_bias = mlp.down_bias = biases;
  return mlp;
}

ModelSpec Model(DType dtype, std::vector<MlpConfig> mlps) {
  ModelSpec model;
  model.dtype = dtype;
  for (MlpConfig& mlp : mlps) {
    mlp.dtype = dtype;
    model.layers.push_back({static_cast<int>(model.layers.size()), "mlp", mlp});
  }
  return model;
}

// 32 * 64 + 32 * 32 = 3072 parameters.
const MlpConfig kGated = Mlp(32, 32, 32, /*gated=*/true, /*biases=*/false);
// 64 * (32 + 1) + 16 * (64 + 1) = 3152 parameters; each of the biases, of 64 and 16, in 128 elements.
const MlpConfig kUngated = Mlp(32, 64, 16, /*gated=*/false, /*biases=*/true);

DeviceInfo Cpu(int64_t bytes = int64_t{1} << 40) { return {"cpu", bytes, /*unified_memory=*/true, bytes}; }
DeviceInfo Gpu(int64_t bytes = int64_t{1} << 40, int64_t host_bytes = int64_t{1} << 40) {
  return {"gpu", bytes, /*unified_memory=*/false, host_bytes};
}

MemoryPlan Plan(const ModelSpec& model, const EngineOptions& options = {}, const DeviceInfo& device = Cpu()) {
  return PlanMemory(model, options, device).value();
}

TEST(MemoryPlanTest, AnF32ModelIsItsOwnMaster) {
  const MemoryPlan plan = Plan(Model(DType::kF32, {kGated, kUngated}));
  EXPECT_EQ(plan.weights_bytes, (3072 + 3328) * 4);
  EXPECT_EQ(plan.gradients_bytes, (3072 + 3328) * 4);
  EXPECT_EQ(plan.master_weights_bytes, 0);
  EXPECT_EQ(plan.optimizer_bytes, (3072 + 3328) * 8);
}

TEST(MemoryPlanTest, ABf16ModelHasMastersInF32) {
  const MemoryPlan plan = Plan(Model(DType::kBF16, {kGated}));
  EXPECT_EQ(plan.weights_bytes, 3072 * 2);
  EXPECT_EQ(plan.gradients_bytes, 3072 * 4);
  EXPECT_EQ(plan.master_weights_bytes, 3072 * 4);
  EXPECT_EQ(plan.optimizer_bytes, 3072 * 8);
}

TEST(MemoryPlanTest, AnF64ModelIsF64Throughout) {
  const MemoryPlan plan = Plan(Model(DType::kF64, {kGated}));
  EXPECT_EQ(plan.weights_bytes, 3072 * 8);
  EXPECT_EQ(plan.gradients_bytes, 3072 * 8);
  EXPECT_EQ(plan.master_weights_bytes, 0);
  EXPECT_EQ(plan.optimizer_bytes, 3072 * 16);
}

TEST(MemoryPlanTest, AFrozenServerKeepsWeightsAlone) {
  const MemoryPlan plan = Plan(Model(DType::kBF16, {kGated}), {.frozen = true});
  EXPECT_EQ(plan.weights_bytes, 3072 * 2);
  EXPECT_EQ(plan.gradients_bytes + plan.master_weights_bytes + plan.optimizer_bytes + plan.ledger_bytes, 0);
}

TEST(MemoryPlanTest, ATileTakesItsRowsAndItsWorkspace) {
  const MemoryPlan plan = Plan(Model(DType::kF32, {kGated}), {.max_call_count = 3});
  EXPECT_EQ(plan.tile_row_count, 1024);
  // [G | U] and A; x, dy and the result.
  EXPECT_EQ(plan.workspace_bytes, 1024 * (64 + 32 + 32 + 32 + 32) * 4);
  // Three lanes of two tiles, each x, dy and the result.
  EXPECT_EQ(plan.staging_bytes, 3 * 2 * 1024 * (32 + 32 + 32) * 4);
  EXPECT_EQ(plan.device_bytes(), 3072 * 16 + plan.workspace_bytes);
  EXPECT_EQ(plan.total_bytes(), plan.device_bytes() + plan.staging_bytes + plan.ledger_bytes);
  EXPECT_EQ(plan.ledger_bytes, Ledger::kMaxBytes);
}

TEST(MemoryPlanTest, TheStashIsDeviceMemoryOnTopOfTheRest) {
  const ModelSpec model = Model(DType::kF32, {kGated});
  const MemoryPlan without = Plan(model), with = Plan(model, {.stash_bytes = 12345});
  EXPECT_EQ(without.stash_bytes, 0);
  EXPECT_EQ(with.stash_bytes, 49 * 256);
  EXPECT_EQ(with.device_bytes(), without.device_bytes() + 49 * 256);
  EXPECT_EQ(with.total_bytes(), without.total_bytes() + 49 * 256);
  EXPECT_THAT(with.ToString(), HasSubstr("stash"));
  for (const int64_t bytes : {int64_t{-1}, kMaxStashBytes + 1}) {
    EXPECT_TRUE(Fails(PlanMemory(model, {.stash_bytes = bytes}, Cpu()), absl::StatusCode::kInvalidArgument,
                      Reason::kInvalidArgument, {"stash_bytes"}));
  }
}

TEST(MemoryPlanTest, ADeviceWithMemoryOfItsOwnWorksOnTwoTilesAtOnce) {
  const ModelSpec model = Model(DType::kF32, {kGated});
  EXPECT_EQ(Plan(model, {}, Gpu()).workspace_bytes, 2 * Plan(model).workspace_bytes + (16 << 20))
      << "and what replicas exchange through";
  const EngineOptions bounded{.workspace_bytes = 768 * 1024};
  EXPECT_EQ(Plan(model, bounded).tile_row_count, 1024);
  EXPECT_EQ(Plan(model, bounded, Gpu()).tile_row_count, 512);
}

TEST(MemoryPlanTest, StagingIsAsWideAsTheWire) {
  const auto staging = [](DType dtype) { return Plan(Model(dtype, {kGated}), {.max_call_count = 1}).staging_bytes; };
  EXPECT_EQ(staging(DType::kBF16), 2 * 1024 * 96 * 4) << "a trainer may send f32";
  EXPECT_EQ(staging(DType::kF32), 2 * 1024 * 96 * 4);
  EXPECT_EQ(staging(DType::kF64), 2 * 1024 * 96 * 8);
}

TEST(MemoryPlanTest, TheWorkspaceBoundsTheTile) {
  const ModelSpec model = Model(DType::kF32, {kGated});
  const int64_t row = 192 * 4;
  const auto tile = [&](int64_t bytes) {
    const MemoryPlan plan = Plan(model, {.workspace_bytes = bytes});
    EXPECT_EQ(plan.workspace_bytes % 256, 0);
    EXPECT_LT(plan.workspace_bytes, bytes + 2 * 256) << "two buffers are rounded up";
    return plan.tile_row_count;
  };
  EXPECT_EQ(tile(row), 1);
  EXPECT_EQ(tile(2 * row - 1), 1);
  EXPECT_EQ(tile(63 * row), 63);
  EXPECT_EQ(tile(100 * row), 64) << "a multiple of 64 where there is one";
  EXPECT_EQ(tile(128 * row), 128);
  EXPECT_TRUE(Fails(PlanMemory(model, {.workspace_bytes = row - 1}, Cpu()), absl::StatusCode::kInvalidArgument,
                    Reason::kInvalidArgument, {"767 bytes", "one row takes 768 bytes"}));
}

TEST(MemoryPlanTest, OneTileServesLayersThatDiffer) {
  const ModelSpec model = Model(DType::kF32, {Mlp(96, 32, 16, true, false), Mlp(16, 128, 80, true, false)});
  // The larger workspace, which is the second's, and the larger rows, which are the first's.
  const int64_t row = ((256 + 128) + (96 + 16 + 96)) * 4;
  const MemoryPlan plan = Plan(model, {.workspace_bytes = 64 * row, .max_call_count = 1});
  EXPECT_EQ(plan.tile_row_count, 64);
  EXPECT_EQ(plan.workspace_bytes, 64 * row);
  // x of the first, dy of the second, and a result of the first.
  EXPECT_EQ(plan.staging_bytes, 2 * 64 * (96 + 80 + 96) * 4);
}

TEST(MemoryPlanTest, WhatDoesNotFitIsRefusedWithTheNumbers) {
  const MemoryPlan plan = Plan(Model(DType::kF32, {kGated}));
  EXPECT_TRUE(Succeeds(CheckFits(plan, Cpu(plan.total_bytes()))));
  EXPECT_TRUE(Fails(CheckFits(plan, Cpu(plan.total_bytes() - 1)), absl::StatusCode::kResourceExhausted,
                    Reason::kOutOfMemory,
                    {absl::StrCat(plan.total_bytes(), " bytes"), absl::StrCat(plan.total_bytes() - 1, " are available"),
                     "weights", "optimizer state", "tiles of 1024 rows"}));
}

TEST(MemoryPlanTest, AGpuHoldsWhatIsComputedWithAndTheHostTheRest) {
  const MemoryPlan plan = Plan(Model(DType::kF32, {kGated}), {}, Gpu());
  const int64_t device = plan.device_bytes(), host = plan.host_bytes();
  EXPECT_EQ(device + host, plan.total_bytes());
  EXPECT_EQ(host, plan.staging_bytes + plan.ledger_bytes);
  EXPECT_TRUE(Succeeds(CheckFits(plan, Gpu(device, host))));
  EXPECT_EQ(SpareHostBytes(plan, Gpu(device, host + 5)), 5);
  EXPECT_EQ(SpareHostBytes(plan, Cpu(plan.total_bytes() + 7)), 7);
  EXPECT_TRUE(Fails(CheckFits(plan, Gpu(device - 1, host)), absl::StatusCode::kResourceExhausted, Reason::kOutOfMemory,
                    {absl::StrCat(device, " bytes of gpu's memory"), absl::StrCat(device - 1, " are available")}));
  EXPECT_TRUE(Fails(CheckFits(plan, Gpu(device, host - 1)), absl::StatusCode::kResourceExhausted, Reason::kOutOfMemory,
                    {absl::StrCat(host, " bytes of host memory"), absl::StrCat(host - 1, " are available")}));
}

TEST(MemoryPlanTest, WhatIsTooLargeToCountDoesNotFit) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const ModelSpec model = Model(DType::kBF16, {kGated});
  for (const int64_t workspace : {int64_t{1} << 45, kMaxWorkspaceBytes}) {
    const EngineOptions options{.workspace_bytes = workspace, .max_call_count = kMaxCallCount};
    for (const DeviceInfo& device : {Cpu(), Gpu()}) {
      const MemoryPlan plan = Plan(model, options, device);
      EXPECT_GT(plan.workspace_bytes, workspace - (int64_t{1} << 20));
      EXPECT_GE(plan.total_bytes(), plan.staging_bytes);
      EXPECT_TRUE(Fails(CheckFits(plan, device), absl::StatusCode::kResourceExhausted, Reason::kOutOfMemory));
    }
  }
  const MlpConfig huge = Mlp(int64_t{1} << 30, int64_t{1} << 29, int64_t{1} << 30, /*gated=*/true, /*biases=*/false);
  const MemoryPlan plan = Plan(Model(DType::kBF16, {huge, huge, huge}));
  EXPECT_EQ(plan.weights_bytes, kMost) << "3 * 3 * 2^59 * 2 bytes";
  EXPECT_EQ(plan.optimizer_bytes, kMost);
  EXPECT_EQ(plan.device_bytes(), kMost);
  EXPECT_EQ(plan.total_bytes(), kMost);
}

TEST(MemoryPlanTest, OptionsOutOfRangeAreNamed) {
  const ModelSpec model = Model(DType::kF32, {kGated});
  const auto refuses = [&](const EngineOptions& options, absl::string_view named) {
    return Fails(PlanMemory(model, options, Cpu()), absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 {named});
  };
  EXPECT_TRUE(refuses({.workspace_bytes = kMaxWorkspaceBytes + 1}, "workspace_bytes: got 1125899906842625"));
  EXPECT_TRUE(refuses({.workspace_bytes = -1}, "workspace_bytes: got -1"));
  EXPECT_TRUE(refuses({.max_call_count = 0}, "max_call_count: got 0, expected 1 to 65536"));
  EXPECT_TRUE(refuses({.max_call_count = kMaxCallCount + 1}, "max_call_count: got 65537"));
}

TEST(MemoryPlanTest, TheTableHasEveryUseAndWarnsOfSmallTiles) {
  MemoryPlan plan;
  plan.weights_bytes = int64_t{3} << 20;
  plan.staging_bytes = int64_t{1} << 19;
  plan.tile_row_count = 1024;
  EXPECT_THAT(plan.ToString(), HasSubstr("weights                   3.0 MiB"));
  EXPECT_THAT(plan.ToString(), HasSubstr("staging                   0.5 MiB"));
  EXPECT_THAT(plan.ToString(), HasSubstr("total                     3.5 MiB"));
  EXPECT_THAT(plan.ToString(), Not(HasSubstr("small")));
  plan.tile_row_count = 64;
  EXPECT_THAT(plan.ToString(), HasSubstr("tiles of 64 rows (small"));
}

}  // namespace
}  // namespace shardmlp::testing
