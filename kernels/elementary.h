// exp and the normal distribution, in f32 and f64, for elementwise loops.
//
// Branch-free arithmetic on one element: a loop over them vectorises without -ffast-math, and infinities and NaN come
// out as <cmath> gives them. Everything is constexpr, which is what lets device code call it too. Errors: Exp within 2
// units in the last place where the result is normal; Normal's cdf within 2e-7 (f32) or 1e-15 (f64), absolute.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace shardmlp {

template <typename T>
struct ElementaryConstants;

template <>
struct ElementaryConstants<float> {
  using Integer = int32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr int kExponentBias = 127;
  static constexpr float kExpLowest = -104.0f;  // exp rounds to 0 from here down
  static constexpr float kExpHighest = 89.0f;   // exp is infinite from here up
  static constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, left in the low bits
  static constexpr float kLog2E = 1.44269504088896341f;
  static constexpr float kLn2High = 0.693145751953125f;  // ln 2 to 16 bits, so that products with exponents are exact
  static constexpr float kLn2Low = 1.4286068203094173e-06f;
  // Minimax polynomial of exp on [-ln 2 / 2, ln 2 / 2], constant term first.
  static constexpr std::array<float, 7> kExp = {1.0f,           1.00000004f,     0.500000005f,   0.166664053f,
                                                0.04166634014f, 0.008375968226f, 0.001394215983f};
  // Chebyshev fit of exp(a^2 / 2) (1 - Phi(a)) in s = 2 / (1 + 0.3 a) - 1, a in [0, infinity], constant term first.
  static constexpr std::array<float, 11> kTail = {
      0.1109853069f,   0.1932750327f,     0.1255645983f,    0.05715532348f,  0.0147879936f,   -0.0003051431054f,
      -0.00149543013f, -0.0001421893749f, 0.0001764972803f, 1.697785598e-5f, -1.896879157e-5f};
};

template <>
struct ElementaryConstants<double> {
  using Integer = int64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr int kExponentBias = 1023;
  static constexpr double kExpLowest = -746.0;
  static constexpr double kExpHighest = 710.0;
  static constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLog2E = 1.44269504088896341;
  static constexpr double kLn2High = 0.6931471805582987;  // to 39 bits
  static constexpr double kLn2Low = 1.6465949582897082e-12;
  static constexpr std::array<double, 12> kExp = {1.0,
                                                  1.0,
                                                  0.500000000000002031,
                                                  0.166666666666666823,
                                                  0.0416666666664732922,
                                                  0.00833333333331846226,
                                                  0.00138888889562192147,
                                                  0.000198412698930495452,
                                                  0.0000248014813445703227,
                                                  2.75572377367405999e-6,
                                                  2.76341554909894834e-7,
                                                  2.51112032574711387e-8};
  static constexpr std::array<double, 23> kTail = {
      0.110985306917216399,    0.193275048960297995,     0.125564560752310346,      0.0571550014460731205,
      0.0147887506347764954,   -0.000303380375748510018, -0.00149976953635991649,   -0.000146002806118329026,
      0.000186888468127687018, 0.0000201968262185961764, -0.0000304362869797680735, -1.97309679930657551e-7,
      5.48920706960315007e-6,  -1.00219925513830378e-6,  -8.6888969690353567e-7,    4.35533628166850539e-7,
      6.6531800416140733e-8,   -1.19792331415959076e-7,  1.97193829227312818e-8,    2.17207557182719699e-8,
      -8.75256446434558901e-9, -2.00384030333675996e-9,  1.23491725804124315e-9};
};

// coefficients[0] + coefficients[1] x + ..., by Horner's rule.
template <typename T, size_t N>
constexpr T Polynomial(const std::array<T, N>& coefficients, T x) {
  T sum = coefficients[N - 1];
  for (size_t i = N - 1; i-- > 0;) sum = sum * x + coefficients[i];
  return sum;
}

// e^x = 2^n e^r, n an integer and |r| at most ln 2 / 2.
template <typename T>
constexpr T Exp(T x) {
  using Constants = ElementaryConstants<T>;
  using Integer = typename Constants::Integer;
  x = x < Constants::kExpLowest ? Constants::kExpLowest : x;  // NaN passes
  x = x > Constants::kExpHighest ? Constants::kExpHighest : x;
  const T shifted = x * Constants::kLog2E + Constants::kShift;
  const T n = shifted - Constants::kShift;
  const T r = (x - n * Constants::kLn2High) - n * Constants::kLn2Low;
  // 2^n by two factors: n may be beyond the exponents of normal numbers, on either side.
  const Integer exponent = std::bit_cast<Integer>(shifted) - std::bit_cast<Integer>(Constants::kShift);
  const Integer half = exponent >> 1;
  const T first = std::bit_cast<T>((half + Constants::kExponentBias) << Constants::kMantissaBits);
  const T second = std::bit_cast<T>((exponent - half + Constants::kExponentBias) << Constants::kMantissaBits);
  return Polynomial(Constants::kExp, r) * first * second;
}

// The logistic function s(x) = 1 / (1 + e^-x).
template <typename T>
constexpr T Logistic(T x) {
  return T(1) / (T(1) + Exp(-x));
}

template <typename T>
struct NormalValues {
  T cdf;      // Phi(x) = (1 + erf(x / sqrt 2)) / 2
  T density;  // phi(x) = exp(-x^2 / 2) / sqrt(2 pi)
};

template <typename T>
constexpr NormalValues<T> Normal(T x) {
  const T a = x < 0 ? -x : x;
  const T bell = Exp(T(-0.5) * x * x);
  const T s = T(2) / (T(1) + T(0.3) * a) - T(1);
  const T tail = bell * Polynomial(ElementaryConstants<T>::kTail, s);
  return {x < 0 ? tail : T(1) - tail, bell * T(0.398942280401432677939946059934)};
}

}  // namespace shardmlp
