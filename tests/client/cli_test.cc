// shardmlpctl: what it prints, its exit codes, and the arithmetic that it verifies by.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/elements.h"
#include "client/cli/verify/reference_mlp.h"
#include "tests/client/fake_server.h"
#include "tests/client/run_ctl.h"

namespace shardmlp {
namespace {

using fake::FakeModel;
using fake::FakeServer;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

TEST(CtlTest, InfoShowsWhatIsServed) {
  fake::FakeServerOptions options{.model = FakeModel()};
  v1::TrainerInfo& trainer = *options.model.add_trainers();
  trainer.set_run_id("mine");
  trainer.set_trainer_rank(1);
  trainer.set_trainer_count(2);
  trainer.set_sealed(true);
  FakeServer server(options);

  const Outcome text = RunAgainst(server, "info");
  EXPECT_EQ(text.exit_code, 0);
  EXPECT_THAT(text.output, HasSubstr("llama, computed in f32"));
  EXPECT_THAT(text.output, HasSubstr("step      3, attempt 5, weights version 11"));
  EXPECT_THAT(text.output, HasSubstr("run 'mine' rank 1 of 2, sealed"));
  EXPECT_THAT(text.output, HasSubstr("model.layers.2.mlp"));
  EXPECT_THAT(text.output, HasSubstr("weights 1.21 KiB, gradients 0 B, master weights "));
  EXPECT_THAT(text.output, HasSubstr(" B, optimizer state "));

  // Flags go before or behind the command.
  EXPECT_EQ(RunCtl(absl::StrCat("info --json --target ", server.target())).output,
            RunAgainst(server, "--json info").output);
  const Outcome json = RunAgainst(server, "--json info");
  EXPECT_EQ(json.exit_code, 0);
  const auto parsed = nlohmann::json::parse(json.output);
  EXPECT_EQ(parsed["position"]["step"], 3);
  EXPECT_EQ(parsed["layers"].size(), 3);
  EXPECT_EQ(parsed["layers"][0]["hidden_size"], 6);
  EXPECT_EQ(parsed["memory"]["weights_bytes"], 1234);
  EXPECT_EQ(parsed["trainers"][0]["run_id"], "mine");
  EXPECT_EQ(parsed["tensors"][0]["shape"], (std::vector<int>{4, 7}));
}

TEST(CtlTest, CheckpointsAreSavedListedRestoredAndDeleted) {
  FakeServer server;
  const Outcome saved = RunAgainst(server, "checkpoint save first");
  EXPECT_EQ(saved.exit_code, 0);
  EXPECT_EQ(saved.output, "saved first: step 3, 4096 bytes\n");
  EXPECT_EQ(RunAgainst(server, "checkpoint list").output, "first  step 3  4096 bytes\n");
  EXPECT_EQ(RunAgainst(server, "checkpoint restore first").output, "restored first: step 3, attempt 6\n");
  EXPECT_EQ(RunAgainst(server, "checkpoint delete first").output, "deleted first\n");
  EXPECT_EQ(RunAgainst(server, "checkpoint list").output, "");
  EXPECT_EQ(RunAgainst(server, "checkpoint delete first").exit_code, 3);
  const Outcome unknown = RunAgainst(server, "checkpoint restore second");
  EXPECT_EQ(unknown.exit_code, 3);
  EXPECT_THAT(unknown.output, HasSubstr("no checkpoint second [NOT_FOUND, UNKNOWN_CHECKPOINT]"));
}

TEST(CtlTest, CommandLinesAreChecked) {
  const std::pair<std::string, std::string> refusals[] = {
      {"", "a command is missing: info, top, verify, checkpoint, bench, plan or drain"},
      {"inform", "not expected: inform"},
      {"info now", "not expected: now"},
      {"info verify", "not expected: verify"},
      {"checkpoint", "what to do is missing: checkpoint save, restore, delete or list"},
      {"checkpoint save", "NAME is required"},
      {"checkpoint delete", "NAME is required"},
      {"checkpoint list all", "not expected: all"},
      {"--colour info", "not expected: --colour"},
      {"--rows=0 verify", "--rows: Value 0 not in range 1 to "},
      {"verify --rows=few", "--rows: Value few not in range"},
      {"--connect-timeout=10 info", "--connect-timeout: got \"10\", expected a time such as 10s"},
      {"top --interval=0s", "--interval: got \"0s\", expected a time such as 10s"},
      {"top --count=0", "--count: Value 0 not in range 1 to "},
      {"drain now", "not expected: now"},
      {"drain --timeout=soon", "--timeout: got \"soon\", expected a time such as 10s"},
      {"--json=yes info", "--json: yes not in {true,false}"},
      {"info --target", "--target: 1 required ADDRESS missing"},
  };
  for (const auto& [arguments, message] : refusals) {
    const Outcome outcome = RunCtl(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_THAT(outcome.output, HasSubstr(message)) << arguments;
    EXPECT_THAT(outcome.output, HasSubstr("--help tells more")) << arguments;
  }
  const Outcome help = RunCtl("--help");
  EXPECT_EQ(help.exit_code, 0);
  for (const char* part : {"--connect-timeout TIME", "--json", "checkpoint", "Examples:", "Exit codes:"}) {
    EXPECT_THAT(help.output, HasSubstr(part));
  }
  const Outcome verify = RunCtl("verify --help");
  EXPECT_EQ(verify.exit_code, 0);
  for (const char* part : {"shardmlpctl verify", "Compares its results", "--target", "--layers", "--rows"}) {
    EXPECT_THAT(verify.output, HasSubstr(part));
  }
  EXPECT_THAT(verify.output, Not(HasSubstr("--json")));
  EXPECT_THAT(RunCtl("top --help").output,
              AllOf(HasSubstr("--interval TIME"), HasSubstr("--json"), HasSubstr("shardmlpctl top --json"),
                    Not(HasSubstr("shardmlpctl verify"))));
  EXPECT_THAT(RunCtl("drain --help").output, AllOf(HasSubstr("--timeout TIME"), HasSubstr("drain --timeout=2m")));
  EXPECT_THAT(RunCtl("checkpoint --help").output, AllOf(HasSubstr("restore"), Not(HasSubstr("--rows"))));
  FakeServer server;
  EXPECT_EQ(RunAgainst(server, "--layers=2-1 verify").exit_code, 2);
  EXPECT_EQ(RunAgainst(server, "--layers=x verify").exit_code, 2);
  EXPECT_EQ(RunAgainst(server, "--layers=1-3 verify").exit_code, 3);
}

TEST(CtlTest, AServerThatIsNotThereIsNamed) {
  const Outcome outcome =
      RunCtl(absl::StrCat("--connect-timeout=50ms --target=unix:", testing::TempDir(), "none info"));
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(outcome.output, HasSubstr("none"));
  EXPECT_THAT(outcome.output, HasSubstr("UNREACHABLE"));
}

// The fake server's answers are no MLP's.
TEST(CtlTest, VerifyFindsAServerThatComputesSomethingElse) {
  fake::FakeServerOptions options{.model = FakeModel()};
  v1::ModelInfo& model = *options.model.mutable_model();
  const std::vector<v1::TensorInfo> down(model.tensors().begin(), model.tensors().end());
  for (const v1::LayerInfo& layer : model.layers()) {
    for (const char* name : {"gate_proj", "up_proj"}) {
      v1::TensorInfo& tensor = *model.add_tensors();
      tensor.set_name(absl::StrCat(layer.module(), ".", name, ".weight"));
      tensor.set_layer(layer.layer());
      tensor.add_shape(7);
      tensor.add_shape(layer.hidden_size());
      tensor.set_dtype(v1::DTYPE_BF16);
    }
  }
  FakeServer server(options);
  const Outcome outcome = RunAgainst(server, "--layers=0-1 --rows=3 verify");
  EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("ABOVE"));
}

TEST(CtlTest, VerifyRefusesTensorsThatItDoesNotKnow) {
  fake::FakeServerOptions options{.model = FakeModel()};
  options.model.mutable_model()->mutable_tensors(0)->set_name("model.layers.0.mlp.router.weight");
  FakeServer server(options);
  const Outcome outcome = RunAgainst(server, "--layers=0 verify");
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(outcome.output, HasSubstr("router.weight"));
  // And it misses those that a gated layer should have.
  EXPECT_THAT(RunAgainst(server, "--layers=1 verify").output, HasSubstr("gate weight has 0 elements, expected 35"));
}

TEST(ElementsTest, EveryDTypeIsReadAndWrittenExactly) {
  const std::vector<double> values = {0, -0.0, 1, -1.5, 2, 127.0 / 64, -128.0 / 64, 1.0 / 64, 0.25};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    EXPECT_EQ(DecodeElements(EncodeElements(values, dtype), dtype), values) << Name(dtype);
  }
  // Against IEEE 754's own examples: 1, -2, the largest, the smallest, the smallest normal, infinity.
  const std::string f16("\x00\x3c\x00\xc0\xff\x7b\x01\x00\x00\x04\x00\x7c", 12);
  EXPECT_THAT(DecodeElements(f16, DType::kF16), ElementsAre(1, -2, 65504, std::ldexp(1, -24), std::ldexp(1, -14),
                                                            std::numeric_limits<double>::infinity()));
  const std::vector<double> small = {std::ldexp(1, -24), std::ldexp(1, -14), 65504};
  EXPECT_EQ(DecodeElements(EncodeElements(small, DType::kF16), DType::kF16), small);
  const std::string bf16("\x80\x3f\x00\xc0", 4);
  EXPECT_THAT(DecodeElements(bf16, DType::kBF16), ElementsAre(1, -2));
}

TEST(ElementsTest, HalfAUnitIsHalfTheWayToTheNextNumber) {
  EXPECT_EQ(HalfUnit(1, DType::kF32), (std::nextafter(1.0f, 2.0f) - 1.0f) / 2);
  EXPECT_EQ(HalfUnit(7, DType::kF64), (std::nextafter(7.0, 8.0) - 7.0) / 2);
  EXPECT_EQ(HalfUnit(7, DType::kBF16), (7.03125 - 7) / 2);  // 0x40e0 and 0x40e1
  EXPECT_EQ(HalfUnit(0.75, DType::kF16), std::ldexp(1, -12));
}

class ReferenceTest : public testing::TestWithParam<std::tuple<std::string, bool>> {};

TEST_P(ReferenceTest, BackwardIsTheSlopeOfForward) {
  const auto [activation, gated] = GetParam();
  ReferenceMlp mlp{.hidden_size = 3, .intermediate_size = 5, .output_size = 2, .gated = gated};
  mlp.activation = *FindActivation(activation);
  if (gated && activation == "clamped_swiglu") mlp.limit = 0.4;
  double next = 0.1;
  const auto fill = [&next](int64_t count) {
    Values values(count);
    for (double& value : values) value = next = std::fmod(next * 7.3 + 0.37, 2) - 1;
    return values;
  };
  mlp.gate = fill(gated ? 15 : 0);
  mlp.up = fill(15);
  mlp.down = fill(10);
  mlp.gate_bias = fill(gated ? 5 : 0);
  mlp.up_bias = fill(5);
  mlp.down_bias = fill(2);
  Values x = fill(4 * 3);
  const Values dy = fill(4 * 2);
  const Values dx = ReferenceBackward(mlp, x, dy);
  ASSERT_EQ(dx.size(), x.size());

  const auto loss = [&] {
    const Values y = ReferenceForward(mlp, x);
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += y[i] * dy[i];
    return sum;
  };
  constexpr double kStep = 1e-5;
  for (size_t i = 0; i < x.size(); ++i) {
    const double value = x[i];
    x[i] = value + kStep;
    const double above = loss();
    x[i] = value - kStep;
    const double below = loss();
    x[i] = value;
    EXPECT_NEAR(dx[i], (above - below) / (2 * kStep), 1e-8) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, ReferenceTest,
                         testing::Combine(testing::Values("silu", "gelu", "gelu_tanh", "gelu_fast", "quick_gelu",
                                                          "relu", "relu2", "clamped_swiglu"),
                                          testing::Bool()));

// Values of torch.nn.functional in f64, at 1.5 and -0.75.
TEST(ActivationNamesTest, ActivationsAreThoseOfTheirNames) {
  const auto at = [](const std::string& name, double x) { return (*FindActivation(name))(x).value; };
  EXPECT_NEAR(at("silu", 1.5), 1.2263617143, 1e-10);
  EXPECT_NEAR(at("silu", -0.75), -0.2406159756, 1e-10);
  EXPECT_NEAR(at("gelu", 1.5), 1.3997891981, 1e-10);
  EXPECT_NEAR(at("gelu", -0.75), -0.1699705143, 1e-10);
  EXPECT_NEAR(at("gelu_tanh", 1.5), 1.3995715770, 1e-10);
  EXPECT_NEAR(at("gelu_tanh", -0.75), -0.1700394448, 1e-10);
  EXPECT_NEAR(at("quick_gelu", 1.5), 1.3916621984, 1e-10);
  EXPECT_NEAR(at("quick_gelu", -0.75), -0.1636099425, 1e-10);
  EXPECT_EQ(at("relu", -0.75), 0);
  EXPECT_EQ(at("relu2", 1.5), 2.25);
  // GptOssExperts of transformers with limit 0.5: g and u below and beyond it.
  const auto clamped = [](double g, double u) {
    const ReferenceMlp mlp{.hidden_size = 1,
                           .intermediate_size = 1,
                           .output_size = 1,
                           .gated = true,
                           .activation = *FindActivation("clamped_swiglu"),
                           .limit = 0.5,
                           .gate = {g},
                           .up = {u},
                           .down = {1},
                           .gate_bias = {0},
                           .up_bias = {0},
                           .down_bias = {0}};
    return ReferenceForward(mlp, {1}).front();
  };
  EXPECT_NEAR(clamped(0.25, -0.25), 0.1133997374, 1e-10);
  EXPECT_NEAR(clamped(2, 0.25), 0.4379855458, 1e-10);
  EXPECT_NEAR(clamped(-2, 3), -0.0965120653, 1e-10);
  EXPECT_NEAR(clamped(-2, -3), -0.0321706884, 1e-10);
  EXPECT_EQ(FindActivation("xielu").status().code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace shardmlp
