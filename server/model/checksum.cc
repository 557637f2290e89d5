#include "server/model/checksum.h"

#include <xxhash.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr int64_t kPieceBytes = 1 << 20;

}  // namespace

void Checksum::Free::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

Checksum::Checksum() : state_(XXH3_createState()) { XXH3_64bits_reset(state_.get()); }

void Checksum::Add(absl::string_view bytes) {
  XXH3_64bits_update(state_.get(), bytes.data(), bytes.size());
  size_ += bytes.size();
}

FileSum Checksum::sum() const { return {.size = size_, .xxh3_64 = XXH3_64bits_digest(state_.get())}; }

absl::StatusOr<FileSum> SumOf(const File& file) {
  Checksum checksum;
  std::string piece(std::min(kPieceBytes, file.size()), '\0');
  for (int64_t offset = 0; offset < file.size(); offset += kPieceBytes) {
    const int64_t count = std::min(kPieceBytes, file.size() - offset);
    SHARDMLP_RETURN_IF_ERROR(file.ReadAt(offset, absl::MakeSpan(piece).first(count)));
    checksum.Add(absl::string_view(piece).substr(0, count));
  }
  return checksum.sum();
}

std::string ToHex(uint64_t xxh3_64) { return absl::StrFormat("%016x", xxh3_64); }

}  // namespace shardmlp
