#include "kernels/gaps.h"

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace shardmlp::testing {
namespace {

// One character a byte: what is free, searched as text is.
class NaiveGaps {
 public:
  explicit NaiveGaps(size_t bytes) : bytes_(bytes, '.') {}

  std::optional<int64_t> Take(int64_t bytes, Gaps::End end) {
    const std::string gap(static_cast<size_t>(bytes), '.');
    const size_t begin = end == Gaps::End::kFront ? bytes_.find(gap) : bytes_.rfind(gap);
    if (begin == std::string::npos) return std::nullopt;
    Fill(static_cast<int64_t>(begin), bytes, 'x');
    return static_cast<int64_t>(begin);
  }
  void Fill(int64_t begin, int64_t bytes, char with) {
    bytes_.replace(static_cast<size_t>(begin), static_cast<size_t>(bytes), static_cast<size_t>(bytes), with);
  }
  int64_t largest() const {
    int64_t largest = 0, run = 0;
    for (const char byte : bytes_) largest = std::max(largest, run = byte == '.' ? run + 1 : 0);
    return largest;
  }

 private:
  std::string bytes_;
};

TEST(GapsTest, PiecesThatComeAndGoAreWhereATwinPutsThem) {
  constexpr int64_t kBytes = 200;
  std::mt19937 random(1);
  Gaps gaps(kBytes);
  NaiveGaps twin(kBytes);
  std::vector<std::pair<int64_t, int64_t>> taken;
  int refused = 0;
  for (int i = 0; i < 5000; ++i) {
    if (random() % 2 == 0 && !taken.empty()) {
      std::swap(taken[random() % taken.size()], taken.back());
      const auto [begin, bytes] = taken.back();
      taken.pop_back();
      gaps.GiveBack(begin, bytes);
      twin.Fill(begin, bytes, '.');
    } else {
      const int64_t bytes = 1 + static_cast<int64_t>(random() % 60);
      const Gaps::End end = random() % 2 == 0 ? Gaps::End::kFront : Gaps::End::kBack;
      const std::optional<int64_t> begin = gaps.Take(bytes, end);
      ASSERT_EQ(begin, twin.Take(bytes, end));
      if (begin.has_value()) taken.emplace_back(*begin, bytes);
      refused += begin.has_value() ? 0 : 1;
    }
    ASSERT_EQ(gaps.largest(), twin.largest());
  }
  EXPECT_GT(refused, 100) << "it was full at times";
}

TEST(GapsTest, NothingHasNoGap) {
  Gaps gaps(0);
  EXPECT_EQ(gaps.largest(), 0);
  EXPECT_EQ(gaps.Take(1), std::nullopt);
}

}  // namespace
}  // namespace shardmlp::testing
