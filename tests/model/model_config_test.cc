// config.json -> the MLPs that it describes, or the key that keeps it from being served.
#include "server/model/model_config.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/model/status_matchers.h"

namespace shardmlp {
namespace {

using nlohmann::json;
using testing::ElementsAre;

json LlamaJson() {
  return {{"model_type", "llama"}, {"hidden_size", 16}, {"intermediate_size", 24}, {"num_hidden_layers", 3}};
}

absl::StatusOr<ModelConfig> Parse(const json& config) { return ParseModelConfig(config.dump(), "config.json"); }

absl::StatusOr<ModelConfig> ParseWith(const char* key, const json& value) {
  json config = LlamaJson();
  config[key] = value;
  return Parse(config);
}

testing::AssertionResult IsUnsupported(const absl::StatusOr<ModelConfig>& config,
                                       std::initializer_list<absl::string_view> named) {
  return Fails(config, absl::StatusCode::kUnimplemented, Reason::kUnsupportedModel, named);
}

testing::AssertionResult IsCorrupt(const absl::StatusOr<ModelConfig>& config,
                                   std::initializer_list<absl::string_view> named) {
  return Fails(config, absl::StatusCode::kDataLoss, Reason::kModelCorrupt, named);
}

TEST(ModelConfigTest, KeysThatAreMissingHaveTransformersDefaults) {
  const auto llama = Parse(LlamaJson());
  ASSERT_TRUE(llama.ok()) << llama.status();
  EXPECT_EQ(llama->layer_count, 3);
  EXPECT_EQ(llama->mlp.hidden_size, 16);
  EXPECT_EQ(llama->mlp.intermediate_size, 24);
  EXPECT_EQ(llama->mlp.output_size, 16);
  EXPECT_EQ(llama->mlp.activation.kind, ActivationKind::kSilu);
  EXPECT_TRUE(llama->mlp.activation.gated);
  EXPECT_FALSE(llama->mlp.gate_up_bias || llama->mlp.down_bias);

  const auto gpt2 = Parse({{"model_type", "gpt2"}, {"n_embd", 16}, {"n_layer", 2}, {"n_inner", nullptr}});
  ASSERT_TRUE(gpt2.ok()) << gpt2.status();
  EXPECT_EQ(gpt2->mlp.intermediate_size, 64);
  EXPECT_EQ(gpt2->mlp.activation.kind, ActivationKind::kGeluTanh);
  EXPECT_TRUE(gpt2->mlp.gate_up_bias && gpt2->mlp.down_bias);

  const auto opt = Parse({{"model_type", "opt"}, {"hidden_size", 16}, {"ffn_dim", 24}, {"num_hidden_layers", 2}});
  ASSERT_TRUE(opt.ok()) << opt.status();
  EXPECT_EQ(opt->mlp.activation.kind, ActivationKind::kRelu);
  EXPECT_FALSE(opt->mlp.activation.gated);
  EXPECT_TRUE(opt->mlp.gate_up_bias && opt->mlp.down_bias);
}

TEST(ModelConfigTest, ABiasIsReadFromTheKeyOfTheFamilyAlone) {
  EXPECT_TRUE(ParseWith("mlp_bias", true)->mlp.down_bias);
  EXPECT_FALSE(ParseWith("attention_bias", true)->mlp.down_bias);
  json qwen2 = LlamaJson();
  qwen2["model_type"] = "qwen2";
  qwen2["mlp_bias"] = true;  // transformers' qwen2 has no such key
  EXPECT_FALSE(Parse(qwen2)->mlp.down_bias);
  const json opt = {
      {"model_type", "opt"}, {"hidden_size", 16}, {"ffn_dim", 24}, {"num_hidden_layers", 2}, {"enable_bias", false}};
  EXPECT_FALSE(Parse(opt)->mlp.gate_up_bias);
}

TEST(ModelConfigTest, RefusesAnActivationByNameAndKey) {
  EXPECT_TRUE(IsUnsupported(ParseWith("hidden_act", "mish"), {"config.json", "hidden_act", "mish"}));
  EXPECT_TRUE(IsUnsupported(ParseWith("hidden_act", ""), {"hidden_act"}));
  EXPECT_TRUE(IsCorrupt(ParseWith("hidden_act", 1), {"hidden_act is 1", "a string was expected"}));
  json gpt2 = {{"model_type", "gpt2"}, {"n_embd", 16}, {"n_layer", 2}, {"activation_function", "tanh"}};
  EXPECT_TRUE(IsUnsupported(Parse(gpt2), {"activation_function", "tanh"}));
}

TEST(ModelConfigTest, RefusesWhatChangesTheArithmetic) {
  EXPECT_TRUE(IsUnsupported(ParseWith("quantization_config", {{"quant_method", "awq"}}),
                            {"quantization_config", "awq", "quantized"}));
  EXPECT_TRUE(IsUnsupported(ParseWith("mlp_multipliers", {0.5, 1.0}), {"mlp_multipliers", "[0.5,1.0]"}));
  EXPECT_TRUE(IsUnsupported(ParseWith("swiglu_alpha", 1.5), {"swiglu_alpha", "1.5"}));
  EXPECT_TRUE(IsUnsupported(ParseWith("swiglu_limit", 7.0), {"swiglu_limit", "7.0"}));
  EXPECT_TRUE(IsUnsupported(ParseWith("activation_sparsity_pattern", {0.95, 0.0}), {"activation_sparsity_pattern"}));
  EXPECT_TRUE(IsUnsupported(ParseWith("mlp_dropout", 0.1), {"mlp_dropout is 0.1", "ahead of the down projection"}));
  EXPECT_TRUE(IsUnsupported(ParseWith("activation_dropout", 0.1), {"activation_dropout is 0.1"}));
}

TEST(ModelConfigTest, RefusesModernBertsDropoutInsideTheMlp) {
  json modernbert = LlamaJson();
  modernbert["model_type"] = "modernbert";
  EXPECT_TRUE(Parse(modernbert).ok());
  modernbert["mlp_dropout"] = 0.1;
  EXPECT_TRUE(IsUnsupported(Parse(modernbert), {"mlp_dropout is 0.1", "ahead of the down projection"}));
}

TEST(ModelConfigTest, AcceptsTheSameKeysWhereTheyDoNothing) {
  EXPECT_TRUE(ParseWith("quantization_config", nullptr).ok());
  EXPECT_TRUE(ParseWith("mlp_multipliers", {1.0, 1}).ok());
  EXPECT_TRUE(ParseWith("activation_sparsity_pattern", {0.0, 0.0}).ok());
  EXPECT_TRUE(ParseWith("mlp_dropout", 0.0).ok());
  EXPECT_TRUE(ParseWith("residual_multiplier", 0.22).ok());  // outside the MLP
  EXPECT_TRUE(ParseWith("resid_pdrop", 0.1).ok());           // the client's
}

TEST(ModelConfigTest, RefusesModelTypesByNameWithTheReason) {
  EXPECT_TRUE(IsUnsupported(ParseWith("model_type", "falcon_h1"), {"falcon_h1", "mlp_multipliers"}));
  EXPECT_TRUE(IsUnsupported(ParseWith("model_type", "gemma3"), {"gemma3", "multimodal", "gemma3_text"}));
  EXPECT_TRUE(IsUnsupported(ParseWith("model_type", "gemma3n"), {"gemma3n", "sparsity"}));
  EXPECT_TRUE(IsUnsupported(ParseWith("model_type", "apertus"), {"apertus", "xielu"}));
  EXPECT_TRUE(IsUnsupported(ParseWith("model_type", "bloom"), {"bloom", "residual"}));
  EXPECT_TRUE(IsUnsupported(ParseWith("model_type", "brandnew"), {"\"brandnew\"", "these are: llama, mistral"}));
  EXPECT_TRUE(IsCorrupt(ParseWith("model_type", nullptr), {"model_type is missing"}));
}

TEST(ModelConfigTest, RefusesSizesThatAreNone) {
  for (const char* key : {"hidden_size", "intermediate_size", "num_hidden_layers"}) {
    EXPECT_TRUE(IsCorrupt(ParseWith(key, nullptr), {key, "is missing"}));
    for (const json& value : {json(0), json(-1), json(16.0), json("16"), json(1e30), json(uint64_t{1} << 62)}) {
      EXPECT_TRUE(IsCorrupt(ParseWith(key, value), {key, value.dump()}));
    }
  }
  EXPECT_TRUE(IsCorrupt(ParseWith("mlp_bias", 1), {"mlp_bias is 1"}));
}

TEST(ModelConfigTest, ServesTheLayersAskedFor) {
  const auto config = Parse(LlamaJson());
  const auto spec = MakeModelSpec(*config, "model.", {.layers = std::pair(1, 2), .dtype = DType::kBF16});
  ASSERT_TRUE(spec.ok()) << spec.status();
  ASSERT_EQ(spec->layers.size(), 2);
  EXPECT_EQ(spec->layers[0].layer, 1);
  EXPECT_EQ(spec->layers[0].module, "model.layers.1.mlp");
  EXPECT_EQ(spec->layers[0].mlp.dtype, DType::kBF16);
  EXPECT_EQ(spec->FindLayer(0), nullptr);
  EXPECT_EQ(spec->FindLayer(2), &spec->layers[1]);
  EXPECT_EQ(spec->FindLayer(3), nullptr);
  std::vector<std::string> names;
  for (const TensorSpec& tensor : spec->tensors) names.push_back(tensor.name);
  EXPECT_THAT(names, ElementsAre("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight",
                                 "model.layers.1.mlp.down_proj.weight", "model.layers.2.mlp.gate_proj.weight",
                                 "model.layers.2.mlp.up_proj.weight", "model.layers.2.mlp.down_proj.weight"));
}

TEST(ModelConfigTest, RefusesLayersThatTheModelDoesNotHave) {
  const auto config = Parse(LlamaJson());
  for (const auto& [first, last] : {std::pair(0, 3), {-1, 1}, {2, 1}, {3, 3}}) {
    EXPECT_TRUE(Fails(MakeModelSpec(*config, "model.", {.layers = std::pair(first, last)}),
                      absl::StatusCode::kInvalidArgument, Reason::kUnknownLayer,
                      {absl::StrCat("layers ", first, "-", last), "the model has 0-2"}));
  }
}

}  // namespace
}  // namespace shardmlp
