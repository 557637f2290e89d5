// Weights that are no finite numbers, or not in the type they are served in, are refused by name.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/model/model_folder.h"
#include "server/model/safetensors_writer.h"
#include "tests/model/files.h"
#include "tests/model/status_matchers.h"

namespace shardmlp {
namespace {

using nlohmann::json;

// A model with `element` at [2, 1] of the gate projection and [1] of a bias, and what reading them says.
class ModelValuesTest : public testing::Test {
 protected:
  template <typename T>
  std::vector<absl::Status> ReadWith(T element, DType file_dtype, DType served) {
    const auto at = [=](size_t place) {
      return [=](absl::Span<char> out) {
        std::fill(out.begin(), out.end(), 0);
        std::memcpy(&out[place * sizeof(T)], &element, sizeof(T));
        return absl::OkStatus();
      };
    };
    const std::string mlp = "h.0.mlp.";
    WriteFile(folder_ / "config.json",
              json{{"model_type", "gpt2"}, {"n_embd", 2}, {"n_inner", 3}, {"n_layer", 1}}.dump());
    std::filesystem::remove(folder_ / "model.safetensors");
    EXPECT_TRUE(WriteSafetensors(folder_ / "model.safetensors", {{mlp + "c_fc.weight", file_dtype, {2, 3}, at(5)},
                                                                 {mlp + "c_fc.bias", file_dtype, {3}, at(1)},
                                                                 {mlp + "c_proj.weight", file_dtype, {3, 2}, at(3)},
                                                                 {mlp + "c_proj.bias", file_dtype, {2}, at(0)}})
                    .ok());
    const auto folder = ModelFolder::Open(folder_.path(), {.layers = std::nullopt, .dtype = served});
    std::vector<absl::Status> statuses;
    for (const TensorSpec& tensor : (*folder)->spec().tensors) {
      std::vector<double> read(6);
      const bool weight = tensor.shape.size() == 2;
      const MatrixView to(read.data(), weight ? tensor.shape[1] : 1, tensor.shape[0], DType::kF64);
      statuses.push_back((*folder)->Read(tensor, to));
    }
    return statuses;
  }
  TempFolder folder_;
};

TEST_F(ModelValuesTest, ANumberThatIsNoneIsRefusedByTensorAndElement) {
  const auto refuses = [](const std::vector<absl::Status>& statuses, absl::string_view value) {
    const char* const places[] = {"c_fc.weight",   "[1, 2]", "c_fc.bias",   "[1]",
                                  "c_proj.weight", "[1, 1]", "c_proj.bias", "[0]"};
    for (size_t i = 0; i < statuses.size(); ++i) {
      EXPECT_TRUE(Fails(statuses[i], absl::StatusCode::kDataLoss, Reason::kModelCorrupt,
                        {"model.safetensors: tensor h.0.mlp.", places[2 * i],
                         absl::StrCat("element ", places[2 * i + 1], " is ", value)}));
    }
  };
  for (const DType served : {DType::kF32, DType::kBF16, DType::kF64}) {
    refuses(ReadWith(std::nan(""), DType::kF64, served), "nan");
    refuses(ReadWith(-INFINITY, DType::kF32, served), "-inf");
    refuses(ReadWith(uint16_t{0x7f80}, DType::kBF16, served), "inf");
    refuses(ReadWith(uint16_t{0x7c00}, DType::kF16, served), "inf");
  }
}

TEST_F(ModelValuesTest, ANumberThatTheServedTypeCannotHoldIsRefused) {
  const auto refuses = [](const std::vector<absl::Status>& statuses, absl::string_view value) {
    for (const absl::Status& status : statuses) {
      EXPECT_TRUE(Fails(status, absl::StatusCode::kUnimplemented, Reason::kUnsupportedModel, {"element [", value}));
    }
  };
  const auto reads = [](const std::vector<absl::Status>& statuses) {
    for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  };
  refuses(ReadWith(-1e39, DType::kF64, DType::kF32), "is -1e+39, which f32 can't hold");
  reads(ReadWith(-1e39, DType::kF64, DType::kF64));
  // bf16's largest is (2 - 2^-7) 2^127; half a unit above it rounds to infinity.
  const float largest = std::ldexp(2 - std::ldexp(1.0F, -7), 127);
  const float beyond = std::ldexp(2 - std::ldexp(1.0F, -8), 127);
  reads(ReadWith(largest, DType::kF32, DType::kBF16));
  refuses(ReadWith(beyond, DType::kF32, DType::kBF16), "which bf16 can't hold");
  reads(ReadWith(beyond, DType::kF32, DType::kF32));
}

}  // namespace
}  // namespace shardmlp
