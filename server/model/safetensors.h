// Safetensors: 8 bytes of header size, a JSON header, and the tensors' bytes end to end, little-endian.
//
//   {"__metadata__": {"format": "pt"}, "<tensor>": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [0, 16]}, ...}
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/matrix.h"
#include "kernels/status.h"
#include "server/model/file.h"

namespace shardmlp {

// One tensor of a file.
struct SafetensorsEntry {
  std::string dtype_name;      // as the file has it: "BF16", "I8"
  std::optional<DType> dtype;  // absent where `dtype_name` is none that weights are read in
  std::vector<int64_t> shape;
  int64_t begin = 0;  // first byte, from the start of the file
  int64_t byte_count = 0;
};
using SafetensorsEntries = std::map<std::string, SafetensorsEntry>;

// "F32" and so on.
absl::string_view SafetensorsName(DType dtype);
// "[4, 2]"
std::string ShapeName(absl::Span<const int64_t> shape);

// The tensors of a header. `data_begin` is where their bytes begin in the file and `file_size` where it ends. DATA_LOSS
// (`corrupt`), naming path, tensor and offset, where a tensor's bytes are not of its shape's size, overlap another's,
// leave a gap, or lie beyond the file.
absl::StatusOr<SafetensorsEntries> ParseSafetensorsHeader(absl::string_view header, int64_t data_begin,
                                                          int64_t file_size, absl::string_view path, Reason corrupt);

// An open file whose header has been checked. Thread-safe.
class SafetensorsFile {
 public:
  // Reads the header of `file`. DATA_LOSS (`corrupt`) for a file that is torn.
  static absl::StatusOr<SafetensorsFile> Open(File file, Reason corrupt);

  const std::string& path() const { return file_.path(); }
  const SafetensorsEntries& tensors() const { return tensors_; }
  // Bytes [offset, offset + out.size()) of a tensor of this file. They must lie within it.
  absl::Status Read(const SafetensorsEntry& entry, int64_t offset, absl::Span<char> out) const;

 private:
  SafetensorsFile(File file, SafetensorsEntries tensors) : file_(std::move(file)), tensors_(std::move(tensors)) {}
  File file_;
  SafetensorsEntries tensors_;
};

}  // namespace shardmlp
