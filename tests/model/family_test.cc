// Every family served, as transformers saves it (make_models.py), against what transformers' own modules hold.
//
// Leaves each model's weights in a checkpoint for check_saved.py to read back.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/activation.h"
#include "server/model/checkpoint.h"
#include "server/model/model_config.h"
#include "server/model/model_folder.h"
#include "tests/model/files.h"
#include "tests/model/status_matchers.h"

namespace shardmlp {
namespace {

using nlohmann::json;

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};

std::string ModelsFolder() {
  const char* folder = std::getenv("SHARDMLP_MODELS");
  return folder == nullptr ? "SHARDMLP_MODELS is not set" : folder;
}

// The value of a `dtype` element, exactly.
double ElementAt(const std::vector<char>& bytes, int64_t index, DType dtype) {
  const char* at = bytes.data() + index * SizeOf(dtype);
  if (dtype == DType::kF64) {
    double value;
    memcpy(&value, at, sizeof(value));
    return value;
  }
  if (dtype == DType::kF16) {
    uint16_t bits;
    memcpy(&bits, at, sizeof(bits));
    const int exponent = bits >> 10 & 31;
    const double mantissa = (bits & 1023) + (exponent == 0 ? 0 : 1024);
    return (bits & 0x8000 ? -1 : 1) * std::ldexp(mantissa, (exponent == 0 ? 1 : exponent) - 25);
  }
  uint32_t bits = 0;
  memcpy(reinterpret_cast<char*>(&bits) + 4 - SizeOf(dtype), at, SizeOf(dtype));
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// A layer's tensors in host memory, every byte 0xff before they are read.
struct HostLayer {
  explicit HostLayer(const MlpConfig& mlp) {
    views.gate_up = Allocate("gate_up", mlp.gate_up_size(), mlp.hidden_size, mlp.dtype);
    views.down = Allocate("down", mlp.output_size, mlp.intermediate_size, mlp.dtype);
    if (mlp.gate_up_bias) views.gate_up_bias = Allocate("gate_up_bias", 1, mlp.gate_up_size(), mlp.dtype);
    if (mlp.down_bias) views.down_bias = Allocate("down_bias", 1, mlp.output_size, mlp.dtype);
  }
  MatrixView Allocate(const std::string& part, int64_t rows, int64_t cols, DType dtype) {
    parts[part].assign(rows * cols * SizeOf(dtype), '\xff');
    return {parts[part].data(), rows, cols, dtype};
  }

  std::map<std::string, std::vector<char>> parts;
  MlpTensors views;
};

std::map<int, HostLayer> ReadLayers(const ModelFolder& folder) {
  std::map<int, HostLayer> layers;
  for (const LayerSpec& layer : folder.spec().layers) layers.emplace(layer.layer, layer.mlp);
  for (const TensorSpec& tensor : folder.spec().tensors) {
    const absl::Status read = folder.Read(tensor, ViewOf(tensor, layers.at(tensor.layer).views));
    EXPECT_TRUE(read.ok()) << read;
  }
  return layers;
}

void ExpectSpec(const ModelSpec& spec, const json& expected) {
  EXPECT_EQ(spec.model_type, expected["model_type"].get<std::string>());
  ASSERT_EQ(spec.layers.size(), expected["modules"].size());
  for (const LayerSpec& layer : spec.layers) {
    EXPECT_EQ(layer.module, expected["modules"][layer.layer].get<std::string>());
    EXPECT_EQ(std::string(Name(layer.mlp.activation.kind)), expected["activation"].get<std::string>());
    EXPECT_EQ(layer.mlp.activation.gated, expected["gated"].get<bool>());
    EXPECT_EQ(layer.mlp.hidden_size, expected["hidden_size"].get<int64_t>());
    EXPECT_EQ(layer.mlp.intermediate_size, expected["intermediate_size"].get<int64_t>());
    EXPECT_EQ(layer.mlp.output_size, expected["output_size"].get<int64_t>());
    EXPECT_EQ(layer.mlp.gate_up_bias, expected["gate_up_bias"].get<bool>());
    EXPECT_EQ(layer.mlp.down_bias, expected["down_bias"].get<bool>());
  }
  json tensors;
  for (const TensorSpec& tensor : spec.tensors) tensors[tensor.name] = tensor.shape;
  EXPECT_EQ(tensors, expected["tensors"]);
}

void ExpectLayer(const HostLayer& layer, const std::string& expected_path, DType dtype) {
  for (const auto& [part, bytes] : layer.parts) {
    const std::string raw = ReadFile(absl::StrCat(expected_path, ".", part, ".", Name(dtype)));
    const int64_t count = bytes.size() / SizeOf(dtype);
    ASSERT_EQ(raw.size(), count * sizeof(double)) << part;
    for (int64_t i = 0; i < count; ++i) {
      double expected;
      memcpy(&expected, raw.data() + i * sizeof(expected), sizeof(expected));
      ASSERT_EQ(ElementAt(bytes, i, dtype), expected) << part << " element " << i;
    }
  }
}

// Bytes of `tensor` as its file has them: [in, out] where it is transposed.
absl::Status ReadInFileOrientation(const TensorSpec& tensor, ConstMatrixView view, absl::Span<char> out) {
  const int64_t size = SizeOf(view.dtype);
  for (int64_t row = 0; row < view.rows; ++row) {
    for (int64_t col = 0; col < view.cols; ++col) {
      const int64_t to = tensor.transposed ? col * view.rows + row : row * view.cols + col;
      memcpy(&out[to * size], view.Rows(row, 1).Cols(col, 1).data, size);
    }
  }
  return absl::OkStatus();
}

void SaveWeights(const ModelSpec& spec, const std::map<int, HostLayer>& layers, const std::string& path) {
  const auto store = CheckpointStore::Open(path, spec);
  ASSERT_TRUE(store.ok()) << store.status();
  CheckpointState state;
  for (const TensorSpec& tensor : spec.tensors) {
    const ConstMatrixView view = ViewOf(tensor, layers.at(tensor.layer).views);
    state.updates.emplace_back();
    state.weights.push_back({tensor.name, spec.dtype, tensor.shape, [&tensor, view](absl::Span<char> out) {
                               return ReadInFileOrientation(tensor, view, out);
                             }});
  }
  const auto saved = (*store)->Save("saved", state);
  ASSERT_TRUE(saved.ok()) << saved.status();
}

TEST(FamilyTest, EveryFamilyIsReadAsTransformersReadsIt) {
  std::set<std::string> families;
  for (const auto& folder : std::filesystem::directory_iterator(ModelsFolder())) {
    if (!folder.is_directory()) continue;
    const std::string path = folder.path();
    SCOPED_TRACE(path);
    const json expected = json::parse(ReadFile(path + "/expected.json"));
    families.insert(expected["model_type"].get<std::string>());
    for (const DType dtype : kDTypes) {
      const auto model = ModelFolder::Open(path + "/model", {.layers = std::nullopt, .dtype = dtype});
      ASSERT_TRUE(model.ok()) << model.status();
      ExpectSpec((*model)->spec(), expected);
      const std::map<int, HostLayer> layers = ReadLayers(**model);
      for (const auto& [index, layer] : layers) ExpectLayer(layer, absl::StrCat(path, "/expected/", index), dtype);
      SaveWeights((*model)->spec(), layers, absl::StrCat(path, "/checkpoints.", Name(dtype)));
    }
  }
  for (const Family& family : Families()) EXPECT_TRUE(families.contains(std::string(family.model_type)));
  EXPECT_EQ(families.size(), Families().size());
}

TEST(FamilyTest, EveryActivationOfTransformersIsServedExactlyOrRefused) {
  const json activations = json::parse(ReadFile(ModelsFolder() + "/activations.json"));
  EXPECT_GT(activations.size(), 20);
  for (const auto& [name, meaning] : activations.items()) {
    SCOPED_TRACE(name);
    const json config = {{"model_type", "llama"},
                         {"hidden_size", 2},
                         {"intermediate_size", 2},
                         {"num_hidden_layers", 1},
                         {"hidden_act", name}};
    const auto parsed = ParseModelConfig(config.dump(), "config.json");
    if (meaning.is_null()) {
      EXPECT_TRUE(Fails(parsed, absl::StatusCode::kUnimplemented, Reason::kUnsupportedModel, {"hidden_act", name}));
    } else {
      ASSERT_TRUE(parsed.ok()) << parsed.status();
      EXPECT_EQ(std::string(Name(parsed->mlp.activation.kind)), meaning.get<std::string>());
    }
  }
}

}  // namespace
}  // namespace shardmlp
