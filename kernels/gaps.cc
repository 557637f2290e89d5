#include "kernels/gaps.h"

#include <algorithm>
#include <iterator>

namespace shardmlp {

Gaps::Gaps(int64_t bytes) {
  if (bytes > 0) gaps_[0] = bytes;
}

std::optional<int64_t> Gaps::Take(int64_t bytes, End end) {
  const auto fits = [bytes](const auto& gap) { return gap.second >= bytes; };
  auto gap = std::find_if(gaps_.begin(), gaps_.end(), fits);
  if (gap == gaps_.end()) return std::nullopt;
  if (end == End::kBack) gap = std::prev(std::find_if(gaps_.rbegin(), gaps_.rend(), fits).base());
  const auto [gap_begin, gap_bytes] = *gap;
  gaps_.erase(gap);
  if (gap_bytes > bytes) gaps_[end == End::kFront ? gap_begin + bytes : gap_begin] = gap_bytes - bytes;
  return end == End::kFront ? gap_begin : gap_begin + gap_bytes - bytes;
}

void Gaps::GiveBack(int64_t begin, int64_t bytes) {
  auto gap = gaps_.emplace(begin, bytes).first;
  const auto join = [this](auto first, auto second) {
    first->second += second->second;
    gaps_.erase(second);
    return first;
  };
  if (gap != gaps_.begin() && std::prev(gap)->first + std::prev(gap)->second == begin) gap = join(std::prev(gap), gap);
  const auto next = std::next(gap);
  if (next != gaps_.end() && gap->first + gap->second == next->first) join(gap, next);
}

int64_t Gaps::largest() const {
  int64_t largest = 0;
  for (const auto& [begin, bytes] : gaps_) largest = std::max(largest, bytes);
  return largest;
}

}  // namespace shardmlp
