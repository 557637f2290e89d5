// Which device a server opens, with a GPU and without.
#include "server/device.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(DeviceTest, TheCpuTakesItsThreadsAndMemory) {
  const auto backend = OpenDevice({.kind = DeviceKind::kCpu, .threads = 2, .memory_bytes = 1000}).value();
  EXPECT_THAT(backend->device().name, AllOf(StartsWith("cpu"), HasSubstr("2 threads")));
  EXPECT_EQ(backend->device().memory_bytes, 1000);
  EXPECT_EQ(backend->device().host_bytes, 1000);
}

TEST(DeviceTest, AutoIsAGpuWhereThereIsOne) {
  const auto backend = OpenDevice({}).value();
  EXPECT_THAT(backend->device().name, StartsWith(CudaDeviceCount() > 0 ? "cuda:0" : "cpu"));
}

TEST(DeviceTest, AGpuThatIsNotThereIsRefusedByName) {
  const absl::Status status = OpenDevice({.kind = DeviceKind::kCuda, .gpu = CudaDeviceCount()}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(status), Reason::kDeviceFailed);
  EXPECT_THAT(std::string(status.message()), AnyOf(HasSubstr("no GPU"), HasSubstr("no CUDA in this program")));
}

}  // namespace
}  // namespace shardmlp
