// What the CPU backend alone promises.
#include <sys/mman.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/mlp.h"
#include "kernels/status.h"
#include "tests/kernels/dense.h"
#include "tests/kernels/layer.h"

namespace shardmlp::testing {
namespace {

TEST(CpuBackendTest, DescribesItself) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = 3, .memory_bytes = 1000}).value();
  EXPECT_THAT(backend->device().name, ::testing::HasSubstr("3 threads"));
  EXPECT_EQ(backend->device().memory_bytes, 1000);
  EXPECT_TRUE(backend->device().unified_memory);
  EXPECT_TRUE(backend->Computes(DType::kF32));
  EXPECT_TRUE(backend->Computes(DType::kF64));
  EXPECT_FALSE(backend->Computes(DType::kF16));
}

TEST(CpuBackendTest, CountsWhatItGaveOutAgainstItsLimit) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend({.memory_bytes = 1000}).value();
  Buffer first = backend->Allocate(Memory::kDevice, 600).value();
  const absl::Status status = backend->Allocate(Memory::kStaging, 401).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), Reason::kOutOfMemory);
  EXPECT_THAT(std::string(status.message()),
              ::testing::AllOf(::testing::HasSubstr("401"), ::testing::HasSubstr("600"), ::testing::HasSubstr("1000")));
  EXPECT_TRUE(backend->Allocate(Memory::kStaging, 400).ok());
  Buffer moved = std::move(first);
  EXPECT_FALSE(backend->Allocate(Memory::kStaging, 401).ok());
  moved = Buffer();
  EXPECT_TRUE(backend->Allocate(Memory::kStaging, 1000).ok());
}

TEST(CpuBackendTest, WhatIsReservedIsNotTaken) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend({.memory_bytes = 1000}).value();
  EXPECT_TRUE(backend->Reserve(1000).ok());
  EXPECT_TRUE(backend->Allocate(Memory::kStaging, 1000).ok());
  const Buffer used = backend->Allocate(Memory::kDevice, 1).value();
  EXPECT_EQ(ReasonOf(backend->Reserve(1000)), Reason::kOutOfMemory);
}

TEST(CpuBackendTest, FindsTheMachinesMemoryByItself) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend().value();
  EXPECT_GT(backend->device().memory_bytes, int64_t{64} << 20);
  EXPECT_LT(backend->device().memory_bytes, int64_t{1} << 50);
}

TEST(CpuBackendTest, NegativeOptionsAreRefused) {
  EXPECT_EQ(MakeCpuBackend({.threads = -1}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MakeCpuBackend({.memory_bytes = -1}).status().code(), absl::StatusCode::kInvalidArgument);
  const std::unique_ptr<Backend> backend = MakeCpuBackend().value();
  EXPECT_EQ(backend->Allocate(Memory::kDevice, -1).status().code(), absl::StatusCode::kInvalidArgument);
}

// [2, cols] f32 as the ends of a matrix of 2^32 elements have them: the second row lies 2^32 elements behind the first.
// The pages between are never touched, and take no memory.
class FarRows {
 public:
  explicit FarRows(int64_t cols) : cols_(cols) {
    data_ = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EXPECT_NE(data_, MAP_FAILED);
  }
  explicit FarRows(const Dense& values) : FarRows(values.cols) {
    for (int64_t row = 0; row < 2; ++row) {
      for (int64_t col = 0; col < cols_; ++col) at(row, col) = static_cast<float>(values.at(row, col));
    }
  }
  ~FarRows() { munmap(data_, kBytes); }
  FarRows(const FarRows&) = delete;
  FarRows& operator=(const FarRows&) = delete;

  MatrixView view() const { return {data_, 2, cols_, kStride, DType::kF32}; }
  Dense Read() const {
    Dense values(2, cols_);
    for (int64_t row = 0; row < 2; ++row) {
      for (int64_t col = 0; col < cols_; ++col) values.at(row, col) = at(row, col);
    }
    return values;
  }

 private:
  static constexpr int64_t kStride = int64_t{1} << 32;
  static constexpr size_t kBytes = (kStride + 4096) * sizeof(float);
  float& at(int64_t row, int64_t col) const { return static_cast<float*>(data_)[row * kStride + col]; }

  void* data_;
  int64_t cols_;
};

// Case: an output of 2^32 elements (axolotl 3667).
TEST(CpuBackendTest, IndexesBeyond32Bits) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend().value();
  MlpConfig config;
  config.hidden_size = 13;
  config.intermediate_size = 37;
  config.output_size = 7;
  const NaiveMlp mlp = RandomMlp(*backend, config, 1);
  const Dense x = RandomDense(2, 13, 5), dy = RandomDense(2, 7, 6);
  const FarRows far_x(x), far_dy(dy), far_y(7), far_dx(13);
  Layer layer(*backend, config, mlp);
  ASSERT_TRUE(layer.Forward(far_x.view(), far_y.view()).ok());
  ASSERT_TRUE(layer.Backward(far_x.view(), far_dy.view(), far_dx.view()).ok());
  EXPECT_LE(RelativeDifference(far_y.Read(), NaiveForward(mlp, x)), 1e-5);
  EXPECT_LE(RelativeDifference(layer.Gradients(far_dx.Read()), NaiveBackward(mlp, x, dy)), 1e-5);
}

}  // namespace
}  // namespace shardmlp::testing
