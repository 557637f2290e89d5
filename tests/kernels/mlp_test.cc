// MlpForward and MlpBackward against the naive twin.
#include "kernels/mlp.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
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

std::vector<MlpConfig> Configs(DType dtype) {
  MlpConfig one = PlainConfig(dtype);
  one.hidden_size = one.intermediate_size = one.output_size = 1;
  return {OddConfig(dtype), PlainConfig(dtype), UngatedConfig(dtype), one};
}

double Bound(DType dtype) { return dtype == DType::kF64 ? 1e-12 : 1e-5; }

class MlpTest : public BackendTest {
 protected:
  // Output, dX and every weight gradient in tiles of `tile_rows` are the twin's.
  void ExpectTwin(const MlpConfig& config, int64_t tokens, int64_t tile_rows) {
    SCOPED_TRACE(
        absl::StrCat("T ", tokens, ", H ", config.hidden_size, ", tiles of ", tile_rows, ", ", Name(config.dtype)));
    const NaiveMlp mlp = RandomMlp(backend(), config, 1);
    const Dense x = Rounded(backend(), RandomDense(tokens, config.hidden_size, 5), config.dtype);
    const Dense dy = Rounded(backend(), RandomDense(tokens, config.output_size, 6), config.dtype);
    Layer layer(backend(), config, mlp);
    EXPECT_LE(RelativeDifference(layer.Forward(x, tile_rows), NaiveForward(mlp, x)), Bound(config.dtype));
    const Dense dx = layer.Backward(x, dy, tile_rows);
    EXPECT_LE(RelativeDifference(layer.Gradients(dx), NaiveBackward(mlp, x, dy)), Bound(config.dtype));
  }
};

TEST_P(MlpTest, EveryTokenCountAndTileIsTheTwins) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    for (const MlpConfig& config : Configs(dtype)) {
      for (const int64_t tokens : {0, 1, 2, 5, 125, 257, 1000}) {
        for (const int64_t tile_rows : {1, 3, 64, 128, 1000, 5000}) {
          if (tokens > 257 && tile_rows < 64) continue;
          ExpectTwin(config, tokens, tile_rows);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, MlpTest, ::testing::ValuesIn(Backends()), BackendName);

}  // namespace
}  // namespace shardmlp::testing
