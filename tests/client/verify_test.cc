// `shardmlpctl verify` against the real server: each shape of file that an MLP comes in, in each dtype.
#include "client/cli/verify/verify.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/layers.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/engine/engine.h"
#include "server/model/convert.h"
#include "server/model/model_config.h"
#include "server/model/model_folder.h"
#include "server/rpc/rpc_server.h"

namespace shardmlp {
namespace {

constexpr int64_t kHidden = 24;
constexpr int64_t kIntermediate = 40;

// Two layers of a family, with weights that differ from tensor to tensor.
class FamilyFolder final : public ModelFolder {
 public:
  // "clamped" is llama with biases and with limits that some of G and U are beyond.
  FamilyFolder(const std::string& model_type, DType dtype) {
    const bool clamped = model_type == "clamped";
    const Family& family = *FindFamily(clamped ? "llama" : model_type);
    nlohmann::json config = {{"model_type", family.model_type},
                             {family.layer_count_key, 2},
                             {family.hidden_size_key, kHidden},
                             {family.intermediate_size_key, kIntermediate}};
    if (!family.bias_key.empty()) config[std::string(family.bias_key)] = model_type != "llama";
    const auto parsed = ParseModelConfig(config.dump(), "config.json");
    spec_ = *MakeModelSpec(*parsed, family.prefix, {.layers = std::nullopt, .dtype = dtype});
    if (!clamped) return;
    for (LayerSpec& layer : spec_.layers) {
      layer.mlp.activation = {.kind = ActivationKind::kClampedSwiglu, .limit = 0.75};
    }
  }

  const ModelSpec& spec() const override { return spec_; }
  absl::Status Read(const TensorSpec& tensor, MatrixView to) const override {
    std::mt19937 random(std::hash<std::string>()(tensor.name));
    std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(to.cols)));
    std::vector<float> row(to.cols);
    for (int64_t r = 0; r < to.rows; ++r) {
      for (float& value : row) value = normal(random);
      ConvertElements(row.data(), DType::kF32, to.Rows(r, 1).data, to.dtype, to.cols);
    }
    return absl::OkStatus();
  }

 private:
  ModelSpec spec_;
};

class VerifyTest : public testing::TestWithParam<std::tuple<std::string, DType, bool>> {};

TEST_P(VerifyTest, ARightServerIsWithinTheBound) {
  const auto& [model_type, dtype, frozen] = GetParam();
  Metrics metrics;
  RpcServerOptions rpc_options;
  rpc_options.listen = {"127.0.0.1:0"};
  auto server = RpcServer::Listen(rpc_options, metrics);
  ASSERT_TRUE(server.ok()) << server.status();
  EngineOptions engine_options;
  engine_options.frozen = frozen;
  engine_options.workspace_bytes = 1 << 20;
  auto backend = MakeCpuBackend({.threads = 1});
  ASSERT_TRUE(backend.ok()) << backend.status();
  auto engine = Engine::Create(engine_options, *std::move(backend), FamilyFolder(model_type, dtype),
                               MakeLocalReplicas(), nullptr, metrics);
  ASSERT_TRUE(engine.ok()) << engine.status();
  (*server)->Serve(**engine);

  auto client = Client::Connect((*server)->addresses().front());
  ASSERT_TRUE(client.ok()) << client.status();
  const auto layers = SelectLayers((*client)->model(), "");
  ASSERT_TRUE(layers.ok()) << layers.status();
  ASSERT_EQ(layers->size(), 2);
  std::ostringstream out;
  const absl::StatusOr<bool> within = Verify(**client, *layers, 9, out);
  ASSERT_TRUE(within.ok()) << within.status();
  EXPECT_TRUE(*within) << out.str();
  RecordProperty("table", out.str());

  client->reset();
  (*engine)->Shutdown();
  (*server)->Shutdown(absl::UnavailableError("the test is over"), absl::Now() + absl::Seconds(5));
}

std::vector<std::string> ModelTypes() {
  std::vector<std::string> types;
  for (const Family& family : Families()) types.emplace_back(family.model_type);
  return types;
}

std::string CaseName(const testing::TestParamInfo<VerifyTest::ParamType>& info) {
  const auto& [model_type, dtype, frozen] = info.param;
  return absl::StrCat(model_type, "_", Name(dtype), frozen ? "_frozen" : "");
}

INSTANTIATE_TEST_SUITE_P(Families, VerifyTest,
                         testing::Combine(testing::ValuesIn(ModelTypes()), testing::Values(DType::kF32),
                                          testing::Values(false)),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(DTypes, VerifyTest,
                         testing::Combine(testing::Values("llama", "phi3", "gpt2", "nemotron", "clamped"),
                                          testing::Values(DType::kF32, DType::kBF16, DType::kF64), testing::Bool()),
                         CaseName);

}  // namespace
}  // namespace shardmlp
