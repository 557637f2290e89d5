// Conversion of elements against the definition of each type, over every 16-bit value.
#include "server/model/convert.h"

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace shardmlp {
namespace {

// The value of a 16-bit float with this many exponent bits, by definition.
double ValueOf(uint16_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

struct HalfType {
  DType dtype;
  int exponent_bits;
};

class HalfTypes : public testing::TestWithParam<HalfType> {
 protected:
  template <typename From>
  uint16_t ToHalf(From value) const {
    const DType from = sizeof(From) == 4 ? DType::kF32 : DType::kF64;
    uint16_t half;
    ConvertElements(&value, from, &half, GetParam().dtype, 1);
    return half;
  }
  double Value(uint16_t bits) const { return ValueOf(bits, GetParam().exponent_bits); }
};

TEST_P(HalfTypes, EveryValueIsReadExactlyAndComesBack) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    float as_float;
    double as_double;
    ConvertElements(&half, GetParam().dtype, &as_float, DType::kF32, 1);
    ConvertElements(&half, GetParam().dtype, &as_double, DType::kF64, 1);
    const double expected = Value(half);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(as_float) && std::isnan(as_double) && std::isnan(Value(ToHalf(as_float)))) << bits;
      continue;
    }
    ASSERT_EQ(as_float, expected) << bits;
    ASSERT_EQ(as_double, expected) << bits;
    ASSERT_EQ(ToHalf(as_float), half);
    ASSERT_EQ(ToHalf(as_double), half);
  }
}

TEST_P(HalfTypes, BetweenTwoValuesTheNearestAndTheEvenOneAreTaken) {
  const int infinity = ((1 << GetParam().exponent_bits) - 1) << (15 - GetParam().exponent_bits);
  for (int bits = 0; bits + 1 < infinity; ++bits) {
    const uint16_t low = static_cast<uint16_t>(bits);
    const uint16_t high = static_cast<uint16_t>(bits + 1);
    const double middle = (Value(low) + Value(high)) / 2;
    const uint16_t even = bits % 2 == 0 ? low : high;
    ASSERT_EQ(ToHalf(static_cast<float>(middle)), even) << bits;
    ASSERT_EQ(ToHalf(middle), even) << bits;
    ASSERT_EQ(ToHalf(-middle), even | 0x8000) << bits;
    ASSERT_EQ(ToHalf(std::nextafter(static_cast<float>(middle), 0.0f)), low) << bits;
    ASSERT_EQ(ToHalf(std::nextafter(static_cast<float>(middle), INFINITY)), high) << bits;
    // Too near to the middle for f32: rounding twice would get these wrong.
    ASSERT_EQ(ToHalf(std::nextafter(middle, 0.0)), low) << bits;
    ASSERT_EQ(ToHalf(std::nextafter(middle, INFINITY)), high) << bits;
  }
}

INSTANTIATE_TEST_SUITE_P(ConvertTest, HalfTypes, testing::Values(HalfType{DType::kBF16, 8}, HalfType{DType::kF16, 5}),
                         [](const auto& info) { return std::string(Name(info.param.dtype)); });

TEST(ConvertTest, EqualTypesKeepEveryBit) {
  const std::vector<uint32_t> bits = {0x7f800001u, 0xffc12345u, 0x80000000u, 0x00000001u};
  std::vector<uint32_t> copied(bits.size());
  ConvertElements(bits.data(), DType::kF32, copied.data(), DType::kF32, 4);
  EXPECT_EQ(copied, bits);
}

}  // namespace
}  // namespace shardmlp
