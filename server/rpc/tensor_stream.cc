#include "server/rpc/tensor_stream.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr int64_t kChunkBytes = 1 << 20;  // of a chunk, unless one row is larger

}  // namespace

TensorStream* TensorStream::Start(const EngineSlot& engine, const std::string& tensor_name, const RpcRecord& record) {
  auto stream = std::make_unique<TensorStream>(record);
  TensorStream* const reactor = stream.get();
  reactor->self_ = std::move(stream);
  if (const absl::Status status = reactor->Open(engine, tensor_name); !status.ok()) {
    reactor->End(status);
  } else {
    reactor->ReadNext();
  }
  return reactor;
}

void TensorStream::OnWriteDone(bool ok) {
  if (!ok) {
    End(Error(absl::StatusCode::kCancelled, Reason::kCancelled, "the client went away while it read a tensor"));
  } else if (next_row_ == row_count_) {
    End(absl::OkStatus());
  } else {
    ReadNext();
  }
}

void TensorStream::OnDone() { self_.reset(); }

absl::Status TensorStream::Open(const EngineSlot& engine, const std::string& tensor_name) {
  SHARDMLP_ASSIGN_OR_RETURN(engine_, engine.Get());
  const std::vector<TensorSpec>& tensors = engine_->model().tensors;
  const auto tensor =
      std::find_if(tensors.begin(), tensors.end(), [&](const auto& t) { return t.name == tensor_name; });
  if (tensor == tensors.end()) {
    return Error(absl::StatusCode::kNotFound, Reason::kUnknownTensor,
                 absl::StrCat("no tensor \"", tensor_name, "\" here; ModelInfo.tensors names all ", tensors.size()),
                 {{"tensor", tensor_name}});
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
  StartWrite(&chunk_);
}

}  // namespace shardmlp
