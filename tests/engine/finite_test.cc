#include "server/engine/finite.h"

#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace shardmlp::testing {
namespace {

// The bit patterns of a dtype: some that are finite, some that are not.
template <typename Bits>
struct Patterns {
  DType dtype;
  std::vector<Bits> finite;
  std::vector<Bits> not_finite;
};

// One bad element, anywhere in [3, 5] within rows of 7, is found in its row; padding is not looked at.
template <typename Bits>
void ExpectFound(const Patterns<Bits>& patterns) {
  constexpr int64_t kRows = 3, kCols = 5, kStride = 7;
  for (const Bits good : patterns.finite) {
    std::vector<Bits> values(kRows * kStride, good);
    for (int64_t row = 0; row < kRows; ++row) values[row * kStride + kCols] = patterns.not_finite[0];
    const ConstMatrixView view(values.data(), kRows, kCols, kStride, patterns.dtype);
    EXPECT_EQ(FirstNonFiniteRow(view), -1) << Name(patterns.dtype) << " " << good;
    for (const Bits bad : patterns.not_finite) {
      for (int64_t row = 0; row < kRows; ++row) {
        for (int64_t col = 0; col < kCols; ++col) {
          values[row * kStride + col] = bad;
          EXPECT_EQ(FirstNonFiniteRow(view), row) << Name(patterns.dtype) << " " << bad;
          values[row * kStride + col] = good;
        }
      }
    }
  }
}

TEST(FiniteTest, NanAndInfinityAreFoundInEveryDType) {
  // Zero, one, the smallest denormal, the largest, their negatives; infinities, quiet and signalling NaN, and NaN with
  // all bits set.
  ExpectFound<uint32_t>({DType::kF32,
                         {0, 0x3f800000, 1, 0x7f7fffff, 0x80000000, 0xff7fffff},
                         {0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0xffffffff}});
  ExpectFound<uint16_t>(
      {DType::kBF16, {0, 0x3f80, 1, 0x7f7f, 0x8000, 0xff7f}, {0x7f80, 0xff80, 0x7fc0, 0x7f81, 0xffff}});
  ExpectFound<uint16_t>(
      {DType::kF16, {0, 0x3c00, 1, 0x7bff, 0x8000, 0xfbff}, {0x7c00, 0xfc00, 0x7e00, 0x7c01, 0xffff}});
  ExpectFound<uint64_t>(
      {DType::kF64,
       {0, std::bit_cast<uint64_t>(1.0), 1, std::bit_cast<uint64_t>(std::numeric_limits<double>::max()),
        std::bit_cast<uint64_t>(-std::numeric_limits<double>::max())},
       {std::bit_cast<uint64_t>(std::numeric_limits<double>::infinity()),
        std::bit_cast<uint64_t>(-std::numeric_limits<double>::infinity()), 0x7ff0000000000001,
        std::bit_cast<uint64_t>(std::numeric_limits<double>::quiet_NaN()), ~uint64_t{0}}});
}

TEST(FiniteTest, TheFirstOfSeveralRowsIsNamed) {
  std::vector<float> values(20, 1);
  values[13] = values[18] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(FirstNonFiniteRow({values.data(), 10, 2, DType::kF32}), 6);
}

TEST(FiniteTest, NoRowsAreFinite) { EXPECT_EQ(FirstNonFiniteRow({nullptr, 0, 4, DType::kF32}), -1); }

}  // namespace
}  // namespace shardmlp::testing
