// An engine whose answers a test gives.
#pragma once

#include <gmock/gmock.h>

#include <memory>
#include <string>
#include <vector>

#include "server/engine/engine.h"

namespace shardmlp {

class MockEngine : public Engine {
 public:
  MOCK_METHOD(const ModelSpec&, model, (), (const, override));
  MOCK_METHOD(bool, frozen, (), (const, override));
  MOCK_METHOD(EngineLimits, limits, (), (const, override));
  MOCK_METHOD(MemoryPlan, memory_plan, (), (const, override));
  MOCK_METHOD(ReplicaPlace, replica, (), (const, override));
  MOCK_METHOD(StepPosition, position, (), (const, override));
  MOCK_METHOD(std::vector<TrainerStatus>, trainers, (), (const, override));
  MOCK_METHOD(absl::StatusOr<SessionGrant>, OpenSession, (const SessionSpec&), (override));
  MOCK_METHOD(absl::StatusOr<StepPosition>, RenewSession, (int64_t), (override));
  MOCK_METHOD(absl::Status, CloseSession, (int64_t), (override));
  MOCK_METHOD(absl::StatusOr<std::shared_ptr<Call>>, StartForward, (const ForwardSpec&, CallSink&), (override));
  MOCK_METHOD(absl::StatusOr<std::shared_ptr<Call>>, StartBackward, (const BackwardSpec&, CallSink&), (override));
  MOCK_METHOD(void, SealStep, (const SealSpec&, Done<SealResult>), (override));
  MOCK_METHOD(void, CommitStep, (const CommitSpec&, Done<StepPosition>), (override));
  MOCK_METHOD(void, DiscardStep, (const DiscardSpec&, Done<StepPosition>), (override));
  MOCK_METHOD(void, ReadTensor, (int64_t, int64_t, int64_t, Done<TensorRows>), (override));
  MOCK_METHOD(void, Checksums, (Done<std::vector<uint64_t>>), (override));
  MOCK_METHOD(void, SaveCheckpoint, (const std::string&, Done<CheckpointInfo>), (override));
  MOCK_METHOD(void, RestoreCheckpoint, (const std::string&, Done<StepPosition>), (override));
  MOCK_METHOD(void, ListCheckpoints, (Done<std::vector<CheckpointInfo>>), (override));
  MOCK_METHOD(void, DeleteCheckpoint, (const std::string&, Done<CheckpointInfo>), (override));
  MOCK_METHOD(void, StartDraining, (), (override));
  MOCK_METHOD(bool, SettleStep, (absl::Time), (override));
  MOCK_METHOD(int64_t, open_call_count, (), (const, override));
  MOCK_METHOD(void, Shutdown, (), (override));
  MOCK_METHOD(absl::Status, health, (), (const, override));
};

}  // namespace shardmlp
