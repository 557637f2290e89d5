#include "server/engine/stash_memory.h"

#include <algorithm>
#include <iterator>
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
    : backend_(std::move(backend)), buffer_(std::move(buffer)), reader_bytes_(reader_bytes) {
  if (buffer_.bytes() > 0) gaps_[0] = buffer_.bytes();
}

int64_t StashMemory::PieceBytes(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::shared_ptr<void> StashMemory::Take(int64_t bytes, End end, bool reader) {
  const int64_t taken = PieceBytes(bytes);
  absl::MutexLock lock(&mutex_);
  if (reader && readers_lent_bytes_ + taken > ShareBytes(reader)) return nullptr;
  const auto fits = [&](const auto& gap) { return gap.second >= taken; };
  auto gap = std::find_if(gaps_.begin(), gaps_.end(), fits);
  if (gap == gaps_.end()) return nullptr;
  if (end == End::kBack) gap = std::prev(std::find_if(gaps_.rbegin(), gaps_.rend(), fits).base());
  const auto [gap_begin, gap_bytes] = *gap;
  const int64_t begin = end == End::kFront ? gap_begin : gap_begin + gap_bytes - taken;
  gaps_.erase(gap);
  if (gap_bytes > taken) gaps_[end == End::kFront ? gap_begin + taken : gap_begin] = gap_bytes - taken;
  lent_bytes_ += taken;
  readers_lent_bytes_ += reader ? taken : 0;
  return std::shared_ptr<void>(
      static_cast<char*>(buffer_.data()) + begin,
      [memory = shared_from_this(), begin, taken, reader](void*) { memory->GiveBack(begin, taken, reader); });
}

int64_t StashMemory::lent_bytes(bool readers) const {
  absl::MutexLock lock(&mutex_);
  return readers ? readers_lent_bytes_ : lent_bytes_;
}

void StashMemory::GiveBack(int64_t begin, int64_t bytes, bool reader) {
  absl::MutexLock lock(&mutex_);
  lent_bytes_ -= bytes;
  readers_lent_bytes_ -= reader ? bytes : 0;
  auto gap = gaps_.emplace(begin, bytes).first;
  const auto join = [this](std::map<int64_t, int64_t>::iterator first, std::map<int64_t, int64_t>::iterator second) {
    mutex_.AssertHeld();
    first->second += second->second;
    gaps_.erase(second);
    return first;
  };
  if (gap != gaps_.begin() && std::prev(gap)->first + std::prev(gap)->second == begin) gap = join(std::prev(gap), gap);
  const auto next = std::next(gap);
  if (next != gaps_.end() && gap->first + gap->second == next->first) join(gap, next);
}

}  // namespace shardmlp
