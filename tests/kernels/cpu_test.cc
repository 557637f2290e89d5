// What the CPU backend alone promises.
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/status.h"

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

}  // namespace
}  // namespace shardmlp::testing
