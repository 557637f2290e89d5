// Every backend's buffers, copies and events.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/status.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/dense.h"
#include "tests/kernels/device_matrix.h"

namespace shardmlp::testing {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// x to `precision` bits with exponents from `lowest` to `highest`, to nearest even, by arithmetic alone.
double RoundTo(double x, int precision, int lowest, int highest) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), lowest);
  const double unit = std::ldexp(1.0, exponent - precision + 1);
  const double rounded = std::nearbyint(x / unit) * unit;
  return std::abs(rounded) >= std::ldexp(1.0, highest + 1) ? std::copysign(kInfinity, x) : rounded;
}

double RoundTo(double x, DType dtype) {
  switch (dtype) {
    case DType::kF32: return RoundTo(x, 24, -126, 127);
    case DType::kBF16: return RoundTo(x, 8, -126, 127);
    case DType::kF16: return RoundTo(x, 11, -14, 15);
    case DType::kF64: break;
  }
  return x;
}

// Random mantissas at every exponent that f16 and bf16 treat differently, and the halfway points around them.
Dense ManyMagnitudes() {
  std::vector<double> values = {0, -0.0, kInfinity, -kInfinity, NAN, 1e300, -1e300, 65504, 65519.99, 65520, 3.4e38};
  const Dense mantissas = RandomDense(1, 8, 3);
  for (int exponent = -160; exponent <= 130; ++exponent) {
    for (const double mantissa : mantissas.values) values.push_back(std::ldexp(mantissa, exponent));
    for (const int bits : {8, 9, 11, 12, 24, 25}) {
      const double odd = std::ldexp(1.0, exponent) + std::ldexp(1.0, exponent - bits);
      values.insert(values.end(), {odd, -odd, std::nextafter(odd, 0), std::nextafter(odd, kInfinity)});
    }
  }
  Dense m(1, static_cast<int64_t>(values.size()));
  m.values = values;
  return m;
}

class MemoryTest : public BackendTest {};

TEST_P(MemoryTest, BuffersAreAlignedAndComeBack) {
  for (const Memory memory : {Memory::kDevice, Memory::kStaging}) {
    for (const int64_t bytes : {1, 64, 100, 5 << 20}) {
      const Buffer buffer = backend().Allocate(memory, bytes).value();
      EXPECT_EQ(buffer.bytes(), bytes);
      EXPECT_EQ(buffer.memory(), memory);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
    }
  }
  const Buffer none = backend().Allocate(Memory::kDevice, 0).value();
  EXPECT_EQ(none.data(), nullptr);
}

TEST_P(MemoryTest, MoreThanTheDeviceHasCantBeReserved) {
  const absl::Status status = backend().Reserve(backend().device().memory_bytes + 1);
  EXPECT_FALSE(status.ok()) << "nor more than once";
}

TEST_P(MemoryTest, MoreThanTheDeviceHasIsRefusedWithTheNumbers) {
  const int64_t bytes = backend().device().memory_bytes + 1;
  const absl::Status status = backend().Allocate(Memory::kDevice, bytes).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), Reason::kOutOfMemory);
  EXPECT_NE(status.message().find(absl::StrCat(bytes)), absl::string_view::npos) << status;
}

TEST_P(MemoryTest, CopiesConvertBetweenAllTypesToNearestEven) {
  const Dense values = ManyMagnitudes();
  for (const DType from : kDTypes) {
    const DeviceMatrix source(backend(), values, from);
    const Dense held = source.Read();
    for (const DType to : kDTypes) {
      SCOPED_TRACE(absl::StrCat(Name(from), " to ", Name(to)));
      const DeviceMatrix target(backend(), values.rows, values.cols, to);
      ASSERT_TRUE(backend().Copy(Stream::kCompute, source.view(), target.view()).ok());
      const Dense got = target.Read();
      for (size_t i = 0; i < values.values.size(); ++i) {
        const double expected = RoundTo(held.values[i], to);
        if (std::isnan(expected)) {
          EXPECT_TRUE(std::isnan(got.values[i]));
        } else {
          EXPECT_EQ(got.values[i], expected) << held.values[i];
          EXPECT_EQ(std::signbit(got.values[i]), std::signbit(expected)) << held.values[i];
        }
      }
    }
  }
}

TEST_P(MemoryTest, EveryStored16BitPatternSurvivesARoundTrip) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const Buffer staging = backend().Allocate(Memory::kStaging, 65536 * 2).value();
    auto* bits = static_cast<uint16_t*>(staging.data());
    for (int i = 0; i < 65536; ++i) bits[i] = static_cast<uint16_t>(i);
    const DeviceMatrix wide(backend(), 1, 65536, DType::kF32);
    ASSERT_TRUE(backend().Copy(Stream::kCopyIn, staging.View(1, 65536, dtype), wide.view()).ok());
    Finish(backend(), Stream::kCopyIn);
    const Dense values = wide.Read();
    ASSERT_TRUE(backend().Copy(Stream::kCopyOut, wide.view(), staging.View(1, 65536, dtype)).ok());
    Finish(backend(), Stream::kCopyOut);
    for (int i = 0; i < 65536; ++i) {
      if (std::isnan(values.values[static_cast<size_t>(i)])) continue;
      ASSERT_EQ(bits[i], i) << Name(dtype);
    }
  }
}

TEST_P(MemoryTest, CopiesKeepToTheirRows) {
  for (const DType from : kDTypes) {
    for (const DType to : kDTypes) {
      const Dense values = Rounded(backend(), RandomDense(9, 17, 1), DType::kBF16);
      const DeviceMatrix source(backend(), values, from, 5);
      const DeviceMatrix target(backend(), 9, 17, to, 3);
      ASSERT_TRUE(backend().Copy(Stream::kCompute, source.view(), target.view()).ok());
      EXPECT_EQ(target.Read(), values);
    }
  }
}

TEST_P(MemoryTest, LargeCopiesAreWhole) {
  const Dense values = Rounded(backend(), RandomDense(700, 300, 2), DType::kF32);
  const DeviceMatrix source(backend(), values, DType::kF32);
  const DeviceMatrix target(backend(), 700, 300, DType::kF64, 4);
  ASSERT_TRUE(backend().Copy(Stream::kCompute, source.view(), target.view()).ok());
  EXPECT_EQ(target.Read(), values);
}

TEST_P(MemoryTest, ZeroKeepsToItsRows) {
  for (const DType dtype : kDTypes) {
    const DeviceMatrix m(backend(), RandomDense(300, 201, 1), dtype, 3);
    ASSERT_TRUE(backend().Zero(Stream::kCompute, m.view().Rows(1, 298)).ok());
    const Dense got = m.Read();
    for (int64_t col = 0; col < 201; ++col) {
      EXPECT_NE(got.at(0, col), 0);
      EXPECT_EQ(got.at(1, col), 0);
      EXPECT_EQ(got.at(298, col), 0);
      EXPECT_NE(got.at(299, col), 0);
    }
  }
}

TEST_P(MemoryTest, NothingIsCopiedOrZeroedOfAnEmptyMatrix) {
  EXPECT_TRUE(backend().Copy(Stream::kCompute, MatrixView(), MatrixView()).ok());
  EXPECT_TRUE(
      backend()
          .Copy(Stream::kCompute, MatrixView(nullptr, 0, 5, DType::kF32), MatrixView(nullptr, 0, 5, DType::kBF16))
          .ok());
  EXPECT_TRUE(backend().Zero(Stream::kCompute, MatrixView()).ok());
}

TEST_P(MemoryTest, ACopyBetweenShapesIsRefused) {
  const DeviceMatrix from(backend(), 2, 3, DType::kF32);
  const DeviceMatrix to(backend(), 3, 2, DType::kF32);
  const absl::Status status = backend().Copy(Stream::kCompute, from.view(), to.view());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(status), Reason::kInvalidShape);
}

TEST_P(MemoryTest, EventsOrderStreams) {
  const Dense values = RandomDense(64, 64, 4);
  const DeviceMatrix a(backend(), values, DType::kF64);
  const DeviceMatrix b(backend(), 64, 64, DType::kF64);
  const DeviceMatrix c(backend(), 64, 64, DType::kF64);
  ASSERT_TRUE(backend().Copy(Stream::kCopyIn, a.view(), b.view()).ok());
  const std::unique_ptr<Event> copied = backend().Record(Stream::kCopyIn).value();
  ASSERT_TRUE(backend().Wait(Stream::kCompute, *copied).ok());
  ASSERT_TRUE(backend().Copy(Stream::kCompute, b.view(), c.view()).ok());
  const std::unique_ptr<Event> computed = backend().Record(Stream::kCompute).value();
  ASSERT_TRUE(backend().Synchronize(*computed).ok());
  EXPECT_EQ(c.Read(), values);
}

INSTANTIATE_TEST_SUITE_P(Backends, MemoryTest, ::testing::ValuesIn(Backends()), BackendName);

}  // namespace
}  // namespace shardmlp::testing
