#include "server/rpc/tensor_stream.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr int64_t kChunkBytes = 1 << 20;  // of a chunk, unless one row is larger

}  // namespace

TensorStream* TensorStream::Start(const TensorStreamContext& context, const std::string& tensor_name,
                                  const RpcRecord& record, grpc::CallbackServerContext* call) {
  const auto stream = std::make_shared<TensorStream>(context, record, call);
  context.streams.Add(stream);
  if (const absl::Status status = stream->Open(tensor_name, *call); !status.ok()) {
    stream->End(status);
  } else {
    stream->ReadNext();
  }
  return stream.get();
}

void TensorStream::OnWriteDone(bool ok) {
  SetWaiting(false);
  if (!ok) {
    End(ClientGone());
  } else if (next_row_ == row_count_) {
    End(absl::OkStatus());
  } else {
    ReadNext();
  }
}

void TensorStream::OnCancel() { Stop(ClientGone()); }

void TensorStream::OnDone() {
  if (admitted_) --context_.open_count;
  {
    absl::MutexLock lock(&mutex_);
    call_ = nullptr;
  }
  context_.streams.Remove(shared_from_this());
}

void TensorStream::Stop(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  stopped_.Update(status);
}

void TensorStream::CheckStall(absl::Time now) {
  const absl::Duration timeout = context_.streams.stall_timeout();
  absl::MutexLock lock(&mutex_);
  if (call_ == nullptr || !waiting_since_.has_value() || now - *waiting_since_ < timeout) return;
  stopped_.Update(Error(absl::StatusCode::kUnavailable, Reason::kStalled,
                        absl::StrCat("the client took nothing of a tensor for ", absl::FormatDuration(timeout))));
  call_->TryCancel();  // it would not take the status either
}

void TensorStream::SetWaiting(bool waiting) {
  absl::MutexLock lock(&mutex_);
  waiting_since_.reset();
  if (waiting) waiting_since_ = absl::Now();
}

void TensorStream::End(const absl::Status& status) {
  absl::Status ending = status;
  {
    absl::MutexLock lock(&mutex_);
    if (!stopped_.ok()) ending = stopped_;
  }
  SetWaiting(true);
  Finish(record_.End(ending));
}

absl::Status TensorStream::Open(const std::string& tensor_name, const grpc::CallbackServerContext& call) {
  SHARDMLP_ASSIGN_OR_RETURN(engine_, context_.engine.Get(call));
  const std::vector<TensorSpec>& tensors = engine_->model().tensors;
  const auto tensor =
      std::find_if(tensors.begin(), tensors.end(), [&](const auto& t) { return t.name == tensor_name; });
  if (tensor == tensors.end()) {
    return Error(absl::StatusCode::kNotFound, Reason::kUnknownTensor,
                 absl::StrCat("no tensor \"", tensor_name, "\" here; ModelInfo.tensors names all ", tensors.size()),
                 {{"tensor", tensor_name}});
  }
  admitted_ = true;
  if (++context_.open_count > kMaxTensorStreams) {
    return Error(absl::StatusCode::kResourceExhausted, Reason::kOverloaded,
                 absl::StrCat("all ", kMaxTensorStreams, " tensors that may be read at once are; try again later"));
  }
  tensor_ = tensor - tensors.begin();
  row_count_ = tensor->shape.size() == 1 ? 1 : tensor->shape[0];
  row_bytes_ = tensor->element_count() / row_count_ * SizeOf(engine_->model().dtype);
  return absl::OkStatus();
}

void TensorStream::ReadNext() {
  chunk_rows_ = std::clamp<int64_t>(kChunkBytes / row_bytes_, 1, row_count_ - next_row_);
  engine_->ReadTensor(tensor_, next_row_, chunk_rows_,
                      [this](absl::StatusOr<TensorRows> rows) { Send(std::move(rows)); });
}

void TensorStream::Send(absl::StatusOr<TensorRows> rows) {
  if (!rows.ok()) return End(rows.status());
  if (stopped()) return End(absl::OkStatus());
  if (weights_version_.value_or(rows->weights_version) != rows->weights_version) {
    return End(Error(absl::StatusCode::kUnavailable, Reason::kWeightsChanged,
                     absl::StrCat("the weights went from version ", *weights_version_, " to ", rows->weights_version,
                                  " while row ", next_row_, " was read; read again")));
  }
  weights_version_ = rows->weights_version;
  chunk_.set_byte_offset(next_row_ * row_bytes_);
  chunk_.set_total_byte_count(row_count_ * row_bytes_);
  chunk_.set_weights_version(rows->weights_version);
  chunk_.set_data(std::move(rows->bytes));
  next_row_ += chunk_rows_;
  SetWaiting(true);
  StartWrite(&chunk_);
}

}  // namespace shardmlp
