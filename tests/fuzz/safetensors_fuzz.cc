// Hostile safetensors headers, config.json and manifest.json files: refused or understood, never anything else.
//
// An input is 'h', two bytes of data size (high byte first) and a header; 'c' and a config.json; or 'm' and a
// manifest.json.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/strings/string_view.h"
#include "server/model/manifest.h"
#include "server/model/model_config.h"
#include "server/model/safetensors.h"

namespace shardmlp {
namespace {

void Check(bool holds) {
  if (!holds) std::abort();
}

// The tensors of a header that is accepted fill the file, each with as many bytes as its shape takes.
void FuzzHeader(absl::string_view header, int64_t data_size) {
  const int64_t data_begin = 8 + static_cast<int64_t>(header.size());
  const auto entries =
      ParseSafetensorsHeader(header, data_begin, data_begin + data_size, "fuzzed.safetensors", Reason::kModelCorrupt);
  if (!entries.ok()) {
    Check(absl::IsDataLoss(entries.status()) && ReasonOf(entries.status()) == Reason::kModelCorrupt);
    return;
  }
  int64_t byte_count = 0;
  for (const auto& [name, entry] : *entries) {
    Check(entry.begin >= data_begin && entry.byte_count >= 0);
    Check(entry.begin + entry.byte_count <= data_begin + data_size);
    byte_count += entry.byte_count;
    if (!entry.dtype.has_value()) continue;
    int64_t expected = SizeOf(*entry.dtype);
    for (const int64_t size : entry.shape) expected *= size;
    Check(expected == entry.byte_count);
  }
  Check(byte_count == data_size);
}

// The tensors of a config that is accepted are its layers' parameters.
void FuzzConfig(absl::string_view text) {
  const auto config = ParseModelConfig(text, "config.json");
  if (!config.ok()) {
    Check(ReasonOf(config.status()) == Reason::kUnsupportedModel || ReasonOf(config.status()) == Reason::kModelCorrupt);
    return;
  }
  constexpr int64_t kSmall = 1 << 20;  // no product overflows
  if (config->mlp.hidden_size > kSmall || config->mlp.intermediate_size > kSmall) return;
  const auto spec = MakeModelSpec(*config, "model.", {.layers = std::pair(0, 0), .dtype = DType::kBF16});
  Check(spec.ok() && spec->layers.size() == 1);
  int64_t element_count = 0;
  for (const TensorSpec& tensor : spec->tensors) element_count += tensor.element_count();
  Check(element_count == spec->layers[0].mlp.parameter_count());
}

void FuzzManifest(absl::string_view text) {
  const auto manifest = ParseManifest(text, "manifest.json");
  if (manifest.ok()) return;
  Check(ReasonOf(manifest.status()) == Reason::kCheckpointCorrupt ||
        ReasonOf(manifest.status()) == Reason::kCheckpointMismatch);
}

}  // namespace
}  // namespace shardmlp

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  if (size >= 3 && input[0] == 'h') shardmlp::FuzzHeader(input.substr(3), data[1] * 256 + data[2]);
  if (size >= 1 && input[0] == 'c') shardmlp::FuzzConfig(input.substr(1));
  if (size >= 1 && input[0] == 'm') shardmlp::FuzzManifest(input.substr(1));
  return 0;
}
