#include <google/protobuf/duration.pb.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/client/fake_server.h"

namespace shardmlp::fake {
namespace {

constexpr size_t kTensorChunkBytes = 100;

}  // namespace

grpc::Status FakeServer::OpenSession(grpc::ServerContext* context, const v1::OpenSessionRequest*,
                                     v1::OpenSessionResponse* response) {
  if (const auto ended = BeginUnary("OpenSession", context)) return *ended;
  absl::MutexLock lock(&mutex_);
  const int64_t id = 100 + static_cast<int64_t>(sessions_.size());
  sessions_[id] = true;
  response->set_session_id(id);
  response->mutable_lease()->set_seconds(absl::ToInt64Seconds(options_.lease));
  response->mutable_lease()->set_nanos(
      static_cast<int32_t>(absl::ToInt64Nanoseconds(options_.lease - absl::Floor(options_.lease, absl::Seconds(1)))));
  *response->mutable_position() = position_;
  return grpc::Status::OK;
}

grpc::Status FakeServer::RenewSession(grpc::ServerContext* context, const v1::RenewSessionRequest* request,
                                      v1::RenewSessionResponse* response) {
  if (const auto ended = BeginUnary("RenewSession", context)) return *ended;
  absl::MutexLock lock(&mutex_);
  if (!sessions_[request->session_id()]) {
    return Refuse(absl::StatusCode::kNotFound, Reason::kUnknownSession, "the lease has ended");
  }
  *response->mutable_position() = position_;
  return grpc::Status::OK;
}

grpc::Status FakeServer::CloseSession(grpc::ServerContext* context, const v1::CloseSessionRequest* request,
                                      v1::CloseSessionResponse*) {
  if (const auto ended = BeginUnary("CloseSession", context)) return *ended;
  absl::MutexLock lock(&mutex_);
  sessions_[request->session_id()] = false;
  return grpc::Status::OK;
}

grpc::Status FakeServer::SealStep(grpc::ServerContext* context, const v1::SealStepRequest* request,
                                  v1::SealStepResponse* response) {
  if (const auto ended = BeginUnary("SealStep", context)) return *ended;
  const grpc::Status open = CheckStep(request->session_id(), request->step(), request->attempt());
  if (!open.ok()) return open;
  absl::MutexLock lock(&mutex_);
  last_seal_ = *request;
  for (int i = 0; i < options_.model.model().tensors_size(); ++i) response->add_tensor_sums_of_squares(i + 0.5);
  response->set_finite(true);
  return grpc::Status::OK;
}

grpc::Status FakeServer::CommitStep(grpc::ServerContext* context, const v1::CommitStepRequest* request,
                                    v1::CommitStepResponse* response) {
  if (const auto ended = BeginUnary("CommitStep", context)) return *ended;
  absl::MutexLock lock(&mutex_);
  // The first decision stands: a repeat gets the same answer.
  if (last_commit_.step() != request->step() || last_commit_.attempt() != request->attempt()) {
    last_commit_ = *request;
    position_.set_step(request->step() + 1);
    position_.set_weights_version(position_.weights_version() + 1);
    counted_.clear();
  }
  *response->mutable_position() = position_;
  return grpc::Status::OK;
}

grpc::Status FakeServer::DiscardStep(grpc::ServerContext* context, const v1::DiscardStepRequest* request,
                                     v1::DiscardStepResponse* response) {
  if (const auto ended = BeginUnary("DiscardStep", context)) return *ended;
  const grpc::Status open = CheckStep(request->session_id(), request->step(), request->attempt());
  if (open.ok()) RaiseAttempt();
  if (!open.ok() && open.error_code() != grpc::StatusCode::ABORTED) return open;
  *response->mutable_position() = position();
  return grpc::Status::OK;
}

grpc::Status FakeServer::GetModel(grpc::ServerContext* context, const v1::GetModelRequest* request,
                                  v1::GetModelResponse* response) {
  if (const auto ended = BeginUnary("GetModel", context)) return *ended;
  *response = options_.model;
  *response->mutable_position() = position();
  if (request->checksums()) {
    for (v1::TensorInfo& tensor : *response->mutable_model()->mutable_tensors()) tensor.set_checksum(-1);
  }
  return grpc::Status::OK;
}

// Byte i of a tensor is i % 251.
grpc::Status FakeServer::ReadTensor(grpc::ServerContext* context, const v1::ReadTensorRequest* request,
                                    grpc::ServerWriter<v1::ReadTensorResponse>* writer) {
  Moment writing = Begin("ReadTensor", context);
  for (const v1::TensorInfo& tensor : options_.model.model().tensors()) {
    if (tensor.name() != request->name()) continue;
    std::string bytes(tensor.shape(0) * tensor.shape(1) * 2, 0);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i % 251);
    for (size_t offset = 0; offset < bytes.size(); offset += kTensorChunkBytes) {
      if (const auto ended = StepIn(writing)) return *ended;
      ++writing.message;
      v1::ReadTensorResponse response;
      response.set_byte_offset(static_cast<int64_t>(offset));
      response.set_total_byte_count(static_cast<int64_t>(bytes.size()));
      response.set_weights_version(position().weights_version());
      response.set_data(bytes.substr(offset, kTensorChunkBytes));
      writer->Write(response);
    }
    return grpc::Status::OK;
  }
  return Refuse(absl::StatusCode::kNotFound, Reason::kUnknownTensor, "no such tensor");
}

grpc::Status FakeServer::SaveCheckpoint(grpc::ServerContext* context, const v1::SaveCheckpointRequest* request,
                                        v1::SaveCheckpointResponse* response) {
  if (const auto ended = BeginUnary("SaveCheckpoint", context)) return *ended;
  absl::MutexLock lock(&mutex_);
  v1::CheckpointInfo& checkpoint = checkpoints_.emplace_back();
  checkpoint.set_name(request->name());
  checkpoint.set_step(position_.step());
  checkpoint.set_byte_count(4096);
  *response->mutable_checkpoint() = checkpoint;
  return grpc::Status::OK;
}

grpc::Status FakeServer::RestoreCheckpoint(grpc::ServerContext* context, const v1::RestoreCheckpointRequest* request,
                                           v1::RestoreCheckpointResponse* response) {
  if (const auto ended = BeginUnary("RestoreCheckpoint", context)) return *ended;
  absl::MutexLock lock(&mutex_);
  for (const v1::CheckpointInfo& checkpoint : checkpoints_) {
    if (checkpoint.name() != request->name()) continue;
    position_.set_step(checkpoint.step());
    position_.set_attempt(position_.attempt() + 1);
    position_.set_weights_version(position_.weights_version() + 1);
    *response->mutable_position() = position_;
    return grpc::Status::OK;
  }
  return Refuse(absl::StatusCode::kNotFound, Reason::kUnknownCheckpoint,
                absl::StrCat("no checkpoint ", request->name()));
}

grpc::Status FakeServer::ListCheckpoints(grpc::ServerContext* context, const v1::ListCheckpointsRequest*,
                                         v1::ListCheckpointsResponse* response) {
  if (const auto ended = BeginUnary("ListCheckpoints", context)) return *ended;
  absl::MutexLock lock(&mutex_);
  for (const v1::CheckpointInfo& checkpoint : checkpoints_) *response->add_checkpoints() = checkpoint;
  return grpc::Status::OK;
}

grpc::Status FakeServer::DeleteCheckpoint(grpc::ServerContext* context, const v1::DeleteCheckpointRequest* request,
                                          v1::DeleteCheckpointResponse* response) {
  {
    absl::MutexLock lock(&mutex_);
    const auto named = [&](const v1::CheckpointInfo& checkpoint) { return checkpoint.name() == request->name(); };
    const auto found = std::find_if(checkpoints_.begin(), checkpoints_.end(), named);
    if (found == checkpoints_.end()) {
      return Refuse(absl::StatusCode::kNotFound, Reason::kUnknownCheckpoint,
                    absl::StrCat("no checkpoint ", request->name()));
    }
    *response->mutable_checkpoint() = *found;
    checkpoints_.erase(found);
  }
  return BeginUnary("DeleteCheckpoint", context).value_or(grpc::Status::OK);
}

grpc::Status FakeServer::GetMetrics(grpc::ServerContext* context, const v1::GetMetricsRequest*,
                                    v1::GetMetricsResponse* response) {
  const int call = Count("GetMetrics");
  if (const auto ended = BeginUnary("GetMetrics", context)) return *ended;
  *response = options_.metrics(call);
  return grpc::Status::OK;
}

grpc::Status FakeServer::Drain(grpc::ServerContext* context, const v1::DrainRequest*, v1::DrainResponse* response) {
  if (const auto ended = BeginUnary("Drain", context)) return *ended;
  *response = options_.drain;
  return grpc::Status::OK;
}

}  // namespace shardmlp::fake
