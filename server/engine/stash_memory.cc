#include "server/engine/stash_memory.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr int64_t kAlignment = 64;

}  // namespace

absl::StatusOr<std::shared_ptr<StashMemory>> StashMemory::Create(std::shared_ptr<Backend> backend, int64_t bytes) {
  SHARDMLP_ASSIGN_OR_RETURN(Buffer buffer, backend->Allocate(Memory::kDevice, bytes));
  return std::make_shared<StashMemory>(std::move(backend), std::move(buffer));
}

StashMemory::StashMemory(std::shared_ptr<Backend> backend, Buffer buffer)
    : backend_(std::move(backend)), buffer_(std::move(buffer)) {
  if (buffer_.bytes() > 0) gaps_[0] = buffer_.bytes();
}

int64_t StashMemory::PieceBytes(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::shared_ptr<void> StashMemory::Take(int64_t bytes) {
  const int64_t taken = PieceBytes(bytes);
  absl::MutexLock lock(&mutex_);
  const auto gap = std::find_if(gaps_.begin(), gaps_.end(), [&](const auto& entry) { return entry.second >= taken; });
  if (gap == gaps_.end()) return nullptr;
  const auto [begin, size] = *gap;
  gaps_.erase(gap);
  if (size > taken) gaps_[begin + taken] = size - taken;
  return std::shared_ptr<void>(
      static_cast<char*>(buffer_.data()) + begin,
      [memory = shared_from_this(), begin = begin, taken](void*) { memory->GiveBack(begin, taken); });
}

void StashMemory::GiveBack(int64_t begin, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
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
