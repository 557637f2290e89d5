// What is free of a block of memory.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace shardmlp {

// The gaps of a block, by address; no two touch. For one thread at a time.
class Gaps {
 public:
  enum class End { kFront, kBack };

  // A block of `bytes` bytes of which nothing is taken.
  explicit Gaps(int64_t bytes);

  // Takes `bytes` bytes (at least 1) as near to `end` as may be, and says where in the block they begin. None where no
  // gap is as large.
  std::optional<int64_t> Take(int64_t bytes, End end = End::kFront);
  void GiveBack(int64_t begin, int64_t bytes);
  // Bytes of the largest gap.
  int64_t largest() const;

 private:
  std::map<int64_t, int64_t> gaps_;  // where each begins, and its bytes
};

}  // namespace shardmlp
