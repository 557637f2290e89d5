#include "server/engine/lane.h"

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/lazy_device.h"
#include "tests/engine/outcome.h"

namespace shardmlp::testing {
namespace {

constexpr int64_t kTileRows = 4;

LayerSpec Layer(int64_t hidden, int64_t output, DType dtype) {
  LayerSpec layer;
  layer.mlp.hidden_size = hidden;
  layer.mlp.intermediate_size = 100;  // takes no staging
  layer.mlp.output_size = output;
  layer.mlp.dtype = dtype;
  return layer;
}

std::shared_ptr<LanePool> Pool(std::shared_ptr<Backend> device, const std::vector<LayerSpec>& layers, int64_t lanes) {
  return LanePool::Create(std::move(device), layers, kTileRows, lanes, lanes / 2).value();
}

TEST(LaneTest, ALaneHoldsTwoTilesInAndTwoOutInTheWidestDTypeOfTheWire) {
  auto device = std::make_shared<LazyDevice>();
  const auto pool = Pool(device, {Layer(6, 5, DType::kBF16)}, 1);
  const std::shared_ptr<Lane> lane = pool->Acquire(SessionRole::kTrain).value();
  ASSERT_EQ(lane->inputs.size(), 2u);
  ASSERT_EQ(lane->outputs.size(), 2u);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(lane->inputs[i].x.bytes(), 4 * 6 * 4);
    EXPECT_EQ(lane->inputs[i].dy.bytes(), 4 * 5 * 4);
    EXPECT_EQ(lane->outputs[i].bytes(), 4 * 6 * 4) << "y [4, 5] or dx [4, 6]";
  }
  EXPECT_EQ(device->peak_bytes(Memory::kStaging), 2 * (96 + 80 + 96));
  EXPECT_EQ(device->peak_bytes(Memory::kDevice), 0);
}

TEST(LaneTest, ALaneFitsEveryLayer) {
  auto device = std::make_shared<LazyDevice>();
  const auto pool = Pool(device, {Layer(6, 5, DType::kF64), Layer(2, 9, DType::kF64)}, 1);
  const std::shared_ptr<Lane> lane = pool->Acquire(SessionRole::kTrain).value();
  EXPECT_EQ(lane->inputs[0].x.bytes(), 4 * 6 * 8);
  EXPECT_EQ(lane->inputs[0].dy.bytes(), 4 * 9 * 8);
  EXPECT_EQ(lane->outputs[0].bytes(), 4 * 9 * 8);
}

TEST(LaneTest, NoMoreLanesThanCalls) {
  const auto pool = Pool(std::make_shared<LazyDevice>(), {Layer(6, 5, DType::kF32)}, 2);
  std::shared_ptr<Lane> first = pool->Acquire(SessionRole::kTrain).value();
  const std::shared_ptr<Lane> second = pool->Acquire(SessionRole::kTrain).value();
  EXPECT_NE(first, second);
  EXPECT_EQ(pool->lanes_in_use(), 2);
  EXPECT_TRUE(Fails(pool->Acquire(SessionRole::kTrain), absl::StatusCode::kResourceExhausted, Reason::kOverloaded,
                    {"all 2 calls"}));
  const std::shared_ptr<Lane> result_being_sent = first;
  first.reset();
  EXPECT_FALSE(pool->Acquire(SessionRole::kTrain).ok()) << "it goes back with its last owner";
  EXPECT_EQ(pool->lanes_in_use(), 2);
}

TEST(LaneTest, ReadersLeaveTrainersTheirHalf) {
  const auto pool = Pool(std::make_shared<LazyDevice>(), {Layer(6, 5, DType::kF32)}, 5);
  std::vector<std::shared_ptr<Lane>> readers, trainers;
  for (int i = 0; i < 2; ++i) readers.push_back(pool->Acquire(SessionRole::kRead).value());
  EXPECT_TRUE(Fails(pool->Acquire(SessionRole::kRead), absl::StatusCode::kResourceExhausted, Reason::kOverloaded,
                    {"all 2 calls that readers may have", "of 5"}));
  for (int i = 0; i < 3; ++i) trainers.push_back(pool->Acquire(SessionRole::kTrain).value());
  readers.pop_back();
  trainers.pop_back();
  EXPECT_TRUE(Succeeds(pool->Acquire(SessionRole::kRead)));
  for (int i = 0; i < 2; ++i) trainers.push_back(pool->Acquire(SessionRole::kTrain).value());
  EXPECT_TRUE(Fails(pool->Acquire(SessionRole::kRead), absl::StatusCode::kResourceExhausted, Reason::kOverloaded,
                    {"all 5 calls"}))
      << "trainers may have all that readers leave";
}

TEST(LaneTest, AllMemoryIsTakenAtOnceAndNoneLater) {
  auto device = std::make_shared<LazyDevice>();
  const auto pool = Pool(device, {Layer(6, 5, DType::kF32)}, 8);
  const int64_t allocated = device->allocation_count();
  EXPECT_EQ(device->peak_bytes(Memory::kStaging), 8 * 2 * (96 + 80 + 96));
  std::vector<std::shared_ptr<Lane>> lanes;
  for (int i = 0; i < 8; ++i) lanes.push_back(pool->Acquire(SessionRole::kTrain).value());
  lanes.clear();
  EXPECT_EQ(pool->lanes_in_use(), 0);
  EXPECT_TRUE(Succeeds(pool->Acquire(SessionRole::kTrain)));
  EXPECT_EQ(device->allocation_count(), allocated) << "pinned memory takes long to get, and calls start under a lock";
}

TEST(LaneTest, ALaneMayOutliveItsPool) {
  std::shared_ptr<Lane> lane;
  {
    auto pool = Pool(std::make_shared<LazyDevice>(), {Layer(6, 5, DType::kF32)}, 1);
    lane = pool->Acquire(SessionRole::kTrain).value();
  }
  static_cast<char*>(lane->outputs[1].data())[0] = 1;
}

TEST(LaneTest, ThreadsShareThePool) {
  constexpr int kLanes = 2;
  const auto pool = Pool(std::make_shared<LazyDevice>(), {Layer(6, 5, DType::kF32)}, kLanes);
  std::atomic<int> most = 0, now = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        const auto lane = pool->Acquire(SessionRole::kTrain);
        if (!lane.ok()) continue;
        const int owners = ++now;
        for (int seen = most; seen < owners && !most.compare_exchange_weak(seen, owners);) {
        }
        static_cast<char*>((*lane)->inputs[0].x.data())[0] = static_cast<char>(i);
        --now;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(most, kLanes);
  EXPECT_EQ(pool->lanes_in_use(), 0);
}

}  // namespace
}  // namespace shardmlp::testing
