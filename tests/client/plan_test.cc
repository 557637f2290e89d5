// The arithmetic of `shardmlpctl plan`, against values computed by hand for the shape of Llama 3 8B.
#include "client/cli/plan/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/plan/measured_plan.h"
#include "client/cli/plan/plan_report.h"
#include "client/cpp/options.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr double kExact = 1e-12;  // relative

std::vector<ClientLayer> Llama8B(int layers = 32) {
  std::vector<ClientLayer> all;
  for (int layer = 0; layer < layers; ++layer) {
    all.push_back({.layer = layer,
                   .module = "model.layers.mlp",
                   .hidden_size = 4096,
                   .intermediate_size = 14336,
                   .output_size = 4096,
                   .activation = "silu",
                   .gated = true});
  }
  return all;
}

// 8192 rows a call in bf16, tiles of 1024, 25 Gbit/s and 200 us; 300 TFLOP/s on the server, 40 on the trainer.
const PlanCalls kCalls = {.rows = 8192, .tile_rows = 1024, .dtype = DType::kBF16};
const PlanLink kLink = {.bytes_per_second = 3.125e9, .round_trip = absl::Microseconds(200)};
const PlanRates kRates = {.server_forward = 300e12, .server_backward = 300e12, .trainer = 40e12};
constexpr double kOwnFlops = 12815695872;

void ExpectNear(double got, double expected) { EXPECT_NEAR(got, expected, kExact * expected); }

TEST(PlanTest, ARowCostsWhatReadmeSays) {
  const ClientLayer layer = Llama8B()[0];
  // 2 H I is 117440512: 3 of them forward, 6 backward and 2 of recompute.
  const CallCost forward = CostOf(layer, CallKind::kForward, 1, DType::kBF16, {});
  EXPECT_EQ(forward.flops, 3 * 117440512.0);
  EXPECT_EQ(forward.sent_bytes, 8192);
  EXPECT_EQ(forward.received_bytes, 8192);
  const CallCost backward = CostOf(layer, CallKind::kBackward, 10, DType::kF32, {.weight_gradient = true});
  EXPECT_EQ(backward.rows, 10);
  EXPECT_EQ(backward.flops, 10 * 8 * 117440512.0);
  EXPECT_EQ(backward.sent_bytes, 10 * 2 * 16384);
  EXPECT_EQ(backward.received_bytes, 10 * 16384);
  EXPECT_EQ(CostOf(layer, CallKind::kBackward, 1, DType::kBF16, {}).flops, 5 * 117440512.0);
  const CostOptions kept{.weight_gradient = true, .x_kept = true, .gate_up_kept = true};
  const CallCost stashed = CostOf(layer, CallKind::kBackward, 1, DType::kBF16, kept);
  EXPECT_EQ(stashed.flops, 6 * 117440512.0);
  EXPECT_EQ(stashed.sent_bytes, 8192);
}

TEST(PlanTest, ACallIsAsLongAsItsSlowestPartAndTheFirstTilesOthers) {
  const RowTimes row{.up = 3e-6, .compute = 1e-6, .down = 2e-6};
  EXPECT_DOUBLE_EQ(CallSeconds(row, 100, 1024, absl::Milliseconds(1)), 1e-3 + 100 * 6e-6) << "one tile: no overlap";
  EXPECT_DOUBLE_EQ(CallSeconds(row, 4096, 1024, absl::Milliseconds(1)), 1e-3 + 1024 * 6e-6 + 3 * 1024 * 3e-6);
}

TEST(PlanTest, AWindowBoundsACallOverALongLink) {
  EXPECT_EQ(kCallWindowBytes, 4 << 20);
  EXPECT_EQ(CallBytesPerSecond(kLink), 3.125e9);
  // The 400 MB/s that proto/http2.h names.
  ExpectNear(CallBytesPerSecond({.bytes_per_second = 3.125e9, .round_trip = absl::Milliseconds(10)}), 419430400);
}

TEST(PlanTest, ATokensTimeIsTheTrainersOwnAndThatOfItsCalls) {
  const TokenTime token = TokenTimeOf(Llama8B(), kCalls, kLink, kRates, kOwnFlops);
  ExpectNear(token.own, 0.0003203923968);
  ExpectNear(token.compute, 0.00013779686741333333);
  ExpectNear(token.link, 0.00025165824);
  // A forward takes 25.56 ms, a backward 49.04 ms.
  ExpectNear(token.remote, 32 * (0.025561781882879997 + 0.04904093643434666) / 8192);
  ExpectNear(token.total(), 1 / 1634.496332169004);
}

TEST(PlanTest, TheSlowestPartBoundsTheWhole) {
  const std::vector<std::vector<ClientLayer>> one = {Llama8B()};
  const auto throughput = [&](const std::vector<std::vector<ClientLayer>>& servers, PlanLink link, PlanRates rates,
                              double own_flops, int64_t trainers) {
    return RemoteThroughput(servers, kCalls, link, rates, own_flops, trainers);
  };
  const Throughput alone = throughput(one, kLink, kRates, kOwnFlops, 1);
  ExpectNear(alone.tokens_per_second, 1634.496332169004);
  EXPECT_EQ(alone.bound, PlanBound::kTrainer);
  EXPECT_EQ(throughput(one, kLink, kRates, 1, 1).bound, PlanBound::kLink);
  // Four trainers could do 6538 tokens a second; the server's link carries 3974.
  const Throughput four = throughput(one, kLink, kRates, kOwnFlops, 4);
  ExpectNear(four.tokens_per_second, 3973.6429850260415);
  EXPECT_EQ(four.bound, PlanBound::kLink);
  // Over four times the link, sixteen are bounded by the server's arithmetic; over two servers, each does half of it.
  const PlanLink fast{.bytes_per_second = 12.5e9, .round_trip = absl::Microseconds(200)};
  const Throughput sixteen = throughput(one, fast, kRates, kOwnFlops, 16);
  ExpectNear(sixteen.tokens_per_second, 7257.0590229777545);
  EXPECT_EQ(sixteen.bound, PlanBound::kCompute);
  ExpectNear(throughput(SpreadLayers(Llama8B(), 2), fast, kRates, kOwnFlops, 16).tokens_per_second,
             2 * 7257.0590229777545);
  // A call of few rows over a long link waits for round trips.
  const PlanLink far{.bytes_per_second = 3.125e9, .round_trip = absl::Milliseconds(5)};
  PlanCalls few = kCalls;
  few.rows = 64;
  EXPECT_EQ(RemoteThroughput(one, few, far, kRates, kOwnFlops, 1).bound, PlanBound::kRoundTrips);
}

TEST(PlanTest, LocalIsNineProductsOfATokenAtTheTrainersRate) {
  ExpectNear(LocalTokensPerSecond(Llama8B(), kRates, kOwnFlops, /*weight_gradient=*/true, 1), 857.6593519548991);
  ExpectNear(LocalTokensPerSecond(Llama8B(), kRates, kOwnFlops, /*weight_gradient=*/true, 3), 3 * 857.6593519548991);
}

TEST(PlanTest, ShardsAreLargerOnAFasterLink) {
  const auto best = [](double gbps) {
    return BestShardBytes({.bytes_per_second = gbps * 1e9 / 8, .round_trip = absl::Microseconds(100)});
  };
  EXPECT_EQ(best(0.1), 128 << 10);
  EXPECT_EQ(best(10), 1 << 20);
  EXPECT_EQ(best(25), 4 << 20);
  EXPECT_EQ(best(400), 4 << 20) << "as large as messages may be";
}

TEST(PlanTest, LayersAreSpreadEvenly) {
  std::vector<std::vector<int>> spread;
  for (const std::vector<ClientLayer>& server : SpreadLayers(Llama8B(7), 3)) {
    spread.emplace_back();
    for (const ClientLayer& layer : server) spread.back().push_back(layer.layer);
  }
  EXPECT_EQ(spread, (std::vector<std::vector<int>>{{0, 1}, {2, 3}, {4, 5, 6}}));
}

TEST(PlanTest, AVariantIsBestWhereItIsClearlyFaster) {
  EXPECT_EQ(BestOf({{0, 100}, {1, 104}, {2, 90}}).value, 0);
  EXPECT_EQ(BestOf({{0, 100}, {1, 104}, {2, 106}}).value, 2);
}

// A folder with Llama 3 8B's config.json, and no weights.
class ModelPlanTest : public testing::Test {
 protected:
  ModelPlanTest() {
    std::filesystem::create_directory(flags_.model);
    std::ofstream(flags_.model + "/config.json") << nlohmann::json({{"model_type", "llama"},
                                                                    {"hidden_size", 4096},
                                                                    {"intermediate_size", 14336},
                                                                    {"num_hidden_layers", 32},
                                                                    {"num_attention_heads", 32},
                                                                    {"num_key_value_heads", 8},
                                                                    {"vocab_size", 128256},
                                                                    {"hidden_act", "silu"}});
  }
  ~ModelPlanTest() override { std::filesystem::remove_all(flags_.model); }

  std::string Printed(const PlanReport& report) {
    std::ostringstream out;
    PrintPlan(report, out);
    return out.str();
  }

  PlanFlags flags_ = {.model = testing::TempDir() + "planned_model",
                      .dtype = DType::kBF16,
                      .server_tflops = 300,
                      .trainer_tflops = 40,
                      .link_gbps = 25};
};

TEST_F(ModelPlanTest, MemoryAndSpeedOfAModelThatIsNotServedYet) {
  const auto plan = MakePlan(flags_, 8192);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->model.own_flops, kOwnFlops);
  ExpectNear(plan->servers.tokens_per_second, 1634.496332169004);
  ExpectNear(plan->local_tokens_per_second, 857.6593519548991);
  // 3 * 32 * H * I parameters, of 2 bytes of weights, 4 of gradients, 4 of masters and 8 of moments.
  constexpr int64_t kParameters = int64_t{3} * 32 * 4096 * 14336;
  EXPECT_EQ(plan->local_bytes, 18 * kParameters);
  ASSERT_EQ(plan->model.memory.size(), 1);
  EXPECT_EQ(plan->model.memory[0].weights_bytes, 2 * kParameters);
  EXPECT_EQ(plan->recommendation, Recommendation::kServers);
  EXPECT_THAT(Printed(*plan), AllOf(HasSubstr(plan->model.memory[0].ToString()), HasSubstr("1634.5 tokens a second"),
                                    HasSubstr("use servers: 1.91 times as fast as local")));
}

TEST_F(ModelPlanTest, KeepItLocalWhereThatIsFasterAndFits) {
  flags_.link_gbps = 1;
  auto plan = MakePlan(flags_, 8192);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->recommendation, Recommendation::kLocal);
  EXPECT_EQ(plan->servers.bound, PlanBound::kLink);
  EXPECT_THAT(Printed(*plan), HasSubstr("keep it local: "));
  flags_.trainer_memory = int64_t{80} << 30;  // of 94.5 GiB
  plan = MakePlan(flags_, 8192);
  EXPECT_EQ(plan->recommendation, Recommendation::kServers);
  EXPECT_THAT(Printed(*plan), HasSubstr("local does not fit into 80.0 GiB"));
  flags_.server_memory = int64_t{40} << 30;
  plan = MakePlan(flags_, 8192);
  EXPECT_EQ(plan->recommendation, Recommendation::kNeither);
  EXPECT_EQ(plan->model.least_servers, 3);
  EXPECT_THAT(Printed(*plan), HasSubstr("does not fit into 40.0 GiB; servers that would do: 3"));
  flags_.servers = 3;
  plan = MakePlan(flags_, 8192);
  EXPECT_TRUE(plan->model.fits);
  EXPECT_EQ(plan->model.memory.size(), 3);
  EXPECT_EQ(plan->recommendation, Recommendation::kServers);
}

TEST_F(ModelPlanTest, AStashSparesWhatItHasRoomFor) {
  const auto backward_with = [&](int64_t stash_bytes) {
    flags_.stash_bytes = stash_bytes;
    return MakePlan(flags_, 8192)->calls.backward;
  };
  constexpr int64_t kX = int64_t{8192} * 32 * 8192;  // rows, layers, bytes
  constexpr int64_t kGateUp = int64_t{8192} * 32 * 2 * 14336 * 2;
  EXPECT_FALSE(backward_with(kX - 1).x_kept);
  EXPECT_TRUE(backward_with(kX).x_kept);
  EXPECT_FALSE(backward_with(kX + kGateUp - 1).gate_up_kept);
  EXPECT_TRUE(backward_with(kX + kGateUp).gate_up_kept);
  flags_.trainers = 2;
  EXPECT_FALSE(backward_with(kX + kGateUp).gate_up_kept);
}

TEST_F(ModelPlanTest, WhatIsMissingOrWrongIsNamed) {
  flags_.link_gbps = 0;
  EXPECT_THAT(std::string(MakePlan(flags_, 1).status().message()), HasSubstr("--link-gbps"));
  flags_.link_gbps = 1;
  flags_.servers = 33;
  EXPECT_THAT(std::string(MakePlan(flags_, 1).status().message()), HasSubstr("--servers is 33, and the model has 32"));
  flags_.servers = 1;
  flags_.workspace_bytes = 100;
  EXPECT_EQ(MakePlan(flags_, 1).status().code(), absl::StatusCode::kInvalidArgument) << "holds no tile";
  flags_.model += "/config.json";
  EXPECT_THAT(std::string(MakePlan(flags_, 1).status().message()), HasSubstr("is not a folder"));
}

}  // namespace
}  // namespace shardmlp
