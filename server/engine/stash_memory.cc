#include "server/engine/stash_memory.h"

#include <optional>
#include <utility>

#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr int64_t kAlignment = 64;

}  // namespace

absl::StatusOr<std::shared_ptr<StashMemory>> StashMemory::Create(std::shared_ptr<Backend> backend, int64_t bytes,
                                                                 int64_t reader_bytes) {
  SHARDMLP_ASSIGN_OR_RETURN(Buffer buffer, backend->Allocate(Memory::kDevice, bytes));
  return std::make_shared<StashMemory>(std::move(backend), std::move(buffer), reader_bytes);
}

StashMemory::StashMemory(std::shared_ptr<Backend> backend, Buffer buffer, int64_t reader_bytes)
    : backend_(std::move(backend)), buffer_(std::move(buffer)), reader_bytes_(reader_bytes), gaps_(buffer_.bytes()) {}

int64_t StashMemory::PieceBytes(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::shared_ptr<void> StashMemory::Take(int64_t bytes, End end, bool reader) {
  const int64_t taken = PieceBytes(bytes);
  absl::MutexLock lock(&mutex_);
  if (reader && readers_lent_bytes_ + taken > ShareBytes(reader)) return nullptr;
  const std::optional<int64_t> begin = gaps_.Take(taken, end);
  if (!begin.has_value()) return nullptr;
  lent_bytes_ += taken;
  readers_lent_bytes_ += reader ? taken : 0;
  return std::shared_ptr<void>(
      static_cast<char*>(buffer_.data()) + *begin,
      [memory = shared_from_this(), begin = *begin, taken, reader](void*) { memory->GiveBack(begin, taken, reader); });
}

int64_t StashMemory::lent_bytes(bool readers) const {
  absl::MutexLock lock(&mutex_);
  return readers ? readers_lent_bytes_ : lent_bytes_;
}

void StashMemory::GiveBack(int64_t begin, int64_t bytes, bool reader) {
  absl::MutexLock lock(&mutex_);
  lent_bytes_ -= bytes;
  readers_lent_bytes_ -= reader ? bytes : 0;
  gaps_.GiveBack(begin, bytes);
}

}  // namespace shardmlp
