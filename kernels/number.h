// Element types as they lie in memory, and their conversions. Arithmetic is in f32, or f64 for f64 elements.
//
// Stores round to nearest even, once: an f64 reaches a 16-bit type without the double rounding of a detour through f32.
// Infinities and NaN are kept. All of it is branch-free, so that loops vectorise, and constexpr, so that device code
// can call it.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "kernels/matrix.h"

namespace shardmlp {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// What an element of type T is computed in.
template <typename T>
using Arithmetic = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr float Load(float x) { return x; }
constexpr double Load(double x) { return x; }
constexpr float Load(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
constexpr float Load(Float16 x) {
  // The exponent is rebased by a multiplication, which makes subnormals right too; what overflows was Inf or NaN.
  const uint32_t magnitude = uint32_t{x.bits} & 0x7fffu;
  const float finite = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  const uint32_t sign = (uint32_t{x.bits} & 0x8000u) << 16;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(finite) | special | sign);
}

// To f32 with an inexact result made odd, after which rounding to fewer bits is as if from x itself.
constexpr float RoundToOdd(double x) {
  const float nearest = static_cast<float>(x);
  const uint32_t bits = std::bit_cast<uint32_t>(nearest);
  const double back = nearest;
  const bool grew = (back < 0 ? -back : back) > (x < 0 ? -x : x);
  const bool inexact = back != x && x == x;
  const uint32_t truncated =
      bits - (inexact && grew ? 1u : 0u);  // an infinity from overflow becomes the largest finite
  return std::bit_cast<float>(truncated | (inexact ? 1u : 0u));
}

constexpr void Store(float x, float& to) { to = x; }
constexpr void Store(double x, float& to) { to = static_cast<float>(x); }
constexpr void Store(double x, double& to) { to = x; }
constexpr void Store(float x, BFloat16& to) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  to.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}
constexpr void Store(float x, Float16& to) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results: rebase the exponent and round the 13 low bits away; a carry into the exponent is right.
  const uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 leaves the value in the low bits, rounded by the addition itself.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t unsigned_bits = magnitude >= 0x477ff000u ? special : finite;
  to.bits = static_cast<uint16_t>(unsigned_bits | ((bits >> 16) & 0x8000u));
}
constexpr void Store(double x, BFloat16& to) { Store(RoundToOdd(x), to); }
constexpr void Store(double x, Float16& to) { Store(RoundToOdd(x), to); }

template <typename T>
struct TypeTag {
  using Type = T;
};

// f(TypeTag<T>()) for the type T that `dtype` names.
template <typename F>
constexpr auto WithDType(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kF32: return f(TypeTag<float>());
    case DType::kBF16: return f(TypeTag<BFloat16>());
    case DType::kF16: return f(TypeTag<Float16>());
    case DType::kF64: break;
  }
  return f(TypeTag<double>());
}

// The same for the dtypes that tiles are computed in.
template <typename F>
constexpr auto WithComputedDType(DType dtype, const F& f) {
  if (dtype == DType::kF32) return f(TypeTag<float>());
  if (dtype == DType::kBF16) return f(TypeTag<BFloat16>());
  return f(TypeTag<double>());
}

}  // namespace shardmlp
