// MlpForward and MlpBackward against the naive twin: f64, f32 and bf16, any tokens and tiles.
#include "kernels/mlp.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/error_bounds.h"
#include "kernels/status.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/layer.h"
#include "tests/kernels/naive_mlp.h"

namespace shardmlp::testing {
namespace {

// Odd sizes, O other than H, biases.
MlpConfig OddConfig(DType dtype) {
  MlpConfig config;
  config.hidden_size = 13;
  config.intermediate_size = 37;
  config.output_size = 7;
  config.gate_up_bias = true;
  config.down_bias = true;
  config.dtype = dtype;
  return config;
}

// A Llama layer in small: gated, no bias, O equal to H.
MlpConfig PlainConfig(DType dtype) {
  MlpConfig config;
  config.hidden_size = 32;
  config.intermediate_size = 48;
  config.output_size = 32;
  config.dtype = dtype;
  return config;
}

// A GPT-2 layer in small: ungated, biases.
MlpConfig UngatedConfig(DType dtype) {
  MlpConfig config = OddConfig(dtype);
  config.activation = {.kind = ActivationKind::kGeluTanh, .gated = false};
  return config;
}

// Gated as gpt-oss has it, some of G and U beyond the limit.
MlpConfig ClampedConfig(DType dtype) {
  MlpConfig config = OddConfig(dtype);
  config.activation = {.kind = ActivationKind::kClampedSwiglu, .limit = 0.75};
  return config;
}

std::vector<MlpConfig> Configs(DType dtype) {
  MlpConfig one = PlainConfig(dtype);
  one.hidden_size = one.intermediate_size = one.output_size = 1;
  MlpConfig half_biased = OddConfig(dtype);
  half_biased.gate_up_bias = false;
  return {OddConfig(dtype), PlainConfig(dtype), UngatedConfig(dtype), ClampedConfig(dtype), half_biased, one};
}

// A layer with its twin, and a batch for it.
struct Problem {
  Problem(Backend& backend, const MlpConfig& config, int64_t tokens)
      : mlp(RandomMlp(backend, config, 1)),
        x(Rounded(backend, RandomDense(tokens, config.hidden_size, 5), config.dtype)),
        dy(Rounded(backend, RandomDense(tokens, config.output_size, 6), config.dtype)),
        layer(backend, config, mlp) {}

  NaiveMlp mlp;
  Dense x;   // [T, H]
  Dense dy;  // [T, O]
  Layer layer;
};

class MlpTest : public BackendTest {
 protected:
  // Output, dX and every weight gradient in tiles of `tile_rows` are the twin's.
  void ExpectTwin(const MlpConfig& config, int64_t tokens, int64_t tile_rows, double bound) {
    SCOPED_TRACE(
        absl::StrCat("T ", tokens, ", H ", config.hidden_size, ", tiles of ", tile_rows, ", ", Name(config.dtype)));
    Problem p(backend(), config, tokens);
    EXPECT_LE(RelativeDifference(p.layer.Forward(p.x, tile_rows), NaiveForward(p.mlp, p.x)), bound);
    const Dense dx = p.layer.Backward(p.x, p.dy, tile_rows);
    EXPECT_LE(RelativeDifference(p.layer.Gradients(dx), NaiveBackward(p.mlp, p.x, p.dy)), bound);
  }

  void ExpectTwinEverywhere(DType dtype, double bound) {
    for (const MlpConfig& config : Configs(dtype)) {
      for (const int64_t tokens : {0, 1, 2, 5, 125, 257, 1000}) {
        for (const int64_t tile_rows : {1, 3, 64, 128, 1000, 5000}) {
          if (tokens > 257 && tile_rows < 64) continue;
          ExpectTwin(config, tokens, tile_rows, bound);
        }
      }
    }
  }
};

TEST_P(MlpTest, F64IsTheTwin) { ExpectTwinEverywhere(DType::kF64, ErrorBoundsOf(DType::kF64).y); }

TEST_P(MlpTest, F32IsTheTwin) { ExpectTwinEverywhere(DType::kF32, ErrorBoundsOf(DType::kF32).y); }

TEST_P(MlpTest, BF16IsTheTwinWithinItsRoundingsWhateverTheTiles) {
  if (!backend().Computes(DType::kBF16)) GTEST_SKIP() << "no bf16 on this machine";
  const ErrorBounds bounds = ErrorBoundsOf(DType::kBF16);
  for (MlpConfig config : {OddConfig(DType::kBF16), PlainConfig(DType::kBF16), UngatedConfig(DType::kBF16)}) {
    for (const int64_t tile_rows : {512, 8}) {  // 1 tile and 64
      SCOPED_TRACE(absl::StrCat("H ", config.hidden_size, ", tiles of ", tile_rows));
      Problem p(backend(), config, 512);
      EXPECT_LE(RelativeDifference(p.layer.Forward(p.x, tile_rows), NaiveForward(p.mlp, p.x)), bounds.y);
      const Dense dx = p.layer.Backward(p.x, p.dy, tile_rows);
      const NaiveGradients got = p.layer.Gradients(dx);
      const NaiveGradients expected = NaiveBackward(p.mlp, p.x, p.dy);
      EXPECT_LE(RelativeDifference(got.dx, expected.dx), bounds.dx);
      EXPECT_LE(RelativeDifference(got.gate_up, expected.gate_up), bounds.gate_up);
      EXPECT_LE(RelativeDifference(got.gate_up_bias, expected.gate_up_bias), bounds.gate_up);
      EXPECT_LE(RelativeDifference(got.down, expected.down), bounds.down);
      EXPECT_LE(RelativeDifference(got.down_bias, expected.down_bias), bounds.down_bias);
    }
  }
}

// bf16 sums kept in bf16 would lose what is small beside them; many equal tiles show it.
TEST_P(MlpTest, ManyTilesInBF16AddAsMuchAsOne) {
  if (!backend().Computes(DType::kBF16)) GTEST_SKIP() << "no bf16 on this machine";
  const MlpConfig config = PlainConfig(DType::kBF16);
  Problem p(backend(), config, 1024);
  p.layer.Backward(p.x, p.dy, 1024);
  const NaiveGradients one = p.layer.Gradients(Dense());
  Layer tiled(backend(), config, p.mlp);
  tiled.Backward(p.x, p.dy, 16);
  EXPECT_LE(RelativeDifference(tiled.Gradients(Dense()), one), 1e-5);
}

TEST_P(MlpTest, PaddedRowsAreLeftAlone) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    if (!backend().Computes(dtype)) continue;
    const MlpConfig config = OddConfig(dtype);
    Problem p(backend(), config, 30);
    Layer padded(backend(), config, p.mlp, 5);  // DeviceMatrix checks the padding
    const double bound = dtype == DType::kBF16 ? std::ldexp(1, -7) : 1e-6;
    EXPECT_LE(RelativeDifference(padded.Forward(p.x, 8), p.layer.Forward(p.x, 8)), bound);
    const Dense dx = p.layer.Backward(p.x, p.dy, 8);
    const Dense padded_dx = padded.Backward(p.x, p.dy, 8);
    EXPECT_LE(RelativeDifference(padded.Gradients(padded_dx), p.layer.Gradients(dx)), bound);
  }
}

TEST_P(MlpTest, HalfOfABackwardIsTheSameHalf) {
  const MlpConfig config = OddConfig(DType::kF32);
  Problem p(backend(), config, 40);
  const Dense dx = p.layer.Backward(p.x, p.dy, 16);
  const NaiveGradients whole = p.layer.Gradients(dx);

  Layer input_only(backend(), config, p.mlp);
  EXPECT_EQ(input_only.Backward(p.x, p.dy, 16, {.gradients = false}), dx);
  EXPECT_EQ(LargestMagnitude(input_only.Gradients(dx).gate_up), 0);

  Layer weights_only(backend(), config, p.mlp);
  EXPECT_TRUE(weights_only.Backward(p.x, p.dy, 16, {.dx = false}).values.empty());
  EXPECT_EQ(RelativeDifference(weights_only.Gradients(dx), whole), 0);

  Layer neither(backend(), config, p.mlp);
  neither.Backward(p.x, p.dy, 16, {.dx = false, .gradients = false});
  EXPECT_EQ(LargestMagnitude(neither.Gradients(dx).down), 0);
}

TEST_P(MlpTest, GradientsOfTwoCallsAdd) {
  const MlpConfig config = OddConfig(DType::kF64);
  Problem p(backend(), config, 20);
  p.layer.Backward(p.x, p.dy, 20);
  p.layer.Backward(p.x, p.dy, 7);
  NaiveGradients expected = NaiveBackward(p.mlp, p.x, p.dy);
  for (Dense* m : {&expected.gate_up, &expected.gate_up_bias, &expected.down, &expected.down_bias}) {
    for (double& value : m->values) value *= 2;
  }
  EXPECT_LE(RelativeDifference(p.layer.Gradients(expected.dx), expected), 1e-12);
}

TEST_P(MlpTest, TheSameTilesGiveTheSameBits) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    if (!backend().Computes(dtype)) continue;
    MlpConfig config = OddConfig(dtype);
    config.hidden_size = config.output_size = 200;
    config.intermediate_size = 520;
    const auto run = [&](Backend& on) {
      Problem p(on, config, 300);
      const Dense dx = p.layer.Backward(p.x, p.dy, 128);
      const NaiveGradients g = p.layer.Gradients(dx);
      return std::vector<Dense>{p.layer.Forward(p.x, 128), dx, g.gate_up, g.gate_up_bias, g.down, g.down_bias};
    };
    const std::vector<Dense> first = run(backend());
    EXPECT_EQ(run(backend()), first) << Name(dtype);
    EXPECT_EQ(run(*GetParam().make()), first) << Name(dtype);
  }
}

TEST_P(MlpTest, GateAndUpThatWereKeptGiveTheBitsOfThoseThatAreRecomputed) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    if (!backend().Computes(dtype)) continue;
    for (const MlpConfig& config : Configs(dtype)) {
      for (const int64_t tokens : {1, 125, 257}) {
        SCOPED_TRACE(absl::StrCat("T ", tokens, ", H ", config.hidden_size, ", ", Name(dtype)));
        Problem p(backend(), config, tokens);
        const Dense y = p.layer.Forward(p.x, 64);
        const Dense dx = p.layer.Backward(p.x, p.dy, 64);
        const NaiveGradients recomputed = p.layer.Gradients(dx);
        Layer keeping(backend(), config, p.mlp);
        const Layer::Passes kept = keeping.ForwardAndBackward(p.x, p.dy, 64);
        EXPECT_EQ(kept.y, y);
        EXPECT_EQ(kept.dx, dx);
        EXPECT_EQ(RelativeDifference(keeping.Gradients(kept.dx), recomputed), 0);
        if (dtype == DType::kF64) {
          EXPECT_LE(RelativeDifference(keeping.Gradients(kept.dx), NaiveBackward(p.mlp, p.x, p.dy)),
                    ErrorBoundsOf(dtype).y);
        }
      }
    }
  }
}

TEST_P(MlpTest, WhatDoesNotFitIsRefused) {
  const MlpConfig config = OddConfig(DType::kF32);
  const NaiveMlp mlp = RandomMlp(backend(), config, 1);
  const DeviceMatrix gate_up(backend(), mlp.gate_up, DType::kF32),
      gate_up_bias(backend(), mlp.gate_up_bias, DType::kF32);
  const DeviceMatrix down(backend(), mlp.down, DType::kF32), down_bias(backend(), mlp.down_bias, DType::kF32);
  const ConstMlpTensors weights = {gate_up.view(), gate_up_bias.view(), down.view(), down_bias.view()};
  const MlpWorkspace workspace = MlpWorkspace::Allocate(backend(), MlpWorkspace::Bytes(config, 4)).value();
  const DeviceMatrix x(backend(), 4, 13, DType::kF32), y(backend(), 4, 7, DType::kF32),
      more(backend(), 5, 13, DType::kF32);
  const auto forward = [&](const ConstMlpTensors& tensors, int64_t tile_rows, ConstMatrixView in, MatrixView out) {
    return MlpForward(backend(), config, tensors, workspace, tile_rows, in, out).code();
  };
  EXPECT_EQ(forward(weights, 4, x.view(), y.view()), absl::StatusCode::kOk);
  EXPECT_EQ(forward(weights, 0, x.view(), y.view()), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(forward(weights, 4, y.view(), y.view()), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(forward(weights, 4, x.view(), x.view()), absl::StatusCode::kInvalidArgument);
  ConstMlpTensors unbiased = weights;
  unbiased.down_bias = {};
  EXPECT_EQ(forward(unbiased, 4, x.view(), y.view()), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MlpForwardTile(backend(), config, weights, workspace, more.view(),
                           DeviceMatrix(backend(), 5, 7, DType::kF32).view())
                .code(),
            absl::StatusCode::kInvalidArgument);  // the workspace is for 4
  EXPECT_EQ(MlpForwardTile(backend(), config, weights, workspace, x.view(), y.view(), y.view()).code(),
            absl::StatusCode::kInvalidArgument);  // no place for [G | U]
  EXPECT_EQ(MlpBackward(backend(), config, weights, workspace, 4, x.view(), x.view(), MatrixView(), nullptr).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MlpBackward(backend(), config, weights, workspace, 4, x.view(), y.view(), y.view(), nullptr).code(),
            absl::StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Backends, MlpTest, ::testing::ValuesIn(Backends()), BackendName);

TEST(MlpWorkspaceTest, RowsIsTheInverseOfBytes) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const MlpConfig& config : {OddConfig(dtype), PlainConfig(dtype), UngatedConfig(dtype)}) {
      for (const int64_t rows : {1, 2, 17, 63, 64, 128, 1024}) {
        EXPECT_EQ(MlpWorkspace::Rows(config, MlpWorkspace::Bytes(config, rows)), rows);
        EXPECT_LT(MlpWorkspace::Rows(config, MlpWorkspace::Bytes(config, rows) - 1), rows);
      }
      EXPECT_EQ(MlpWorkspace::Rows(config, MlpWorkspace::Bytes(config, 100)), 64);
      EXPECT_EQ(MlpWorkspace::Rows(config, 0), 0);
      EXPECT_EQ(MlpWorkspace::Rows(config, 10), 0);
    }
  }
}

TEST(MlpWorkspaceTest, SizesPast32BitsAreRight) {
  MlpConfig config = PlainConfig(DType::kF32);
  config.intermediate_size = 16384;
  EXPECT_EQ(MlpWorkspace::Bytes(config, 262144), int64_t{262144} * 3 * 16384 * 4);
}

}  // namespace
}  // namespace shardmlp::testing
