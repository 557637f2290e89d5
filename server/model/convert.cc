#include "server/model/convert.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace shardmlp {
namespace {

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

float ToFloat(float value) { return value; }
float ToFloat(double value) { return static_cast<float>(value); }
float ToFloat(BF16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }
float ToFloat(F16 value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude < 0x0400u) {  // zero or subnormal: a multiple of 2^-24
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-24f));
  }
  const uint32_t exponent_shift = magnitude >= 0x7c00u ? (255u - 31u) << 23 : (127u - 15u) << 23;
  return std::bit_cast<float>(sign | ((magnitude << 13) + exponent_shift));
}

void FromFloat(float value, float& out) { out = value; }
void FromFloat(float value, double& out) { out = value; }
void FromFloat(float value, BF16& out) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) {
    out.bits = static_cast<uint16_t>(bits >> 16 | 0x0040u);
    return;
  }
  out.bits = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
void FromFloat(float value, F16& out) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half = 0;
  if (magnitude > 0x7f800000u) {  // NaN
    half = 0x7e00u;
  } else if (magnitude >= 0x47800000u) {  // 2^16 and above
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24; adding 0.5 rounds it there
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  } else {
    half = (magnitude - ((127u - 15u) << 23) + 0x0fffu + (magnitude >> 13 & 1u)) >> 13;
  }
  out.bits = static_cast<uint16_t>(sign | half);
}

template <typename From, typename To>
void Convert(const char* from, char* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    From value;
    To converted;
    std::memcpy(&value, from + i * sizeof(From), sizeof(From));
    FromFloat(ToFloat(value), converted);
    std::memcpy(to + i * sizeof(To), &converted, sizeof(To));
  }
}

template <typename From>
void ConvertFrom(const char* from, char* to, DType to_dtype, int64_t count) {
  switch (to_dtype) {
    case DType::kF32: return Convert<From, float>(from, to, count);
    case DType::kBF16: return Convert<From, BF16>(from, to, count);
    case DType::kF16: return Convert<From, F16>(from, to, count);
    case DType::kF64: return Convert<From, double>(from, to, count);
  }
}

}  // namespace

void ConvertElements(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count) {
  const char* source = static_cast<const char*>(from);
  char* target = static_cast<char*>(to);
  if (from_dtype == to_dtype) {
    std::memcpy(target, source, count * SizeOf(to_dtype));
    return;
  }
  switch (from_dtype) {
    case DType::kF32: return ConvertFrom<float>(source, target, to_dtype, count);
    case DType::kBF16: return ConvertFrom<BF16>(source, target, to_dtype, count);
    case DType::kF16: return ConvertFrom<F16>(source, target, to_dtype, count);
    case DType::kF64: return ConvertFrom<double>(source, target, to_dtype, count);
  }
}

}  // namespace shardmlp
