// A server of its own for the client's tests: the protocol over plain protobuf messages and gRPC's blocking API,
// sharing no framing with the client. Its "MLP" has no weights: y[r, o] = ~x[r, o % H] and dx[r, h] = x[r, h] ^ dy[r, h
// % O], bit by bit, which is right or wrong in every element and for every dtype.
#pragma once

#include <grpcpp/server.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/status.h"
#include "shardmlp/v1/compute.grpc.pb.h"
#include "shardmlp/v1/model.grpc.pb.h"
#include "shardmlp/v1/operation.grpc.pb.h"
#include "shardmlp/v1/training.grpc.pb.h"

namespace shardmlp::fake {

// A place in a call where a test may step in.
struct Moment {
  std::string method;  // "Forward", "SealStep", ...
  int try_number = 0;  // which call of that method this is, from 0
  int message = 0;     // which message of the call was just read or is about to be written, from 0; 0 for unary calls
  grpc::ServerContextBase* context = nullptr;
};

// What the server does there: go on (nullopt), or end the call with a status. OK then ends it without an end message.
using Hook = std::function<std::optional<grpc::Status>(const Moment&)>;

// A message that is about to be answered, changed as a test likes.
using ForwardAnswerHook = std::function<void(v1::ForwardResponse&)>;

struct SeenCall {
  std::string method;
  std::string peer;
  v1::ForwardHeader forward = {};
  v1::BackwardHeader backward = {};
  std::vector<int64_t> shard_rows = {};
  bool complete = false;
};

struct FakeServerOptions {
  std::string address = "127.0.0.1:0";
  v1::GetModelResponse model;  // FakeModel()
  int64_t result_rows = 3;     // at most so many in a result message
  absl::Duration lease = absl::Hours(1);
  // What GetMetrics answers the n-th time, from 0.
  std::function<v1::GetMetricsResponse(int)> metrics = [](int) { return v1::GetMetricsResponse(); };
  v1::DrainResponse drain = {};
};

// As the real server refuses.
grpc::Status Refuse(absl::StatusCode code, Reason reason, const std::string& message);

// Layers 0 ([T, 6] -> [T, 4]), 1 ([T, 5] -> [T, 5]) and 2 ([T, 1024] -> [T, 1024]); messages of at most 4 MiB, shards
// of 1 MiB.
v1::GetModelResponse FakeModel();

class FakeServer final : public v1::Compute::Service,
                         public v1::Training::Service,
                         public v1::Model::Service,
                         public v1::Operation::Service {
 public:
  explicit FakeServer(FakeServerOptions options = {.model = FakeModel()});
  ~FakeServer() override;

  // What to connect to.
  const std::string& target() const { return target_; }
  // Both are called from many threads; set them before the calls they are for.
  void SetHook(Hook hook) ABSL_LOCKS_EXCLUDED(mutex_);
  void SetForwardAnswerHook(ForwardAnswerHook hook) ABSL_LOCKS_EXCLUDED(mutex_);
  // Stops listening and cuts every connection. Start listens again at the same address.
  void Stop();
  void Start();

  std::vector<SeenCall> calls() const ABSL_LOCKS_EXCLUDED(mutex_);
  // How often `method` was called.
  int Count(const std::string& method) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Blocks until it was called `count` times.
  void AwaitCount(const std::string& method, int count) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Rows counted once by call id, as the ledger would.
  int64_t counted_rows() const ABSL_LOCKS_EXCLUDED(mutex_);
  v1::StepPosition position() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the open attempt, as the loss of another trainer does.
  void RaiseAttempt() ABSL_LOCKS_EXCLUDED(mutex_);
  v1::SealStepRequest last_seal() const ABSL_LOCKS_EXCLUDED(mutex_);
  v1::CommitStepRequest last_commit() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  grpc::Status Forward(grpc::ServerContext* context,
                       grpc::ServerReaderWriter<v1::ForwardResponse, v1::ForwardRequest>* stream) override;
  grpc::Status Backward(grpc::ServerContext* context,
                        grpc::ServerReaderWriter<v1::BackwardResponse, v1::BackwardRequest>* stream) override;
  grpc::Status OpenSession(grpc::ServerContext* context, const v1::OpenSessionRequest* request,
                           v1::OpenSessionResponse* response) override;
  grpc::Status RenewSession(grpc::ServerContext* context, const v1::RenewSessionRequest* request,
                            v1::RenewSessionResponse* response) override;
  grpc::Status CloseSession(grpc::ServerContext* context, const v1::CloseSessionRequest* request,
                            v1::CloseSessionResponse* response) override;
  grpc::Status SealStep(grpc::ServerContext* context, const v1::SealStepRequest* request,
                        v1::SealStepResponse* response) override;
  grpc::Status CommitStep(grpc::ServerContext* context, const v1::CommitStepRequest* request,
                          v1::CommitStepResponse* response) override;
  grpc::Status DiscardStep(grpc::ServerContext* context, const v1::DiscardStepRequest* request,
                           v1::DiscardStepResponse* response) override;
  grpc::Status GetModel(grpc::ServerContext* context, const v1::GetModelRequest* request,
                        v1::GetModelResponse* response) override;
  grpc::Status ReadTensor(grpc::ServerContext* context, const v1::ReadTensorRequest* request,
                          grpc::ServerWriter<v1::ReadTensorResponse>* writer) override;
  grpc::Status SaveCheckpoint(grpc::ServerContext* context, const v1::SaveCheckpointRequest* request,
                              v1::SaveCheckpointResponse* response) override;
  grpc::Status RestoreCheckpoint(grpc::ServerContext* context, const v1::RestoreCheckpointRequest* request,
                                 v1::RestoreCheckpointResponse* response) override;
  grpc::Status ListCheckpoints(grpc::ServerContext* context, const v1::ListCheckpointsRequest* request,
                               v1::ListCheckpointsResponse* response) override;
  // Asks the hook for the answer once it has deleted.
  grpc::Status DeleteCheckpoint(grpc::ServerContext* context, const v1::DeleteCheckpointRequest* request,
                                v1::DeleteCheckpointResponse* response) override;

  grpc::Status GetMetrics(grpc::ServerContext* context, const v1::GetMetricsRequest* request,
                          v1::GetMetricsResponse* response) override;
  // Answers, and stands as it is; a test stops it.
  grpc::Status Drain(grpc::ServerContext* context, const v1::DrainRequest* request,
                     v1::DrainResponse* response) override;

  // Counts the call and returns its first moment.
  Moment Begin(const std::string& method, grpc::ServerContextBase* context) ABSL_LOCKS_EXCLUDED(mutex_);
  // Asks the hook.
  std::optional<grpc::Status> StepIn(const Moment& moment) ABSL_LOCKS_EXCLUDED(mutex_);
  // Begin and StepIn, for unary calls.
  std::optional<grpc::Status> BeginUnary(const std::string& method, grpc::ServerContextBase* context);
  // NOT_FOUND, ABORTED or OK.
  grpc::Status CheckStep(int64_t session_id, int64_t step, int64_t attempt) ABSL_LOCKS_EXCLUDED(mutex_);
  void Record(const SeenCall& call) ABSL_LOCKS_EXCLUDED(mutex_);
  void CountRows(const v1::BackwardHeader& header, int64_t rows) ABSL_LOCKS_EXCLUDED(mutex_);
  void ChangeAnswer(v1::ForwardResponse& response) ABSL_LOCKS_EXCLUDED(mutex_);
  void ChangeAnswer(v1::BackwardResponse&) {}
  const v1::LayerInfo* FindLayer(int layer) const;
  // Forward and Backward; Kind (fake_compute.cc) is what they differ in.
  template <typename Kind>
  grpc::Status Run(grpc::ServerContext* context, typename Kind::Stream* stream);

  const FakeServerOptions options_;
  std::string target_;
  std::unique_ptr<grpc::Server> server_;

  mutable absl::Mutex mutex_;
  Hook hook_ ABSL_GUARDED_BY(mutex_);
  ForwardAnswerHook forward_answer_hook_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int> counts_ ABSL_GUARDED_BY(mutex_);
  std::vector<SeenCall> calls_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, bool> sessions_ ABSL_GUARDED_BY(mutex_);  // id -> open
  v1::StepPosition position_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, int64_t> counted_ ABSL_GUARDED_BY(mutex_);  // call id -> rows
  v1::SealStepRequest last_seal_ ABSL_GUARDED_BY(mutex_);
  v1::CommitStepRequest last_commit_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::CheckpointInfo> checkpoints_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardmlp::fake
