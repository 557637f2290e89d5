#include "client/cli/elements.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace shardmlp {
namespace {

// bf16 is the upper half of an f32.
double FromBf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
uint16_t ToBf16(double value) { return std::bit_cast<uint32_t>(static_cast<float>(value)) >> 16; }

// f16: a sign, 5 bits of exponent biased by 15, and 10 of fraction.
double FromF16(uint16_t bits) {
  const int exponent = bits >> 10 & 0x1f;
  const int fraction = bits & 0x3ff;
  double magnitude = std::ldexp(exponent == 0 ? fraction : fraction + 0x400, (exponent == 0 ? 1 : exponent) - 25);
  if (exponent == 0x1f) magnitude = fraction == 0 ? HUGE_VAL : std::nan("");
  return std::copysign(magnitude, (bits & 0x8000) != 0 ? -1.0 : 1.0);
}
uint16_t ToF16(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::abs(value);
  if (magnitude < std::ldexp(1.0, -14)) return sign | static_cast<uint16_t>(std::ldexp(magnitude, 24));
  int exponent = 0;
  const double fraction = std::frexp(magnitude, &exponent);  // in [1/2, 1)
  return sign | static_cast<uint16_t>((exponent + 14) << 10 | (static_cast<int>(std::ldexp(fraction, 11)) & 0x3ff));
}

template <typename Element, typename Decode>
std::vector<double> DecodeAll(const std::string& bytes, Decode decode) {
  std::vector<double> values(bytes.size() / sizeof(Element));
  for (size_t i = 0; i < values.size(); ++i) {
    Element element;
    std::memcpy(&element, bytes.data() + i * sizeof(Element), sizeof(Element));
    values[i] = decode(element);
  }
  return values;
}

template <typename Element, typename Encode>
std::string EncodeAll(const std::vector<double>& values, Encode encode) {
  std::string bytes(values.size() * sizeof(Element), 0);
  for (size_t i = 0; i < values.size(); ++i) {
    const Element element = encode(values[i]);
    std::memcpy(bytes.data() + i * sizeof(Element), &element, sizeof(Element));
  }
  return bytes;
}

}  // namespace

std::vector<double> DecodeElements(const std::string& bytes, DType dtype) {
  switch (dtype) {
    case DType::kF32: return DecodeAll<float>(bytes, [](float value) { return static_cast<double>(value); });
    case DType::kF64: return DecodeAll<double>(bytes, [](double value) { return value; });
    case DType::kBF16: return DecodeAll<uint16_t>(bytes, FromBf16);
    case DType::kF16: return DecodeAll<uint16_t>(bytes, FromF16);
  }
  return {};
}

std::string EncodeElements(const std::vector<double>& values, DType dtype) {
  switch (dtype) {
    case DType::kF32: return EncodeAll<float>(values, [](double value) { return static_cast<float>(value); });
    case DType::kF64: return EncodeAll<double>(values, [](double value) { return value; });
    case DType::kBF16: return EncodeAll<uint16_t>(values, ToBf16);
    case DType::kF16: return EncodeAll<uint16_t>(values, ToF16);
  }
  return {};
}

double HalfUnit(double value, DType dtype) {
  int significant_bits = 0;
  switch (dtype) {
    case DType::kF64: significant_bits = 53; break;
    case DType::kF32: significant_bits = 24; break;
    case DType::kF16: significant_bits = 11; break;
    case DType::kBF16: significant_bits = 8; break;
  }
  return std::ldexp(1, std::ilogb(value) - significant_bits);
}

}  // namespace shardmlp
