// A model of random weights that exists in memory alone.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "server/model/model_folder.h"
#include "tests/bench/small_values.h"

namespace shardmlp {

// Gated silu layers without bias, O equal to H, as llama has them.
class RandomModel final : public ModelFolder {
 public:
  RandomModel(int layers, int64_t hidden_size, int64_t intermediate_size, DType dtype) {
    spec_.model_type = "llama";
    spec_.dtype = dtype;
    for (int layer = 0; layer < layers; ++layer) {
      MlpConfig mlp;
      mlp.hidden_size = mlp.output_size = hidden_size;
      mlp.intermediate_size = intermediate_size;
      mlp.dtype = dtype;
      const std::string module = absl::StrCat("model.layers.", layer, ".mlp");
      spec_.layers.push_back({layer, module, mlp});
      const auto add = [&](absl::string_view name, TensorSlot slot, int64_t begin, int64_t rows, int64_t cols) {
        spec_.tensors.push_back({absl::StrCat(module, ".", name, ".weight"),
                                 layer,
                                 {rows, cols},
                                 slot,
                                 begin,
                                 rows,
                                 /*transposed=*/false});
      };
      add("gate_proj", TensorSlot::kGateUp, 0, intermediate_size, hidden_size);
      add("up_proj", TensorSlot::kGateUp, intermediate_size, intermediate_size, hidden_size);
      add("down_proj", TensorSlot::kDown, 0, hidden_size, intermediate_size);
    }
  }

  const ModelSpec& spec() const override { return spec_; }
  absl::Status Read(const TensorSpec&, MatrixView to) const override {
    FillSmall(to);
    return absl::OkStatus();
  }

 private:
  ModelSpec spec_;
};

}  // namespace shardmlp
