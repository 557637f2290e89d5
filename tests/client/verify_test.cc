// `shardmlpctl verify` against the real server: each shape of file that an MLP comes in, in each dtype.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/engine/engine.h"
#include "server/model/convert.h"
#include "server/model/model_folder.h"
#include "server/rpc/rpc_server.h"

namespace shardmlp {
namespace {

constexpr int64_t kHidden = 24;
constexpr int64_t kIntermediate = 40;

struct FilePart {
  std::string name;
  TensorSlot slot;
  int64_t begin;
  int64_t count;
};

struct Family {
  std::string model_type;
  Activation activation;
  std::vector<FilePart> parts;
  bool bias = false;
  bool transposed = false;
};

const Family kLlama = {.model_type = "llama",
                       .activation = {ActivationKind::kSilu, true},
                       .parts = {{"gate_proj", TensorSlot::kGateUp, 0, kIntermediate},
                                 {"up_proj", TensorSlot::kGateUp, kIntermediate, kIntermediate},
                                 {"down_proj", TensorSlot::kDown, 0, kHidden}}};
const Family kPhi3 = {.model_type = "phi3",
                      .activation = {ActivationKind::kSilu, true},
                      .parts = {{"gate_up_proj", TensorSlot::kGateUp, 0, 2 * kIntermediate},
                                {"down_proj", TensorSlot::kDown, 0, kHidden}}};
const Family kGpt2 = {
    .model_type = "gpt2",
    .activation = {ActivationKind::kGeluTanh, false},
    .parts = {{"c_fc", TensorSlot::kGateUp, 0, kIntermediate}, {"c_proj", TensorSlot::kDown, 0, kHidden}},
    .bias = true,
    .transposed = true};
const Family kNemotron = {
    .model_type = "nemotron",
    .activation = {ActivationKind::kRelu2, false},
    .parts = {{"up_proj", TensorSlot::kGateUp, 0, kIntermediate}, {"down_proj", TensorSlot::kDown, 0, kHidden}}};

// Limits that some of G and U are beyond.
const Family kClamped = {.model_type = "clamped",
                         .activation = {.kind = ActivationKind::kClampedSwiglu, .limit = 0.75},
                         .parts = kLlama.parts,
                         .bias = true};

// Two layers of a family, with weights that differ from tensor to tensor.
class FamilyFolder final : public ModelFolder {
 public:
  FamilyFolder(const Family& family, DType dtype) {
    spec_.model_type = family.model_type;
    spec_.dtype = dtype;
    for (int layer = 0; layer < 2; ++layer) {
      MlpConfig mlp;
      mlp.hidden_size = mlp.output_size = kHidden;
      mlp.intermediate_size = kIntermediate;
      mlp.activation = family.activation;
      mlp.gate_up_bias = mlp.down_bias = family.bias;
      mlp.dtype = dtype;
      const std::string module = absl::StrCat("model.layers.", layer, ".mlp");
      spec_.layers.push_back({layer, module, mlp});
      for (const FilePart& part : family.parts) AddTensors(family, layer, module, part);
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
  void AddTensors(const Family& family, int layer, const std::string& module, const FilePart& part) {
    const int64_t in = part.slot == TensorSlot::kGateUp ? kHidden : kIntermediate;
    std::vector<int64_t> shape = {part.count, in};
    if (family.transposed) std::swap(shape[0], shape[1]);
    spec_.tensors.push_back({.name = absl::StrCat(module, ".", part.name, ".weight"),
                             .layer = layer,
                             .shape = shape,
                             .slot = part.slot,
                             .output_begin = part.begin,
                             .output_count = part.count,
                             .transposed = family.transposed});
    if (!family.bias) return;
    spec_.tensors.push_back({.name = absl::StrCat(module, ".", part.name, ".bias"),
                             .layer = layer,
                             .shape = {part.count},
                             .slot = part.slot == TensorSlot::kGateUp ? TensorSlot::kGateUpBias : TensorSlot::kDownBias,
                             .output_begin = part.begin,
                             .output_count = part.count});
  }

  ModelSpec spec_;
};

class VerifyTest : public testing::TestWithParam<std::tuple<Family, DType, bool>> {};

TEST_P(VerifyTest, ARightServerIsWithinTheBound) {
  const auto& [family, dtype, frozen] = GetParam();
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
  auto engine = Engine::Create(engine_options, *std::move(backend), FamilyFolder(family, dtype), MakeLocalGroup(),
                               nullptr, metrics);
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

INSTANTIATE_TEST_SUITE_P(Families, VerifyTest,
                         testing::Combine(testing::Values(kLlama, kPhi3, kGpt2, kNemotron, kClamped),
                                          testing::Values(DType::kF32, DType::kBF16, DType::kF64), testing::Bool()),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param).model_type, "_", Name(std::get<1>(info.param)),
                                               std::get<2>(info.param) ? "_frozen" : "");
                         });

}  // namespace
}  // namespace shardmlp
