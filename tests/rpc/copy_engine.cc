#include "tests/rpc/copy_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "tests/rpc/copy_call.h"

namespace shardmlp {
namespace {

ModelSpec MakeModel(const CopyEngineOptions& options) {
  ModelSpec model;
  model.model_type = "llama";
  for (int layer = 0; layer < options.layer_count; ++layer) {
    LayerSpec& spec = model.layers.emplace_back();
    spec.layer = layer;
    spec.module = absl::StrCat("model.layers.", layer, ".mlp");
    spec.mlp.hidden_size = options.hidden_size;
    spec.mlp.intermediate_size = 1;
    spec.mlp.output_size = options.hidden_size;
    TensorSpec& tensor = model.tensors.emplace_back();
    tensor.name = absl::StrCat(spec.module, ".down_proj.weight");
    tensor.layer = layer;
    tensor.shape = {options.hidden_size, 1};
    tensor.slot = TensorSlot::kDown;
    tensor.output_count = options.hidden_size;
  }
  return model;
}

absl::Status Unsupported() {
  return absl::UnimplementedError("the copy engine computes no steps and keeps no weights");
}

absl::Status CheckSession(int64_t session_id) {
  if (session_id == CopyEngine::kSessionId) return absl::OkStatus();
  return Error(absl::StatusCode::kNotFound, Reason::kUnknownSession, absl::StrCat("no session ", session_id));
}

}  // namespace

CopyEngine::CopyEngine(const CopyEngineOptions& options)
    : options_(options), model_(MakeModel(options)), device_([this] { RunDevice(); }) {}

CopyEngine::~CopyEngine() {
  Shutdown();
  std::deque<std::shared_ptr<CopyCall>> left;  // gives slots back, to an engine that is whole
  absl::MutexLock lock(&mutex_);
  left.swap(scheduled_);
}

void CopyEngine::HoldDevice() {
  absl::MutexLock lock(&mutex_);
  held_ = true;
}

void CopyEngine::ReleaseDevice() {
  absl::MutexLock lock(&mutex_);
  held_ = false;
}

void CopyEngine::FailAfter(int64_t rows, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  fail_after_rows_ = rows;
  failure_ = status;
}

absl::Status CopyEngine::FailureAt(int64_t answered_rows) const {
  absl::MutexLock lock(&mutex_);
  return answered_rows >= fail_after_rows_ ? failure_ : absl::OkStatus();
}

void CopyEngine::AwaitOpenCalls(int64_t count) const {
  absl::MutexLock lock(&mutex_);
  const auto enough = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return static_cast<int64_t>(open_calls_.size()) == count;
  };
  mutex_.Await(absl::Condition(&enough));
}

void CopyEngine::AwaitBlockedCall() const {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&blocked_));
}

int64_t CopyEngine::peak_slots() const {
  absl::MutexLock lock(&mutex_);
  return peak_slots_;
}

absl::StatusOr<SessionGrant> CopyEngine::OpenSession(const SessionSpec& /*spec*/) {
  return SessionGrant{.session_id = kSessionId, .lease = absl::Seconds(30), .position = position()};
}

absl::StatusOr<StepPosition> CopyEngine::RenewSession(int64_t session_id) {
  SHARDMLP_RETURN_IF_ERROR(CheckSession(session_id));
  return position();
}

absl::Status CopyEngine::CloseSession(int64_t /*session_id*/) { return absl::OkStatus(); }

absl::StatusOr<std::shared_ptr<Call>> CopyEngine::StartForward(const ForwardSpec& spec, CallSink& sink) {
  return Start({.session_id = spec.session_id, .layer = spec.layer, .row_count = spec.row_count, .dtype = spec.dtype},
               sink);
}

absl::StatusOr<std::shared_ptr<Call>> CopyEngine::StartBackward(const BackwardSpec& spec, CallSink& sink) {
  return Start({.session_id = spec.session_id,
                .layer = spec.layer,
                .row_count = spec.row_count,
                .dtype = spec.dtype,
                .backward = true,
                .results = spec.input_gradient},
               sink);
}

absl::StatusOr<std::shared_ptr<Call>> CopyEngine::Start(const CopySpec& spec, CallSink& sink) {
  SHARDMLP_RETURN_IF_ERROR(CheckSession(spec.session_id));
  if (spec.layer < 0 || spec.layer >= options_.layer_count) {
    return Error(absl::StatusCode::kNotFound, Reason::kUnknownLayer, absl::StrCat("no layer ", spec.layer));
  }
  {
    absl::MutexLock lock(&mutex_);
    if (draining_ || stopping_) return Error(absl::StatusCode::kUnavailable, Reason::kDraining, "draining");
    if (static_cast<int64_t>(open_calls_.size()) == options_.max_call_count) {
      return Error(absl::StatusCode::kResourceExhausted, Reason::kOverloaded, "too many calls");
    }
  }
  auto call = std::make_shared<CopyCall>(*this, spec, sink);
  absl::MutexLock lock(&mutex_);
  open_calls_.insert(call.get());
  return call;
}

void CopyEngine::SealStep(const SealSpec& /*spec*/, Done<SealResult> done) { done(Unsupported()); }
void CopyEngine::CommitStep(const CommitSpec& /*spec*/, Done<StepPosition> done) { done(Unsupported()); }
void CopyEngine::DiscardStep(const DiscardSpec& /*spec*/, Done<StepPosition> done) { done(Unsupported()); }
void CopyEngine::ReadTensor(int64_t, int64_t, int64_t, Done<TensorRows> done) { done(Unsupported()); }
void CopyEngine::Checksums(Done<std::vector<uint64_t>> done) { done(Unsupported()); }
void CopyEngine::SaveCheckpoint(const std::string&, Done<CheckpointInfo> done) { done(Unsupported()); }
void CopyEngine::RestoreCheckpoint(const std::string&, Done<StepPosition> done) { done(Unsupported()); }
void CopyEngine::ListCheckpoints(Done<std::vector<CheckpointInfo>> done) { done(Unsupported()); }
void CopyEngine::DeleteCheckpoint(const std::string&, Done<CheckpointInfo> done) { done(Unsupported()); }

void CopyEngine::StartDraining() {
  absl::MutexLock lock(&mutex_);
  draining_ = true;
}

int64_t CopyEngine::open_call_count() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(open_calls_.size());
}

void CopyEngine::Shutdown() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (device_.joinable()) device_.join();
}

void CopyEngine::Schedule(std::shared_ptr<CopyCall> call) {
  absl::MutexLock lock(&mutex_);
  scheduled_.push_back(std::move(call));
}

void CopyEngine::NoteBlocked() {
  absl::MutexLock lock(&mutex_);
  blocked_ = true;
}

void CopyEngine::NoteEnded(CopyCall* call) {
  absl::MutexLock lock(&mutex_);
  open_calls_.erase(call);
}

std::unique_ptr<CopySlot> CopyEngine::TakeSlot() {
  absl::MutexLock lock(&mutex_);
  peak_slots_ = std::max(peak_slots_, ++taken_slots_);
  if (free_slots_.empty()) return std::make_unique<CopySlot>();
  auto slot = std::move(free_slots_.back());
  free_slots_.pop_back();
  return slot;
}

void CopyEngine::ReturnSlot(std::unique_ptr<CopySlot> slot) {
  absl::MutexLock lock(&mutex_);
  --taken_slots_;
  free_slots_.push_back(std::move(slot));
}

void CopyEngine::RunDevice() {
  const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || (!held_ && !scheduled_.empty());
  };
  while (true) {
    std::shared_ptr<CopyCall> call;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&has_work));
      if (stopping_) break;
      call = std::move(scheduled_.front());
      scheduled_.pop_front();
    }
    if (call->Step()) Schedule(std::move(call));
  }
  std::vector<std::shared_ptr<CopyCall>> open;
  std::deque<std::shared_ptr<CopyCall>> left;  // gives slots back, which takes the lock
  {
    absl::MutexLock lock(&mutex_);
    for (CopyCall* call : open_calls_) open.push_back(call->shared_from_this());
    left.swap(scheduled_);
  }
  for (const auto& call : open) call->Fail(Error(absl::StatusCode::kUnavailable, Reason::kDraining, "shut down"));
}

}  // namespace shardmlp
