#include "server/model/safetensors_writer.h"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "server/model/file.h"
#include "server/model/json.h"
#include "server/model/safetensors.h"

namespace shardmlp {
namespace {

using nlohmann::json;

struct Placed {
  const CheckpointTensor* tensor;
  int64_t byte_count;
};

absl::StatusOr<std::vector<Placed>> Place(absl::Span<const CheckpointTensor> tensors) {
  std::vector<Placed> placed;
  for (const CheckpointTensor& tensor : tensors) {
    SHARDMLP_ASSIGN_OR_RETURN(const int64_t byte_count, ByteCountOf(tensor));
    placed.push_back({.tensor = &tensor, .byte_count = byte_count});
  }
  std::stable_sort(placed.begin(), placed.end(),
                   [](const Placed& a, const Placed& b) { return SizeOf(a.tensor->dtype) > SizeOf(b.tensor->dtype); });
  return placed;
}

// The header with its size before it, padded so that the tensors begin at a multiple of 8.
absl::StatusOr<std::string> HeaderOf(const std::vector<Placed>& placed) {
  json header = {{"__metadata__", {{"format", "pt"}}}};
  int64_t end = 0;
  for (const auto& [tensor, byte_count] : placed) {
    json& entry = header[tensor->name];
    if (!entry.is_null()) {
      return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                   absl::StrCat("tensor ", Describe(tensor->name), " stands twice"));
    }
    entry["dtype"] = std::string(SafetensorsName(tensor->dtype));
    entry["shape"] = tensor->shape;
    entry["data_offsets"] = {end, end + byte_count};
    end += byte_count;
  }
  std::string text = header.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
  text.append((8 - text.size() % 8) % 8, ' ');
  const uint64_t size = text.size();
  return absl::StrCat(absl::string_view(reinterpret_cast<const char*>(&size), sizeof(size)), text);
}

}  // namespace

absl::StatusOr<int64_t> ByteCountOf(const CheckpointTensor& tensor) {
  int64_t byte_count = SizeOf(tensor.dtype);
  for (const int64_t size : tensor.shape) {
    if (size < 0 || __builtin_mul_overflow(byte_count, size, &byte_count)) {
      return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidShape,
                   absl::StrCat("tensor ", tensor.name, " has the impossible shape ", ShapeName(tensor.shape)));
    }
  }
  return byte_count;
}

absl::StatusOr<FileSum> WriteSafetensors(const std::string& path, absl::Span<const CheckpointTensor> tensors) {
  SHARDMLP_ASSIGN_OR_RETURN(const std::vector<Placed> placed, Place(tensors));
  SHARDMLP_ASSIGN_OR_RETURN(const std::string header, HeaderOf(placed));
  SHARDMLP_ASSIGN_OR_RETURN(File file, File::Create(path));
  Checksum checksum;
  checksum.Add(header);
  SHARDMLP_RETURN_IF_ERROR(file.Append(header));
  std::vector<char> bytes;
  for (const auto& [tensor, byte_count] : placed) {
    bytes.resize(byte_count);
    SHARDMLP_RETURN_IF_ERROR(tensor->read(absl::MakeSpan(bytes)));
    const absl::string_view view(bytes.data(), bytes.size());
    checksum.Add(view);
    SHARDMLP_RETURN_IF_ERROR(file.Append(view));
  }
  SHARDMLP_RETURN_IF_ERROR(file.Sync());
  return checksum.sum();
}

}  // namespace shardmlp
