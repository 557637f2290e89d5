// Model folders made by hand: what is read into which slot, and what is refused by which name.
#include "server/model/model_folder.h"

#include <sys/stat.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/model/safetensors_writer.h"
#include "tests/model/files.h"
#include "tests/model/status_matchers.h"

namespace shardmlp {
namespace {

using nlohmann::json;

struct HandTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::string dtype = "F64";
  int64_t element_bytes = 8;
};

// One layer, H 2, I 3.
std::vector<HandTensor> LlamaTensors() {
  return {{"model.layers.0.mlp.gate_proj.weight", {3, 2}},
          {"model.layers.0.mlp.up_proj.weight", {3, 2}},
          {"model.layers.0.mlp.down_proj.weight", {2, 3}},
          {"lm_head.weight", {4, 2}, "I8", 1}};
}

json LlamaJson() {
  return {{"model_type", "llama"}, {"hidden_size", 2}, {"intermediate_size", 3}, {"num_hidden_layers", 1}};
}

std::string FileOf(const std::vector<HandTensor>& tensors) {
  json header = json::object();
  int64_t end = 0;
  for (const HandTensor& tensor : tensors) {
    int64_t bytes = tensor.element_bytes;
    for (const int64_t size : tensor.shape) bytes *= size;
    header[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {end, end + bytes}}};
    end += bytes;
  }
  return SafetensorsBytes(header.dump(), end);
}

class ModelFolderTest : public testing::Test {
 protected:
  void Write(const json& config, const std::vector<HandTensor>& tensors) {
    WriteFile(folder_ / "config.json", config.dump());
    WriteFile(folder_ / "model.safetensors", FileOf(tensors));
  }
  // Two shards, the down projection in the second.
  void WriteShards(const json& weight_map) {
    const auto tensors = LlamaTensors();
    WriteFile(folder_ / "config.json", LlamaJson().dump());
    WriteFile(folder_ / "a.safetensors", FileOf({tensors[0], tensors[1]}));
    WriteFile(folder_ / "b.safetensors", FileOf({tensors[2]}));
    WriteFile(folder_ / "model.safetensors.index.json", json{{"weight_map", weight_map}}.dump());
  }
  static json WeightMap() {
    const auto tensors = LlamaTensors();
    return {{tensors[0].name, "a.safetensors"}, {tensors[1].name, "a.safetensors"}, {tensors[2].name, "b.safetensors"}};
  }
  absl::StatusOr<std::unique_ptr<ModelFolder>> Open() const { return ModelFolder::Open(folder_.path(), {}); }

  testing::AssertionResult IsCorrupt(std::initializer_list<absl::string_view> named) const {
    return Fails(Open(), absl::StatusCode::kDataLoss, Reason::kModelCorrupt, named);
  }
  testing::AssertionResult IsUnsupported(std::initializer_list<absl::string_view> named) const {
    return Fails(Open(), absl::StatusCode::kUnimplemented, Reason::kUnsupportedModel, named);
  }

  TempFolder folder_;
};

TEST_F(ModelFolderTest, ReadsOneFileAndShards) {
  Write(LlamaJson(), LlamaTensors());
  EXPECT_TRUE(Open().ok()) << Open().status();
  std::filesystem::remove(folder_ / "model.safetensors");
  WriteShards(WeightMap());
  EXPECT_TRUE(Open().ok()) << Open().status();
}

TEST_F(ModelFolderTest, SaysWhatIsNotThere) {
  EXPECT_TRUE(Fails(ModelFolder::Open(folder_ / "none", {}), absl::StatusCode::kNotFound, Reason::kInvalidArgument,
                    {folder_ / "none"}));
  EXPECT_EQ(Open().status().code(), absl::StatusCode::kNotFound);  // no config.json
  WriteFile(folder_ / "config.json", LlamaJson().dump());
  EXPECT_TRUE(Fails(Open(), absl::StatusCode::kNotFound, Reason::kModelCorrupt, {"model.safetensors"}));
  WriteFile(folder_ / "pytorch_model.bin", "");
  EXPECT_TRUE(IsUnsupported({"pytorch_model.bin", "safetensors"}));
}

TEST_F(ModelFolderTest, RefusesAFileThatIsNone) {
  WriteFile(folder_ / "config.json", LlamaJson().dump());
  std::filesystem::create_directory(folder_ / "model.safetensors");
  EXPECT_TRUE(IsCorrupt({"model.safetensors is not a regular file"}));
  std::filesystem::remove(folder_ / "model.safetensors");
  ASSERT_EQ(mkfifo((folder_ / "model.safetensors").c_str(), 0600), 0);  // must not wait for a writer
  EXPECT_TRUE(IsCorrupt({"model.safetensors is not a regular file"}));
}

TEST_F(ModelFolderTest, RefusesAShapeThatTheConfigContradicts) {
  auto tensors = LlamaTensors();
  tensors[1].shape = {2, 3};
  Write(LlamaJson(), tensors);
  EXPECT_TRUE(IsCorrupt({"model.safetensors", "up_proj.weight at byte", "is [2, 3]; [3, 2] was expected"}));
  tensors[1].shape = {6};
  Write(LlamaJson(), tensors);
  EXPECT_TRUE(IsCorrupt({"is [6]; [3, 2] was expected"}));
}

TEST_F(ModelFolderTest, RefusesATensorThatIsMissing) {
  auto tensors = LlamaTensors();
  tensors.erase(tensors.begin() + 2);
  Write(LlamaJson(), tensors);
  EXPECT_TRUE(IsCorrupt({"\"model.layers.0.mlp.down_proj.weight\" is missing"}));
  tensors.clear();
  Write(LlamaJson(), tensors);
  EXPECT_TRUE(IsCorrupt({"neither tensor model.layers.0.mlp.gate_proj.weight nor tensor layers.0.mlp.gate_proj"}));
}

TEST_F(ModelFolderTest, WhereAnMlpHasNoModuleOfItsOwnItsLinearsAloneAreChecked) {
  const json config = {{"model_type", "bert"}, {"hidden_size", 2}, {"intermediate_size", 3}, {"num_hidden_layers", 1}};
  std::vector<HandTensor> tensors = {{"bert.encoder.layer.0.intermediate.dense.weight", {3, 2}},
                                     {"bert.encoder.layer.0.intermediate.dense.bias", {3}},
                                     {"bert.encoder.layer.0.output.dense.weight", {2, 3}},
                                     {"bert.encoder.layer.0.output.dense.bias", {2}},
                                     {"bert.encoder.layer.0.output.LayerNorm.weight", {2}}};
  Write(config, tensors);
  const auto model = Open();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->spec().layers[0].module, "bert.encoder.layer.0.intermediate");
  EXPECT_EQ((*model)->spec().tensors.size(), 4);
  tensors.push_back({"bert.encoder.layer.0.output.dense.weight_scale", {1}});
  Write(config, tensors);
  EXPECT_TRUE(IsUnsupported({"bert.encoder.layer.0.output.dense.weight_scale\" is not part of a bert"}));
}

TEST_F(ModelFolderTest, RefusesABiasThatOnlyOneOfConfigAndFileHas) {
  auto tensors = LlamaTensors();
  tensors.push_back({"model.layers.0.mlp.down_proj.bias", {2}});
  Write(LlamaJson(), tensors);
  EXPECT_TRUE(
      IsUnsupported({"model.safetensors: tensor \"model.layers.0.mlp.down_proj.bias\" is not part of a llama"}));
  json biased = LlamaJson();
  biased["mlp_bias"] = true;
  Write(biased, LlamaTensors());
  EXPECT_TRUE(IsCorrupt({"\"model.layers.0.mlp.gate_proj.bias\" is missing"}));
}

TEST_F(ModelFolderTest, RefusesQuantizedWeightsByName) {
  auto tensors = LlamaTensors();
  tensors[2].dtype = "I8";
  tensors[2].element_bytes = 1;
  Write(LlamaJson(), tensors);
  EXPECT_TRUE(IsUnsupported({"model.layers.0.mlp.down_proj.weight at byte", "is I8"}));
  tensors = LlamaTensors();
  tensors.push_back({"model.layers.0.mlp.down_proj.weight_scale_inv", {1, 1}});
  Write(LlamaJson(), tensors);
  EXPECT_TRUE(IsUnsupported({"model.layers.0.mlp.down_proj.weight_scale_inv"}));
}

TEST_F(ModelFolderTest, RefusesTwoPrefixesAtOnce) {
  auto tensors = LlamaTensors();
  tensors.push_back({"layers.0.mlp.gate_proj.weight", {3, 2}});
  Write(LlamaJson(), tensors);
  EXPECT_TRUE(IsCorrupt({"both"}));
}

TEST_F(ModelFolderTest, AnIndexNamesFilesOfItsOwnFolderAlone) {
  for (const char* file :
       {"../b.safetensors", "/etc/b.safetensors", "sub/b.safetensors", "b.bin", ".safetensors", ""}) {
    json map = WeightMap();
    map["model.layers.0.mlp.down_proj.weight"] = file;
    WriteShards(map);
    EXPECT_TRUE(IsCorrupt({"index.json", "model.layers.0.mlp.down_proj.weight", json(file).dump()})) << file;
  }
  json map = WeightMap();
  map["model.layers.0.mlp.down_proj.weight"] = 7;
  WriteShards(map);
  EXPECT_TRUE(IsCorrupt({"is in 7"}));
  WriteFile(folder_ / "model.safetensors.index.json", "{}");
  EXPECT_TRUE(IsCorrupt({"index.json has no weight_map"}));
}

TEST_F(ModelFolderTest, RefusesAnIndexThatItsShardsContradict) {
  json map = WeightMap();
  map["model.layers.0.mlp.down_proj.weight"] = "a.safetensors";
  WriteShards(map);
  EXPECT_TRUE(IsCorrupt({"a.safetensors", "down_proj.weight", "which the index says is here"}));
  WriteShards(WeightMap());
  std::filesystem::remove(folder_ / "b.safetensors");
  EXPECT_TRUE(IsCorrupt({"b.safetensors, which is missing"}));
}

TEST_F(ModelFolderTest, AFileThatShrinksWhileItIsOpenIsNamed) {
  Write(LlamaJson(), LlamaTensors());
  const auto folder = Open();
  std::filesystem::resize_file(folder_ / "model.safetensors", 8);
  std::vector<double> values(6);
  const TensorSpec& gate = (*folder)->spec().tensors[0];
  EXPECT_TRUE(Fails((*folder)->Read(gate, MatrixView(values.data(), 3, 2, DType::kF64)), absl::StatusCode::kDataLoss,
                    Reason::kModelCorrupt, {"model.safetensors ends at byte"}));
}

TEST_F(ModelFolderTest, RefusesToReadIntoAnotherShape) {
  Write(LlamaJson(), LlamaTensors());
  const auto folder = Open();
  std::vector<double> values(6);
  TensorSpec gate = (*folder)->spec().tensors[0];
  EXPECT_TRUE(Fails((*folder)->Read(gate, MatrixView(values.data(), 2, 3, DType::kF64)),
                    absl::StatusCode::kInvalidArgument, Reason::kInvalidShape, {"[3, 2]", "[2, 3] f64"}));
  gate.name = "other";
  EXPECT_TRUE(Fails((*folder)->Read(gate, MatrixView(values.data(), 3, 2, DType::kF64)),
                    absl::StatusCode::kInvalidArgument, Reason::kUnknownTensor, {"other"}));
}

TEST_F(ModelFolderTest, RefusesFilesOfMoreLayersThanTheConfigSays) {
  auto tensors = LlamaTensors();
  for (const char* layer : {"1", "10", "2"}) {
    for (int i = 0; i < 3; ++i) {
      HandTensor tensor = LlamaTensors()[i];
      tensor.name.replace(tensor.name.find(".0."), 3, absl::StrCat(".", layer, "."));
      tensors.push_back(tensor);
    }
  }
  Write(LlamaJson(), tensors);
  EXPECT_TRUE(IsCorrupt({"num_hidden_layers is 1", "have 11 layers", "model.layers.10"}));
  // Layers of another kind, and what has no MLP, are none of it.
  tensors = LlamaTensors();
  tensors.push_back({"model.layers.1.embed_tokens.weight", {2, 2}});
  tensors.push_back({"model.layers.1.mlp.experts.0.gate_proj.weight", {3, 2}});
  tensors.push_back({"model.mtp_layers.1.mlp.gate_proj.weight", {3, 2}});
  tensors.push_back({"vision.layers.1.mlp.gate_proj.weight", {3, 2}});
  Write(LlamaJson(), tensors);
  EXPECT_TRUE(Open().ok()) << Open().status();
}

// Weights of more than one chunk (4 MiB), straight and transposed, into rows that have room between them.
TEST_F(ModelFolderTest, LargeTensorsKeepTheirOrder) {
  constexpr int64_t kHidden = 1000;
  constexpr int64_t kInner = 2203;
  const auto counting_up = [](absl::Span<char> out) {
    for (size_t i = 0; i < out.size() / sizeof(float); ++i) {
      const float value = static_cast<float>(i);
      memcpy(&out[i * sizeof(float)], &value, sizeof(value));
    }
    return absl::OkStatus();
  };
  WriteFile(
      folder_ / "config.json",
      json{
          {"model_type", "nemotron"}, {"hidden_size", kHidden}, {"intermediate_size", kInner}, {"num_hidden_layers", 1}}
          .dump());
  ASSERT_TRUE(WriteSafetensors(folder_ / "model.safetensors",
                               {{"layers.0.mlp.up_proj.weight", DType::kF32, {kInner, kHidden}, counting_up},
                                {"layers.0.mlp.down_proj.weight", DType::kF32, {kHidden, kInner}, counting_up}})
                  .ok());
  const TempFolder conv1d;
  WriteFile(conv1d / "config.json",
            json{{"model_type", "gpt2"}, {"n_embd", kHidden}, {"n_inner", kInner}, {"n_layer", 1}}.dump());
  ASSERT_TRUE(WriteSafetensors(conv1d / "model.safetensors",
                               {{"h.0.mlp.c_fc.weight", DType::kF32, {kHidden, kInner}, counting_up},
                                {"h.0.mlp.c_fc.bias", DType::kF32, {kInner}, counting_up},
                                {"h.0.mlp.c_proj.weight", DType::kF32, {kInner, kHidden}, counting_up},
                                {"h.0.mlp.c_proj.bias", DType::kF32, {kHidden}, counting_up}})
                  .ok());

  constexpr int64_t kStride = kHidden + 5;
  for (const bool transposed : {false, true}) {
    const auto folder = ModelFolder::Open(transposed ? conv1d.path() : folder_.path(), {});
    ASSERT_TRUE(folder.ok()) << folder.status();
    const TensorSpec& up = (*folder)->spec().tensors[0];
    ASSERT_EQ(up.transposed, transposed);
    std::vector<double> read(kInner * kStride, -1);
    ASSERT_TRUE((*folder)->Read(up, MatrixView(read.data(), kInner, kHidden, kStride, DType::kF64)).ok());
    for (int64_t out = 0; out < kInner; ++out) {
      for (int64_t in = 0; in < kStride; ++in) {
        const int64_t place = transposed ? in * kInner + out : out * kHidden + in;
        ASSERT_EQ(read[out * kStride + in], in < kHidden ? static_cast<double>(place) : -1) << out << ", " << in;
      }
    }
  }
}

}  // namespace
}  // namespace shardmlp
