#include "tests/client/fake_server.h"

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/http2.h"
#include "proto/status_bridge.h"

namespace shardmlp::fake {
namespace {

void AddLayer(int layer, int64_t hidden, int64_t output, v1::ModelInfo& model) {
  v1::LayerInfo& info = *model.add_layers();
  info.set_layer(layer);
  info.set_module(absl::StrCat("model.layers.", layer, ".mlp"));
  info.set_hidden_size(hidden);
  info.set_intermediate_size(7);
  info.set_output_size(output);
  info.set_activation("silu");
  info.set_gated(true);
  v1::TensorInfo& tensor = *model.add_tensors();
  tensor.set_name(absl::StrCat(info.module(), ".down_proj.weight"));
  tensor.set_layer(layer);
  tensor.add_shape(output);
  tensor.add_shape(7);
  tensor.set_dtype(v1::DTYPE_BF16);
}

}  // namespace

grpc::Status Refuse(absl::StatusCode code, Reason reason, const std::string& message) {
  return ToGrpcStatus(Error(code, reason, message));
}

v1::GetModelResponse FakeModel() {
  v1::GetModelResponse response;
  v1::ModelInfo& model = *response.mutable_model();
  model.set_model_type("llama");
  model.set_compute_dtype(v1::DTYPE_F32);
  AddLayer(0, 6, 4, model);
  AddLayer(1, 5, 5, model);
  AddLayer(2, 1024, 1024, model);
  response.mutable_limits()->set_max_message_bytes(4 << 20);
  response.mutable_limits()->set_preferred_shard_bytes(1 << 20);
  response.mutable_limits()->set_tile_row_count(64);
  response.mutable_limits()->set_max_call_count(8);
  response.mutable_memory()->set_weights_bytes(1234);
  return response;
}

FakeServer::FakeServer(FakeServerOptions options) : options_(std::move(options)) {
  {
    absl::MutexLock lock(&mutex_);
    position_.set_step(3);
    position_.set_attempt(5);
    position_.set_weights_version(11);
  }
  target_ = options_.address;
  Start();
}

FakeServer::~FakeServer() { Stop(); }

void FakeServer::Start() {
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(target_, grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(static_cast<int>(options_.model.limits().max_message_bytes()));
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             static_cast<int>(absl::ToInt64Milliseconds(kMinPingInterval)));
  builder.RegisterService(static_cast<v1::Compute::Service*>(this));
  builder.RegisterService(static_cast<v1::Training::Service*>(this));
  builder.RegisterService(static_cast<v1::Model::Service*>(this));
  builder.RegisterService(static_cast<v1::Operation::Service*>(this));
  server_ = builder.BuildAndStart();
  if (target_ == "127.0.0.1:0") target_ = absl::StrCat("127.0.0.1:", port);
}

void FakeServer::Stop() {
  if (server_ == nullptr) return;
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
  server_.reset();
}

void FakeServer::SetHook(Hook hook) {
  absl::MutexLock lock(&mutex_);
  hook_ = std::move(hook);
}

void FakeServer::SetForwardAnswerHook(ForwardAnswerHook hook) {
  absl::MutexLock lock(&mutex_);
  forward_answer_hook_ = std::move(hook);
}

std::vector<SeenCall> FakeServer::calls() const {
  absl::MutexLock lock(&mutex_);
  return calls_;
}

int FakeServer::Count(const std::string& method) const {
  absl::MutexLock lock(&mutex_);
  const auto count = counts_.find(method);
  return count == counts_.end() ? 0 : count->second;
}

void FakeServer::AwaitCount(const std::string& method, int count) const {
  absl::MutexLock lock(&mutex_);
  const auto reached = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto found = counts_.find(method);
    return found != counts_.end() && found->second >= count;
  };
  mutex_.Await(absl::Condition(&reached));
}

int64_t FakeServer::counted_rows() const {
  absl::MutexLock lock(&mutex_);
  int64_t sum = 0;
  for (const auto& [call_id, rows] : counted_) sum += rows;
  return sum;
}

v1::StepPosition FakeServer::position() const {
  absl::MutexLock lock(&mutex_);
  return position_;
}

void FakeServer::RaiseAttempt() {
  absl::MutexLock lock(&mutex_);
  position_.set_attempt(position_.attempt() + 1);
  counted_.clear();
}

v1::SealStepRequest FakeServer::last_seal() const {
  absl::MutexLock lock(&mutex_);
  return last_seal_;
}

v1::CommitStepRequest FakeServer::last_commit() const {
  absl::MutexLock lock(&mutex_);
  return last_commit_;
}

Moment FakeServer::Begin(const std::string& method, grpc::ServerContextBase* context) {
  absl::MutexLock lock(&mutex_);
  return {.method = method, .try_number = counts_[method]++, .context = context};
}

std::optional<grpc::Status> FakeServer::StepIn(const Moment& moment) {
  Hook hook;
  {
    absl::MutexLock lock(&mutex_);
    hook = hook_;
  }
  return hook == nullptr ? std::nullopt : hook(moment);
}

std::optional<grpc::Status> FakeServer::BeginUnary(const std::string& method, grpc::ServerContextBase* context) {
  return StepIn(Begin(method, context));
}

grpc::Status FakeServer::CheckStep(int64_t session_id, int64_t step, int64_t attempt) {
  absl::MutexLock lock(&mutex_);
  const auto session = sessions_.find(session_id);
  if (session == sessions_.end() || !session->second) {
    return Refuse(absl::StatusCode::kNotFound, Reason::kUnknownSession, absl::StrCat("no session ", session_id));
  }
  if (step != position_.step() || attempt != position_.attempt()) {
    return Refuse(absl::StatusCode::kAborted, Reason::kStepAborted, "the attempt is over");
  }
  return grpc::Status::OK;
}

void FakeServer::Record(const SeenCall& call) {
  absl::MutexLock lock(&mutex_);
  calls_.push_back(call);
}

const v1::LayerInfo* FakeServer::FindLayer(int layer) const {
  for (const v1::LayerInfo& info : options_.model.model().layers()) {
    if (info.layer() == layer) return &info;
  }
  return nullptr;
}

void FakeServer::CountRows(const v1::BackwardHeader& header, int64_t rows) {
  absl::MutexLock lock(&mutex_);
  int64_t& counted = counted_[header.call_id()];
  counted = std::max(counted, rows);
}

void FakeServer::ChangeAnswer(v1::ForwardResponse& response) {
  ForwardAnswerHook hook;
  {
    absl::MutexLock lock(&mutex_);
    hook = forward_answer_hook_;
  }
  if (hook != nullptr) hook(response);
}

}  // namespace shardmlp::fake
