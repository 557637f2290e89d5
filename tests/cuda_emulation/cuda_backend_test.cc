// What the CUDA backend alone promises, over the emulated devices.
#include "kernels/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/handles.h"
#include "kernels/status.h"
#include "launch.h"
#include "tests/cuda_emulation/emulation.h"
#include "tests/kernels/device_matrix.h"
#include "tests/kernels/layer.h"

namespace shardmlp::testing {
namespace {

using ::testing::HasSubstr;

// Whatever is free on the current device, less `bytes`.
DeviceBlock TakeAllBut(size_t bytes) {
  size_t free_bytes = 0, total_bytes = 0;
  EXPECT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
  void* data = nullptr;
  EXPECT_EQ(cudaMalloc(&data, free_bytes - bytes), cudaSuccess);
  return DeviceBlock(data);
}

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

// 256 bytes each: whatever has been given back, what was planned fits.
TEST_F(CudaBackendTest, WhatIsReservedIsGivenOutInOneBlock) {
  const auto backend = MakeCudaBackend({.memory_bytes = 5000}).value();
  const int64_t objects = emulation::live_object_count();
  ASSERT_TRUE(backend->Reserve(4 * 256 + 512).ok());
  std::vector<Buffer> buffers;
  for (const int64_t bytes : {256, 1, 300, 255, 100}) {
    buffers.push_back(backend->Allocate(Memory::kDevice, bytes).value());
    EXPECT_EQ(buffers.back().bytes(), bytes);
  }
  EXPECT_EQ(emulation::live_object_count(), objects + 1);
  const auto* const begin = static_cast<char*>(buffers[0].data());
  for (const auto& [n, offset] : {std::pair(1, 256), {2, 512}, {3, 1024}, {4, 1280}}) {
    EXPECT_EQ(static_cast<char*>(buffers[static_cast<size_t>(n)].data()) - begin, offset);
  }
  const absl::Status status = backend->Allocate(Memory::kDevice, 1).status();
  EXPECT_EQ(ReasonOf(status), Reason::kOutOfMemory);
  EXPECT_THAT(std::string(status.message()), HasSubstr("256 bytes of device memory: 1536 of 1536 bytes are in use"));
  EXPECT_EQ(ReasonOf(backend->Allocate(Memory::kDevice, std::numeric_limits<int64_t>::max()).status()),
            Reason::kOutOfMemory);
  EXPECT_TRUE(backend->Allocate(Memory::kStaging, 5000).ok()) << "which is of another memory";
  // One that comes and goes finds its place again; two gaps that don't touch are not one.
  for (int i = 0; i < 3; ++i) {
    const void* const place = buffers[2].data();
    buffers[2] = Buffer();
    buffers[2] = backend->Allocate(Memory::kDevice, 400).value();
    EXPECT_EQ(buffers[2].data(), place);
  }
  buffers[1] = Buffer();
  buffers[3] = Buffer();
  EXPECT_THAT(std::string(backend->Allocate(Memory::kDevice, 512).status().message()),
              HasSubstr("1024 of 1536 bytes are in use, and the largest gap has 256"));
  buffers.clear();
  EXPECT_TRUE(backend->Allocate(Memory::kDevice, 1536).ok());
}

TEST_F(CudaBackendTest, MemoryIsReservedOnceAndBeforeAnyIsUsed) {
  const auto backend = MakeCudaBackend({.memory_bytes = 1000}).value();
  EXPECT_EQ(ReasonOf(backend->Reserve(1001)), Reason::kOutOfMemory);
  EXPECT_EQ(backend->Reserve(-1).code(), absl::StatusCode::kInvalidArgument);
  {
    const Buffer early = backend->Allocate(Memory::kDevice, 1).value();
    EXPECT_THAT(std::string(backend->Reserve(256).message()), HasSubstr("1 of 1000 bytes are in use"));
  }
  EXPECT_TRUE(backend->Reserve(256).ok());
  EXPECT_EQ(backend->Reserve(256).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(CudaBackendTest, ItsOwnMemoryIsNotPromised) {
  const auto first = MakeCudaBackend().value();
  EXPECT_LT(first->device().memory_bytes, emulation::kDeviceBytes);
  const Buffer all = first->Allocate(Memory::kDevice, first->device().memory_bytes).value();
  EXPECT_EQ(ReasonOf(first->Allocate(Memory::kDevice, 1).status()), Reason::kOutOfMemory);
  const DeviceBlock rest = TakeAllBut(0);
  EXPECT_EQ(ReasonOf(MakeCudaBackend().status()), Reason::kOutOfMemory) << "the device's own refusal";
}

// The runtime keeps a thread's last error, and gives it to whoever asks next.
TEST_F(CudaBackendTest, WhatWasRefusedIsNotTakenForAFailureOfTheNextLaunch) {
  const auto backend = MakeCudaBackend().value();
  const DeviceBlock rest = TakeAllBut(1 << 20);
  EXPECT_FALSE(MakeCudaBackend().ok());
  const DeviceMatrix a(*backend, Dense(2, 2, 3), DType::kF32), b(*backend, 2, 2, DType::kF64);
  EXPECT_TRUE(backend->Copy(Stream::kCompute, a.view(), b.view()).ok());
  EXPECT_EQ(b.Read(), Dense(2, 2, 3));
  std::vector<float> pageable(4);
  EXPECT_FALSE(backend->Copy(Stream::kCompute, a.view(), MatrixView(pageable.data(), 2, 2, DType::kF32)).ok());
  EXPECT_TRUE(backend->Copy(Stream::kCompute, a.view(), b.view()).ok());
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

// Two rows that lie 2^32 elements apart, of which the pages between are never touched.
TEST_F(CudaBackendTest, IndexesBeyond32Bits) {
  constexpr int64_t kStride = int64_t{1} << 32;
  const auto backend = MakeCudaBackend().value();
  const Buffer memory = backend->Allocate(Memory::kDevice, (kStride + 64) * 4).value();
  const auto far_rows = [&](int64_t begin, int64_t cols) {
    return MatrixView(memory.data(), 2, kStride, kStride, DType::kF32).Cols(begin, cols);
  };
  const auto copy_row = [&](ConstMatrixView from, MatrixView to) {
    ASSERT_TRUE(backend->Copy(Stream::kCompute, from, to).ok());
    Finish(*backend, Stream::kCompute);
  };
  MlpConfig config;
  config.hidden_size = 13;
  config.intermediate_size = 37;
  config.output_size = 7;
  const NaiveMlp mlp = RandomMlp(*backend, config, 1);
  const Dense x = RandomDense(2, 13, 5), dy = RandomDense(2, 7, 6);
  const DeviceMatrix near_x(*backend, x, DType::kF32), near_dy(*backend, dy, DType::kF32);
  const DeviceMatrix near_y(*backend, 2, 7, DType::kF32), near_dx(*backend, 2, 13, DType::kF32);
  for (int64_t row = 0; row < 2; ++row) {
    copy_row(near_x.view().Rows(row, 1), far_rows(0, 13).Rows(row, 1));
    copy_row(near_dy.view().Rows(row, 1), far_rows(16, 7).Rows(row, 1));
  }
  Layer layer(*backend, config, mlp);
  ASSERT_TRUE(layer.Forward(far_rows(0, 13), far_rows(32, 7)).ok());
  ASSERT_TRUE(layer.Backward(far_rows(0, 13), far_rows(16, 7), far_rows(48, 13)).ok());
  for (int64_t row = 0; row < 2; ++row) {
    copy_row(far_rows(32, 7).Rows(row, 1), near_y.view().Rows(row, 1));
    copy_row(far_rows(48, 13).Rows(row, 1), near_dx.view().Rows(row, 1));
  }
  EXPECT_LE(RelativeDifference(near_y.Read(), NaiveForward(mlp, x)), 1e-5);
  EXPECT_LE(RelativeDifference(layer.Gradients(near_dx.Read()), NaiveBackward(mlp, x, dy)), 1e-5);
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
