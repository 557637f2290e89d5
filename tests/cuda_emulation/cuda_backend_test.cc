// What the CUDA backend alone promises, over the emulated devices.
#include "kernels/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/handles.h"
#include "kernels/status.h"
#include "launch.h"
#include "tests/cuda_emulation/emulation.h"
#include "tests/kernels/device_matrix.h"

namespace shardmlp::testing {
namespace {

using ::testing::HasSubstr;

class CudaBackendTest : public ::testing::Test {
 protected:
  CudaBackendTest() { emulation::SetSeed(3); }
  ~CudaBackendTest() override {
    emulation::Reset();
    EXPECT_EQ(emulation::live_object_count(), 0);
  }

  static void ExpectRefused(const CudaBackendOptions& options, absl::StatusCode code, const std::string& words) {
    const absl::Status status = MakeCudaBackend(options).status();
    EXPECT_EQ(status.code(), code);
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  }
};

TEST_F(CudaBackendTest, DescribesItself) {
  EXPECT_EQ(CudaDeviceCount(), emulation::kDeviceCount);
  const auto backend = MakeCudaBackend({.device = 1, .memory_bytes = 1000}).value();
  EXPECT_THAT(backend->device().name, HasSubstr("cuda:1 (emulated, sm_90"));
  EXPECT_EQ(backend->device().memory_bytes, 1000);
  EXPECT_FALSE(backend->device().unified_memory);
  EXPECT_GT(backend->device().host_bytes, int64_t{64} << 20);
  EXPECT_TRUE(backend->Computes(DType::kBF16));
  EXPECT_TRUE(backend->Computes(DType::kF64));
  EXPECT_FALSE(backend->Computes(DType::kF16));
}

TEST_F(CudaBackendTest, ADeviceThatIsNotThereIsRefused) {
  ExpectRefused({.device = 4}, absl::StatusCode::kFailedPrecondition, "no GPU 4: the process sees 4");
  ExpectRefused({.device = -1}, absl::StatusCode::kInvalidArgument, "device -1");
  ExpectRefused({.memory_bytes = -1}, absl::StatusCode::kInvalidArgument, "-1 bytes");
}

TEST_F(CudaBackendTest, CountsEachMemoryAgainstItsOwnLimit) {
  const auto backend = MakeCudaBackend({.memory_bytes = 1000, .host_bytes = 500}).value();
  Buffer device = backend->Allocate(Memory::kDevice, 600).value();
  const Buffer staging = backend->Allocate(Memory::kStaging, 500).value();
  const absl::Status status = backend->Allocate(Memory::kDevice, 401).status();
  EXPECT_EQ(ReasonOf(status), Reason::kOutOfMemory);
  EXPECT_THAT(std::string(status.message()), HasSubstr("401 bytes of device memory: 600 of 1000 bytes are in use"));
  EXPECT_EQ(ReasonOf(backend->Allocate(Memory::kStaging, 1).status()), Reason::kOutOfMemory);
  device = Buffer();
  EXPECT_TRUE(backend->Allocate(Memory::kDevice, 1000).ok());
}

TEST_F(CudaBackendTest, ItsOwnMemoryIsNotPromised) {
  const auto first = MakeCudaBackend().value();
  EXPECT_LT(first->device().memory_bytes, emulation::kDeviceBytes);
  const Buffer all = first->Allocate(Memory::kDevice, first->device().memory_bytes).value();
  EXPECT_EQ(ReasonOf(first->Allocate(Memory::kDevice, 1).status()), Reason::kOutOfMemory);
  const auto second = MakeCudaBackend().value();
  EXPECT_EQ(ReasonOf(MakeCudaBackend().status()), Reason::kOutOfMemory) << "the device's own refusal";
}

// The runtime keeps a thread's last error, and gives it to whoever asks next.
TEST_F(CudaBackendTest, WhatWasRefusedIsNotTakenForAFailureOfTheNextLaunch) {
  const auto first = MakeCudaBackend().value();
  const Buffer all = first->Allocate(Memory::kDevice, first->device().memory_bytes).value();
  const auto second = MakeCudaBackend().value();
  EXPECT_FALSE(MakeCudaBackend().ok());
  const DeviceMatrix a(*second, Dense(2, 2, 3), DType::kF32), b(*second, 2, 2, DType::kF64);
  EXPECT_TRUE(second->Copy(Stream::kCompute, a.view(), b.view()).ok());
  EXPECT_EQ(b.Read(), Dense(2, 2, 3));
  std::vector<float> pageable(4);
  EXPECT_FALSE(second->Copy(Stream::kCompute, a.view(), MatrixView(pageable.data(), 2, 2, DType::kF32)).ok());
  EXPECT_TRUE(second->Copy(Stream::kCompute, a.view(), b.view()).ok());
}

// 1 + 2^-12 has 12 bits, of which TF32 keeps 10.
TEST_F(CudaBackendTest, F32ProductsAreInF32UnlessTf32IsAskedFor) {
  for (const bool tf32 : {false, true}) {
    const auto backend = MakeCudaBackend({.tf32 = tf32}).value();
    const double x = 1 + 0x1p-12;
    const DeviceMatrix a(*backend, Dense(2, 2, x), DType::kF32), b(*backend, Dense(2, 2, 1), DType::kF32);
    const DeviceMatrix c(*backend, 2, 2, DType::kF32);
    ASSERT_TRUE(backend->MatMul({.a = a.view(), .b = b.view(), .c = c.view()}).ok());
    EXPECT_EQ(c.Read(), Dense(2, 2, tf32 ? 2 : 2 * x));
  }
}

// Writes where there is no memory.
struct Stray {
  void operator()(int64_t /*row*/, int64_t /*unit*/) const { *address = 1; }
  char* address = reinterpret_cast<char*>(8);
};

TEST_F(CudaBackendTest, AFailureOfTheDeviceIsReportedByWhatWaitsAndByEverythingAfter) {
  const auto backend = MakeCudaBackend().value();
  const DeviceMatrix m(*backend, Dense(2, 2, 1), DType::kF32);
  const auto before = backend->Record(Stream::kCompute).value();
  ASSERT_TRUE(backend->Synchronize(*before).ok());
  const StreamHandle stream = MakeStream().value();
  Launch(stream.get(), 1, 1, Stray());
  EXPECT_EQ(cudaStreamSynchronize(stream.get()), cudaErrorIllegalAddress);
  const auto failed = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_EQ(ReasonOf(status), Reason::kDeviceFailed);
    EXPECT_THAT(std::string(status.message()), HasSubstr("cudaErrorIllegalAddress"));
  };
  failed(backend->Synchronize(*before));
  failed(backend->Zero(Stream::kCompute, m.view()));
  failed(backend->Copy(Stream::kCopyIn, m.view(), m.view()));
  failed(backend->AddColumnSums(m.view(), m.view().Rows(0, 1)));
  failed(backend->Record(Stream::kCopyOut).status());
  failed(backend->Allocate(Memory::kDevice, 1).status());
  emulation::Reset();  // or `m` could not be given back
}

}  // namespace
}  // namespace shardmlp::testing
