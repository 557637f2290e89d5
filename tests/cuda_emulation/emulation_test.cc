// The emulation has teeth: each fault that hardware would punish, sometimes, is planted here and seen.
#include "tests/cuda_emulation/emulation.h"

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/handles.h"
#include "launch.h"

namespace shardmlp::emulation {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kCount = 64;
constexpr size_t kBytes = kCount * sizeof(float);

using DeviceFloats = std::unique_ptr<float, Destroy<cudaFree>>;
using PinnedFloats = std::unique_ptr<float, Destroy<cudaFreeHost>>;

DeviceFloats OnDevice(int64_t count = kCount) {
  void* data = nullptr;
  EXPECT_EQ(cudaMalloc(&data, static_cast<size_t>(count) * sizeof(float)), cudaSuccess);
  return DeviceFloats(static_cast<float*>(data));
}

PinnedFloats Pinned(float value) {
  void* data = nullptr;
  EXPECT_EQ(cudaHostAlloc(&data, kBytes, cudaHostAllocPortable), cudaSuccess);
  std::fill_n(static_cast<float*>(data), kCount, value);
  return PinnedFloats(static_cast<float*>(data));
}

// to[i] = 2 from[i]
struct Double {
  Double(const float* from, float* to) : from(DeviceAddress(from)), to(DeviceAddress(to)) {}
  void operator()(int64_t /*row*/, int64_t i) const { to[i] = 2 * from[i]; }
  const float* from;
  float* to;
};

// Reads 16 bytes at `from`.
struct ReadChunk {
  struct Chunk {
    float at[4];
  };
  void operator()(int64_t /*row*/, int64_t /*unit*/) const { *to = Load16<Chunk>(from).at[0]; }
  const float* from;
  float* to;
};

class EmulationTest : public ::testing::Test {
 protected:
  EmulationTest() {
    SetSeed(0);
    cudaSetDevice(0);
    stream_ = MakeStream().value();
    other_ = MakeStream().value();
  }
  ~EmulationTest() override {
    Reset();
    stream_.reset();
    other_.reset();
    EXPECT_EQ(live_object_count(), 0);
  }

  cudaError_t Copy(float* to, const float* from, const StreamHandle& stream) {
    return cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDefault, stream.get());
  }
  // The device fails with `error`, in words that have `fault`, and then at every call.
  void ExpectBroken(cudaError_t error, const std::string& fault) {
    EXPECT_EQ(cudaStreamSynchronize(stream_.get()), error);
    void* data = nullptr;
    EXPECT_EQ(cudaMalloc(&data, 1), error);
    EXPECT_EQ(cudaStreamSynchronize(other_.get()), error);
    const std::vector<std::string> faults = TakeFaults();
    ASSERT_FALSE(faults.empty());
    EXPECT_THAT(faults.front(), HasSubstr(fault));
    Reset();
    EXPECT_EQ(cudaStreamSynchronize(stream_.get()), cudaSuccess);
  }
  // c [2, 3] = a [2, 4] b [4, 3], column-major, with these leading dimensions.
  cublasStatus_t Multiply(const float* a, int64_t lda, const float* b, float* c) {
    const CublasHandle cublas = MakeCublas().value();
    EXPECT_EQ(cublasSetStream(cublas.get(), stream_.get()), CUBLAS_STATUS_SUCCESS);
    const float one = 1, zero = 0;
    return cublasGemmEx_64(cublas.get(), CUBLAS_OP_N, CUBLAS_OP_N, 2, 3, 4, &one, a, CUDA_R_32F, lda, b, CUDA_R_32F, 4,
                           &zero, c, CUDA_R_32F, 2, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  }

  StreamHandle stream_, other_;
};

using EmulationDeathTest = EmulationTest;

TEST_F(EmulationDeathTest, TheHostMayNotTouchDeviceMemory) {
  const DeviceFloats device = OnDevice();
  EXPECT_DEATH(*device = 1, "host code touched device memory");
  EXPECT_DEATH(std::fprintf(stderr, "%f", *device), "host code touched device memory");
}

TEST_F(EmulationDeathTest, TheHostMayNotTouchFreedPinnedMemory) {
  PinnedFloats pinned = Pinned(1);
  float* const data = pinned.get();
  EXPECT_EQ(data[kCount - 1], 1);
  pinned.reset();
  EXPECT_DEATH(*data = 1, "host code touched pinned memory");
}

TEST_F(EmulationTest, AKernelOnHostMemoryBreaksTheDevice) {
  std::vector<float> host(kCount);
  const DeviceFloats device = OnDevice();
  Launch(stream_.get(), 1, kCount, Double(host.data(), device.get()));
  ExpectBroken(cudaErrorIllegalAddress, "pageable host memory");
}

TEST_F(EmulationTest, AProductOfHostMemoryBreaksTheDevice) {
  const std::vector<float> host(8);
  const DeviceFloats b = OnDevice(12), c = OnDevice(6);
  Multiply(host.data(), 2, b.get(), c.get());
  ExpectBroken(cudaErrorIllegalAddress, "cublasGemmEx's A: pageable host memory");
}

TEST_F(EmulationTest, ACopyOfPageableMemoryIsRefused) {
  std::vector<float> host(kCount);
  const DeviceFloats device = OnDevice();
  EXPECT_EQ(Copy(device.get(), host.data(), stream_), cudaErrorInvalidValue);
  EXPECT_EQ(Copy(host.data(), device.get(), stream_), cudaErrorInvalidValue);
  EXPECT_THAT(TakeFaults(), ElementsAre(HasSubstr("pageable"), HasSubstr("pageable")));
}

TEST_F(EmulationTest, AKernelBeyondAnAllocationBreaksTheDevice) {
  const DeviceFloats from = OnDevice(), to = OnDevice();
  Launch(stream_.get(), 1, kCount + 1, Double(from.get(), to.get()));
  ExpectBroken(cudaErrorIllegalAddress, "touched what is no memory");
}

TEST_F(EmulationTest, ACopyBeyondAnAllocationIsRefused) {
  const DeviceFloats from = OnDevice(kCount - 1), to = OnDevice();
  EXPECT_EQ(Copy(to.get(), from.get(), stream_), cudaErrorInvalidValue);
  EXPECT_THAT(TakeFaults(), ElementsAre(HasSubstr("beyond an allocation's end")));
}

TEST_F(EmulationTest, MemoryThatIsFreedBeforeTheStreamGotThereBreaksTheDevice) {
  {
    const DeviceFloats from = OnDevice();
    DeviceFloats to = OnDevice();
    Launch(stream_.get(), 1, kCount, Double(from.get(), to.get()));
    to.reset();
    ExpectBroken(cudaErrorIllegalAddress, "touched what is no memory");
  }
  {
    const DeviceFloats to = OnDevice();
    PinnedFloats from = Pinned(1);
    EXPECT_EQ(Copy(to.get(), from.get(), stream_), cudaSuccess);
    from.reset();
    ExpectBroken(cudaErrorIllegalAddress, "freed memory");
  }
  {
    const DeviceFloats a = OnDevice(), b = OnDevice();
    DeviceFloats c = OnDevice();
    EXPECT_EQ(Multiply(a.get(), 2, b.get(), c.get()), CUBLAS_STATUS_SUCCESS);
    c.reset();
    ExpectBroken(cudaErrorIllegalAddress, "cublasGemmEx's C: freed memory");
  }
}

TEST_F(EmulationTest, AnAccessOf16BytesThatIsNotAlignedBreaksTheDevice) {
  const DeviceFloats from = OnDevice(), to = OnDevice();
  Launch(stream_.get(), 1, 1, ReadChunk{from.get() + 4, to.get()});
  EXPECT_EQ(cudaStreamSynchronize(stream_.get()), cudaSuccess);
  Launch(stream_.get(), 1, 1, ReadChunk{from.get() + 5, to.get()});
  ExpectBroken(cudaErrorMisalignedAddress, "not aligned");
}

TEST_F(EmulationTest, AWrongLeadingDimensionIsSeen) {
  const DeviceFloats a = OnDevice(8), b = OnDevice(12), c = OnDevice(6);
  EXPECT_EQ(Multiply(a.get(), 1, b.get(), c.get()), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_THAT(TakeFaults(), ElementsAre(HasSubstr("a leading dimension of 1 for a matrix of 2 rows")));
  EXPECT_EQ(Multiply(a.get(), 2, b.get(), c.get()), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(cudaStreamSynchronize(stream_.get()), cudaSuccess);
  Multiply(a.get(), 3, b.get(), c.get());
  ExpectBroken(cudaErrorIllegalAddress, "cublasGemmEx's A: freed memory, or beyond");
}

TEST_F(EmulationTest, WhatWasNotWaitedForHasNotHappened) {
  const DeviceFloats device = OnDevice();
  const PinnedFloats in = Pinned(3), out = Pinned(-1);
  ASSERT_EQ(Copy(device.get(), in.get(), stream_), cudaSuccess);
  ASSERT_EQ(Copy(out.get(), device.get(), stream_), cudaSuccess);
  EXPECT_EQ(*out, -1) << "read too soon";
  *in = 4;  // overwritten too soon
  EXPECT_EQ(cudaStreamSynchronize(stream_.get()), cudaSuccess);
  EXPECT_EQ(*out, 4);
  EXPECT_EQ(out.get()[1], 3);
}

// Whether out = 2 in, by a copy on one stream, a kernel on the other and a copy back, with or without the two events.
bool TwoStreamsAreRight(const StreamHandle& copies, const StreamHandle& kernels, bool first_event, bool second_event) {
  const DeviceFloats from = OnDevice(), to = OnDevice();
  const PinnedFloats in = Pinned(3), out = Pinned(-1);
  const EventHandle copied = MakeEvent(cudaEventDisableTiming).value(), computed = MakeEvent(0).value();
  cudaMemcpyAsync(from.get(), in.get(), kBytes, cudaMemcpyDefault, copies.get());
  cudaEventRecord(copied.get(), copies.get());
  if (first_event) cudaStreamWaitEvent(kernels.get(), copied.get(), 0);
  Launch(kernels.get(), 1, kCount, Double(from.get(), to.get()));
  cudaEventRecord(computed.get(), kernels.get());
  if (second_event) cudaStreamWaitEvent(copies.get(), computed.get(), 0);
  cudaMemcpyAsync(out.get(), to.get(), kBytes, cudaMemcpyDefault, copies.get());
  EXPECT_EQ(cudaStreamSynchronize(copies.get()), cudaSuccess);
  const bool right = *out == 6 && out.get()[kCount - 1] == 6;
  EXPECT_EQ(cudaStreamSynchronize(kernels.get()), cudaSuccess);
  return right;
}

TEST_F(EmulationTest, StreamsThatNoEventOrdersRunInAnyOrder) {
  int right[2][2] = {};
  constexpr uint64_t kSeeds = 40;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (const bool first : {false, true}) {
      for (const bool second : {false, true}) {
        SetSeed(seed);
        right[first][second] += TwoStreamsAreRight(stream_, other_, first, second) ? 1 : 0;
      }
    }
  }
  EXPECT_EQ(right[1][1], static_cast<int>(kSeeds));
  for (const int some : {right[0][0], right[0][1], right[1][0]}) {
    EXPECT_LT(some, static_cast<int>(kSeeds));
    EXPECT_GT(some, 0) << "by luck, as on hardware";
  }
}

TEST_F(EmulationTest, ASeedIsAlwaysTheSameOrder) {
  std::vector<bool> first, second;
  for (std::vector<bool>* right : {&first, &second}) {
    SetSeed(7);
    for (int i = 0; i < 50; ++i) right->push_back(TwoStreamsAreRight(stream_, other_, false, false));
  }
  EXPECT_EQ(first, second);
  EXPECT_THAT(first, Not(::testing::Each(first.front())));
}

TEST_F(EmulationTest, MemoryBeginsAsNan) {
  const DeviceFloats device = OnDevice();
  const PinnedFloats out = Pinned(1);
  ASSERT_EQ(Copy(out.get(), device.get(), stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_.get()), cudaSuccess);
  EXPECT_TRUE(std::isnan(*out));
}

TEST_F(EmulationTest, AnotherDevicesStreamAndMemoryAreRefused) {
  const DeviceFloats from = OnDevice();
  cudaSetDevice(1);
  const DeviceFloats to = OnDevice();
  EXPECT_EQ(Launch(stream_.get(), 1, 1, Double(to.get(), to.get())), cudaErrorInvalidResourceHandle);
  cudaSetDevice(0);
  EXPECT_EQ(Copy(to.get(), from.get(), stream_), cudaErrorInvalidValue);
  EXPECT_THAT(TakeFaults(), ElementsAre(HasSubstr("not a stream of the current device"), HasSubstr("another device")));
}

TEST_F(EmulationTest, WhatIsFreedMustBeAnAllocation) {
  DeviceFloats device = OnDevice();
  PinnedFloats pinned = Pinned(0);
  EXPECT_EQ(cudaFree(device.get() + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(pinned.get()), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeHost(device.get()), cudaErrorInvalidValue);
  float* const data = device.get();
  device.reset();
  EXPECT_EQ(cudaFree(data), cudaErrorInvalidValue);
  EXPECT_EQ(TakeFaults().size(), 4u);
}

TEST_F(EmulationTest, WhatIsNotDestroyedIsCounted) {
  const int64_t before = live_object_count();
  const DeviceFloats device = OnDevice();
  const EventHandle event = MakeEvent(0).value();
  const CublasHandle cublas = MakeCublas().value();
  EXPECT_EQ(live_object_count(), before + 3);
}

TEST_F(EmulationTest, ADeviceGivesNoMoreThanItHas) {
  size_t free_bytes = 0, total_bytes = 0;
  ASSERT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
  void* data = nullptr;
  EXPECT_EQ(cudaMalloc(&data, free_bytes + 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaMalloc(&data, 1), cudaSuccess) << "which is no failure of the device";
  EXPECT_EQ(cudaFree(data), cudaSuccess);
}

}  // namespace
}  // namespace shardmlp::emulation
