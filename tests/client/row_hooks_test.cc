// Rows that are put in place, and taken away, while the call runs.
#include "client/cpp/row_hooks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "tests/client/connected.h"
#include "tests/client/fake_server.h"
#include "tests/client/matrix_data.h"

namespace shardmlp {
namespace {

using fake::Connected;
using fake::ExpectBackward;
using fake::FakeModel;
using fake::FakeServer;
using fake::MatrixData;

constexpr int64_t kHidden = 6;
constexpr int64_t kOutput = 4;
constexpr int64_t kRows = 40;

fake::FakeServerOptions SmallShards() {
  fake::FakeServerOptions options{.model = FakeModel()};
  options.model.mutable_limits()->set_preferred_shard_bytes(200);
  return options;
}

// A device's [kRows, cols] f32 rows, and the host memory that they are copied to when asked for.
class DeviceRows {
 public:
  explicit DeviceRows(int64_t cols, uint32_t seed) : device(kRows, cols, DType::kF32), host(kRows, cols, DType::kF32) {
    device.Fill(seed);
  }
  void CopyUpTo(int64_t row_end) { std::memcpy(&host.at(0, 0), &device.at(0, 0), row_end * device.row_bytes()); }

  MatrixData device;
  MatrixData host;
};

class RowHooksTest : public testing::Test {
 protected:
  absl::Status Backward(const RowHooks& hooks) {
    return connected_.session->Backward(0, 11, x_.host.view(), dy_.host.view(), dx_.view(), {.hooks = hooks});
  }
  absl::Status Copy(int64_t row_end) {
    x_.CopyUpTo(row_end);
    dy_.CopyUpTo(row_end);
    return absl::OkStatus();
  }

  FakeServer server_{SmallShards()};
  Connected connected_{server_.target()};
  DeviceRows x_{kHidden, 1};
  DeviceRows dy_{kOutput, 2};
  MatrixData dx_{kRows, kHidden, DType::kF32};
};

TEST_F(RowHooksTest, ShardsGoWhenTheirRowsAreInPlaceAndNotAllAtTheEnd) {
  absl::Notification first_shard_arrived;
  server_.SetHook([&](const fake::Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method == "Backward" && moment.message == 1) first_shard_arrived.Notify();
    return std::nullopt;
  });
  std::vector<int64_t> asked;
  const absl::Status status = Backward({.await_inputs = [&](int64_t row_end) {
    // The last rows come only once the first have arrived.
    if (row_end == kRows) first_shard_arrived.WaitForNotification();
    asked.push_back(row_end);
    return Copy(row_end);
  }});
  ASSERT_TRUE(status.ok()) << status;
  ExpectBackward(x_.device, dy_.device, dx_);
  EXPECT_EQ(server_.counted_rows(), kRows);
  EXPECT_GT(asked.size(), 2);
  EXPECT_TRUE(std::is_sorted(asked.begin(), asked.end()));
}

TEST_F(RowHooksTest, ResultsAreToldOfAsTheyArriveAndFromZeroInEachTry) {
  server_.SetHook([&](const fake::Moment& moment) -> std::optional<grpc::Status> {
    // The first try ends in the middle of its answer: after the header, the shards and an end, results are written.
    if (moment.method != "Backward" || moment.try_number > 0 || moment.message < 8) return std::nullopt;
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "cut");
  });
  MatrixData taken(kRows, kHidden, DType::kF32);
  std::vector<int64_t> told;
  const absl::Status status = Backward({.await_inputs = [&](int64_t row_end) { return Copy(row_end); },
                                        .output_arrived =
                                            [&](int64_t row_end) {
                                              told.push_back(row_end);
                                              std::memcpy(&taken.at(0, 0), &dx_.at(0, 0), row_end * dx_.row_bytes());
                                              return absl::OkStatus();
                                            }});
  ASSERT_TRUE(status.ok()) << status;
  ExpectBackward(x_.device, dy_.device, taken);
  EXPECT_EQ(told.front(), 0);
  EXPECT_EQ(told.back(), kRows);
  EXPECT_EQ(std::count(told.begin(), told.end(), 0), 2) << "one for each try";
  EXPECT_EQ(server_.Count("Backward"), 2);
}

TEST_F(RowHooksTest, AHookThatFailsEndsTheCall) {
  const absl::Status broken = absl::InternalError("the device is gone");
  const auto ends_the_call = [&](const RowHooks& hooks) {
    const absl::Status status = Backward(hooks);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_EQ(status.message(), "Backward of layer 0: the device is gone");
  };
  ends_the_call({.await_inputs = [&](int64_t row_end) { return row_end < kRows ? Copy(row_end) : broken; }});
  ends_the_call({.await_inputs = [&](int64_t) { return broken; }});
  ASSERT_TRUE(Copy(kRows).ok());
  ends_the_call({.output_arrived = [&](int64_t row_end) { return row_end > 0 ? broken : absl::OkStatus(); }});
  EXPECT_EQ(connected_.session->pending_row_count(), 0);
  ASSERT_TRUE(Backward({}).ok());
  ExpectBackward(x_.device, dy_.device, dx_);
}

TEST_F(RowHooksTest, AServerThatRefusesWhileRowsAreStillToComeIsHeard) {
  server_.SetHook([&](const fake::Moment& moment) -> std::optional<grpc::Status> {
    if (moment.method != "Backward") return std::nullopt;
    return fake::Refuse(absl::StatusCode::kFailedPrecondition, Reason::kStaleWeights, "other weights");
  });
  const absl::Status status = Backward({.await_inputs = [&](int64_t row_end) { return Copy(row_end); }});
  EXPECT_EQ(ReasonOf(status), Reason::kStaleWeights);
}

}  // namespace
}  // namespace shardmlp
