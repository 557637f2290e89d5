// The model, its tensors and checkpoints over gRPC.
#include <thread>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "kernels/matrix.h"
#include "shardmlp/v1/model.grpc.pb.h"
#include "tests/rpc/service_test.h"

namespace shardmlp {
namespace {

using Stub = v1::Model::Stub;
using testing::_;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Return;
using testing::ReturnRef;

constexpr int64_t kRows = 700;
constexpr int64_t kColumns = 1000;  // of bf16: 2000 bytes a row, 524 rows in a MiB

class ModelServiceTest : public ServiceTest<v1::Model> {
 protected:
  explicit ModelServiceTest(const RpcServerOptions& options = {}) : ServiceTest(options) {
    spec_.model_type = "gpt2";
    spec_.dtype = DType::kBF16;
    LayerSpec& layer = spec_.layers.emplace_back();
    layer.layer = 4;
    layer.module = "transformer.h.4.mlp";
    layer.mlp.hidden_size = kColumns;
    layer.mlp.intermediate_size = kRows;
    layer.mlp.output_size = kColumns;
    layer.mlp.activation = {.kind = ActivationKind::kGeluTanh, .gated = false};
    AddTensor("matrix", {kRows, kColumns});
    AddTensor("vector", {kRows});
    EXPECT_CALL(engine_, model()).WillRepeatedly(ReturnRef(spec_));
  }

  void AddTensor(const std::string& name, const std::vector<int64_t>& shape) {
    TensorSpec& tensor = spec_.tensors.emplace_back();
    tensor.name = name;
    tensor.layer = 4;
    tensor.shape = shape;
  }

  void ExpectGetModel() {
    EXPECT_CALL(engine_, frozen()).WillOnce(Return(true));
    EXPECT_CALL(engine_, limits()).WillOnce(Return(EngineLimits{.tile_row_count = 512, .max_call_count = 8}));
    EXPECT_CALL(engine_, replica()).WillOnce(Return(ReplicaPlace{1, 3, 2, 9, {1, 2}}));
    EXPECT_CALL(engine_, memory_plan()).WillOnce([] {
      MemoryPlan plan;
      plan.weights_bytes = 1;
      plan.gradients_bytes = 2;
      plan.master_weights_bytes = 3;
      plan.optimizer_bytes = 4;
      plan.workspace_bytes = 5;
      plan.staging_bytes = 6;
      plan.ledger_bytes = 7;
      plan.stash_bytes = 8;
      return plan;
    });
    EXPECT_CALL(engine_, position()).WillOnce(Return(StepPosition{.step = 3, .attempt = 1, .weights_version = 7}));
    EXPECT_CALL(engine_, trainers()).WillOnce([] {
      const SessionSpec spec = {.run_id = "run", .role = SessionRole::kTrain, .trainer_count = 2, .trainer_rank = 1};
      return std::vector<TrainerStatus>{{.spec = spec, .sealed = true}};
    });
  }

  absl::Status ReadTensor(const std::string& name, std::vector<v1::ReadTensorResponse>& chunks) {
    v1::ReadTensorRequest request;
    request.set_name(name);
    grpc::ClientContext context;
    const auto stream = stub_->ReadTensor(&context, request);
    for (v1::ReadTensorResponse chunk; stream->Read(&chunk);) chunks.push_back(chunk);
    return FromGrpcStatus(stream->Finish());
  }

  ModelSpec spec_;
};

// Rows [begin, begin + count) of "matrix": each byte tells its row.
TensorRows MatrixRows(int64_t begin, int64_t count, int64_t weights_version) {
  TensorRows rows{.bytes = "", .weights_version = weights_version};
  for (int64_t row = begin; row < begin + count; ++row) rows.bytes.append(kColumns * 2, static_cast<char>(row));
  return rows;
}

TEST_F(ModelServiceTest, GetModelDescribesModelLimitsAndTraining) {
  ExpectGetModel();
  v1::GetModelResponse response;
  ASSERT_TRUE(Call(&Stub::GetModel, v1::GetModelRequest(), response).ok());
  EXPECT_EQ(response.model().model_type(), "gpt2");
  EXPECT_EQ(response.model().compute_dtype(), v1::DTYPE_BF16);
  EXPECT_TRUE(response.model().frozen());
  ASSERT_EQ(response.model().layers_size(), 1);
  const v1::LayerInfo& layer = response.model().layers(0);
  EXPECT_EQ(layer.layer(), 4);
  EXPECT_EQ(layer.module(), "transformer.h.4.mlp");
  EXPECT_EQ(layer.hidden_size(), kColumns);
  EXPECT_EQ(layer.intermediate_size(), kRows);
  EXPECT_EQ(layer.output_size(), kColumns);
  EXPECT_EQ(layer.activation(), "gelu_tanh");
  EXPECT_FALSE(layer.gated());
  ASSERT_EQ(response.model().tensors_size(), 2);
  EXPECT_EQ(response.model().tensors(0).name(), "matrix");
  EXPECT_THAT(response.model().tensors(0).shape(), ElementsAre(kRows, kColumns));
  EXPECT_EQ(response.model().tensors(0).dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(response.limits().max_message_bytes(), 4 << 20);
  EXPECT_EQ(response.limits().preferred_shard_bytes(), 123456);
  EXPECT_EQ(response.limits().tile_row_count(), 512);
  EXPECT_EQ(response.limits().max_call_count(), 8);
  EXPECT_EQ(response.replica().rank(), 1);
  EXPECT_EQ(response.replica().replica_count(), 3);
  EXPECT_EQ(response.replica().member_count(), 2);
  EXPECT_EQ(response.replica().generation(), 9);
  EXPECT_THAT(response.replica().member_ranks(), ElementsAre(1, 2));
  EXPECT_EQ(response.position().step(), 3);
  ASSERT_EQ(response.trainers_size(), 1);
  EXPECT_EQ(response.trainers(0).run_id(), "run");
  EXPECT_EQ(response.trainers(0).trainer_rank(), 1);
  EXPECT_EQ(response.trainers(0).trainer_count(), 2);
  EXPECT_TRUE(response.trainers(0).sealed());
  const v1::MemoryPlan& memory = response.memory();
  EXPECT_THAT((std::vector<int64_t>{memory.weights_bytes(), memory.gradients_bytes(), memory.master_weights_bytes(),
                                    memory.optimizer_bytes(), memory.workspace_bytes(), memory.staging_bytes(),
                                    memory.ledger_bytes(), memory.stash_bytes()}),
              ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
}

TEST_F(ModelServiceTest, ChecksumsComeWhereAskedFor) {
  ExpectGetModel();
  EXPECT_CALL(engine_, Checksums(_)).WillOnce([](Done<std::vector<uint64_t>> done) {
    done(std::vector<uint64_t>{1, 0xfedcba9876543210});
  });
  v1::GetModelRequest request;
  request.set_checksums(true);
  v1::GetModelResponse response;
  ASSERT_TRUE(Call(&Stub::GetModel, request, response).ok());
  EXPECT_EQ(response.model().tensors(0).checksum(), 1);
  EXPECT_EQ(static_cast<uint64_t>(response.model().tensors(1).checksum()), 0xfedcba9876543210);
}

TEST_F(ModelServiceTest, ATensorComesInChunksOfWholeRowsOfAboutAMebibyte) {
  EXPECT_CALL(engine_, ReadTensor(0, _, _, _))
      .WillRepeatedly(
          [](int64_t, int64_t begin, int64_t count, Done<TensorRows> done) { done(MatrixRows(begin, count, 7)); });
  std::vector<v1::ReadTensorResponse> chunks;
  ASSERT_TRUE(ReadTensor("matrix", chunks).ok());
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(chunks[0].byte_offset(), 0);
  EXPECT_EQ(chunks[1].byte_offset(), 524 * kColumns * 2);
  for (const v1::ReadTensorResponse& chunk : chunks) {
    EXPECT_EQ(chunk.total_byte_count(), kRows * kColumns * 2);
    EXPECT_EQ(chunk.weights_version(), 7);
  }
  EXPECT_EQ(chunks[0].data() + chunks[1].data(), MatrixRows(0, kRows, 7).bytes);
}

TEST_F(ModelServiceTest, AVectorIsOneRow) {
  EXPECT_CALL(engine_, ReadTensor(1, 0, 1, _)).WillOnce([](int64_t, int64_t, int64_t, Done<TensorRows> done) {
    done(TensorRows{.bytes = std::string(kRows * 2, 'v'), .weights_version = 7});
  });
  std::vector<v1::ReadTensorResponse> chunks;
  ASSERT_TRUE(ReadTensor("vector", chunks).ok());
  ASSERT_EQ(chunks.size(), 1u);
  EXPECT_EQ(chunks[0].data(), std::string(kRows * 2, 'v'));
}

TEST_F(ModelServiceTest, ACommitWhileATensorIsReadIsNotPapered) {
  EXPECT_CALL(engine_, ReadTensor(0, _, _, _))
      .WillRepeatedly([](int64_t, int64_t begin, int64_t count, Done<TensorRows> done) {
        done(MatrixRows(begin, count, begin == 0 ? 7 : 8));
      });
  std::vector<v1::ReadTensorResponse> chunks;
  const absl::Status status = ReadTensor("matrix", chunks);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(status), Reason::kWeightsChanged);
  EXPECT_THAT(std::string(status.message()), HasSubstr("from version 7 to 8"));
}

TEST_F(ModelServiceTest, AnUnknownTensorIsNamed) {
  std::vector<v1::ReadTensorResponse> chunks;
  const absl::Status status = ReadTensor("lm_head.weight", chunks);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(status), Reason::kUnknownTensor);
  EXPECT_THAT(std::string(status.message()), HasSubstr("lm_head.weight"));
}

TEST_F(ModelServiceTest, AReaderThatGoesAwayEndsTheRead) {
  EXPECT_CALL(engine_, ReadTensor(0, _, _, _))
      .WillRepeatedly(
          [](int64_t, int64_t begin, int64_t count, Done<TensorRows> done) { done(MatrixRows(begin, count, 7)); });
  v1::ReadTensorRequest request;
  request.set_name("matrix");
  {
    grpc::ClientContext context;
    const auto stream = stub_->ReadTensor(&context, request);
    context.TryCancel();
    EXPECT_FALSE(stream->Finish().ok());
  }
  std::vector<v1::ReadTensorResponse> chunks;
  EXPECT_TRUE(ReadTensor("matrix", chunks).ok());
}

TEST_F(ModelServiceTest, NoMoreTensorsAreReadAtOnceThanMayBe) {
  constexpr int kMost = 16;
  absl::BlockingCounter reading(kMost);
  std::vector<Done<TensorRows>> held;
  absl::Mutex mutex;
  EXPECT_CALL(engine_, ReadTensor(1, _, _, _)).WillRepeatedly([&](int64_t, int64_t, int64_t, Done<TensorRows> done) {
    {
      absl::MutexLock lock(&mutex);
      held.push_back(std::move(done));
    }
    reading.DecrementCount();
  });
  v1::ReadTensorRequest request;
  request.set_name("vector");
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::ReadTensorResponse>>> streams;
  for (int i = 0; i < kMost; ++i) {
    streams.push_back(stub_->ReadTensor(contexts.emplace_back(std::make_unique<grpc::ClientContext>()).get(), request));
  }
  reading.Wait();
  std::vector<v1::ReadTensorResponse> chunks;
  const absl::Status refused = ReadTensor("vector", chunks);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(refused), Reason::kOverloaded);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("all 16 tensors"));
  for (auto& done : held) done(TensorRows{.bytes = std::string(kRows * 2, 'v'), .weights_version = 7});
  for (const auto& stream : streams) {
    for (v1::ReadTensorResponse chunk; stream->Read(&chunk);) continue;
    EXPECT_TRUE(stream->Finish().ok());
  }
  ASSERT_TRUE(server_->AwaitIdle(absl::InfiniteFuture()));
  EXPECT_CALL(engine_, ReadTensor(1, _, _, _)).WillOnce([](int64_t, int64_t, int64_t, Done<TensorRows> done) {
    done(TensorRows{.bytes = std::string(kRows * 2, 'v'), .weights_version = 7});
  });
  EXPECT_TRUE(ReadTensor("vector", chunks).ok());
}

class StalledReaderTest : public ModelServiceTest {
 protected:
  StalledReaderTest() : ModelServiceTest({.stall_timeout = absl::Milliseconds(100)}) {}
};

TEST_F(StalledReaderTest, AReaderThatTakesNothingMoreIsEnded) {
  AddTensor("endless", {1 << 30, kColumns});
  EXPECT_CALL(engine_, ReadTensor(2, _, _, _))
      .WillRepeatedly(
          [](int64_t, int64_t begin, int64_t count, Done<TensorRows> done) { done(MatrixRows(begin, count, 7)); });
  v1::ReadTensorRequest request;
  request.set_name("endless");
  grpc::ClientContext context;
  const auto stream = stub_->ReadTensor(&context, request);
  v1::ReadTensorResponse chunk;
  ASSERT_TRUE(stream->Read(&chunk));
  ASSERT_TRUE(server_->AwaitIdle(absl::InfiniteFuture()));
  EXPECT_THAT(metrics_.Text(), HasSubstr("shardmlp_failures_total{reason=\"STALLED\"} 1\n"));
  while (stream->Read(&chunk)) continue;
  EXPECT_FALSE(stream->Finish().ok());
}

TEST_F(StalledReaderTest, AReadThatWaitsForABusyDeviceIsNotStalled) {
  AddTensor("endless", {1 << 30, kColumns});
  Done<TensorRows> held;
  absl::Notification reading;
  EXPECT_CALL(engine_, ReadTensor(1, _, _, _)).WillOnce([&](int64_t, int64_t, int64_t, Done<TensorRows> done) {
    held = std::move(done);
    reading.Notify();
  });
  EXPECT_CALL(engine_, ReadTensor(2, _, _, _))
      .WillRepeatedly(
          [](int64_t, int64_t begin, int64_t count, Done<TensorRows> done) { done(MatrixRows(begin, count, 7)); });
  v1::ReadTensorRequest request;
  request.set_name("vector");
  grpc::ClientContext context, stalled_context;
  const auto stream = stub_->ReadTensor(&context, request);
  reading.WaitForNotification();
  // Another reader stalls for the whole time-out meanwhile, which shows that it has passed.
  request.set_name("endless");
  const auto stalled = stub_->ReadTensor(&stalled_context, request);
  while (metrics_.Text().find("shardmlp_failures_total{reason=\"STALLED\"} 1\n") == std::string::npos) {
    std::this_thread::yield();
  }
  held(TensorRows{.bytes = std::string(kRows * 2, 'v'), .weights_version = 7});
  v1::ReadTensorResponse chunk;
  EXPECT_TRUE(stream->Read(&chunk));
  EXPECT_FALSE(stream->Read(&chunk));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ModelServiceTest, CheckpointsAreSavedRestoredListedAndDeleted) {
  const CheckpointInfo info = {.name = "step-3", .step = 3, .byte_count = 1000};
  EXPECT_CALL(engine_, SaveCheckpoint("step-3", _)).WillOnce(Answer<CheckpointInfo>(info));
  EXPECT_CALL(engine_, RestoreCheckpoint("step-3", _))
      .WillOnce(Answer<StepPosition>(StepPosition{.step = 3, .attempt = 2, .weights_version = 9}));
  EXPECT_CALL(engine_, ListCheckpoints(_)).WillOnce([&](Done<std::vector<CheckpointInfo>> done) {
    done(std::vector<CheckpointInfo>{info});
  });
  EXPECT_CALL(engine_, DeleteCheckpoint("step-3", _)).WillOnce(Answer<CheckpointInfo>(info));
  v1::SaveCheckpointRequest save;
  save.set_name("step-3");
  v1::SaveCheckpointResponse saved;
  ASSERT_TRUE(Call(&Stub::SaveCheckpoint, save, saved).ok());
  EXPECT_EQ(saved.checkpoint().byte_count(), 1000);
  v1::RestoreCheckpointRequest restore;
  restore.set_name("step-3");
  v1::RestoreCheckpointResponse restored;
  ASSERT_TRUE(Call(&Stub::RestoreCheckpoint, restore, restored).ok());
  EXPECT_EQ(restored.position().weights_version(), 9);
  v1::ListCheckpointsResponse listed;
  ASSERT_TRUE(Call(&Stub::ListCheckpoints, v1::ListCheckpointsRequest(), listed).ok());
  ASSERT_EQ(listed.checkpoints_size(), 1);
  EXPECT_EQ(listed.checkpoints(0).name(), "step-3");
  EXPECT_EQ(listed.checkpoints(0).step(), 3);
  v1::DeleteCheckpointRequest deletion;
  deletion.set_name("step-3");
  v1::DeleteCheckpointResponse deleted;
  ASSERT_TRUE(Call(&Stub::DeleteCheckpoint, deletion, deleted).ok());
  EXPECT_EQ(deleted.checkpoint().step(), 3);
}

TEST_F(ModelServiceTest, ATornCheckpointIsDataLossWithTheFileNamed) {
  EXPECT_CALL(engine_, RestoreCheckpoint("torn", _))
      .WillOnce(Answer<StepPosition>(
          Error(absl::StatusCode::kDataLoss, Reason::kCheckpointCorrupt, "weights.safetensors: checksum")));
  v1::RestoreCheckpointRequest restore;
  restore.set_name("torn");
  v1::RestoreCheckpointResponse restored;
  const absl::Status status = Call(&Stub::RestoreCheckpoint, restore, restored);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReasonOf(status), Reason::kCheckpointCorrupt);
}

}  // namespace
}  // namespace shardmlp
