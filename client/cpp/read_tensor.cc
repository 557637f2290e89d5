#include "client/cpp/read_tensor.h"

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "client/cpp/call_watch.h"
#include "client/cpp/retry.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

class TensorStream : public grpc::ClientReadReactor<v1::ReadTensorResponse> {
 public:
  TensorStream(absl::Span<char> to, CallWatch& watch) : to_(to), watch_(watch) {}

  void Start(v1::Model::Stub& stub, const v1::ReadTensorRequest& request) {
    stub.async()->ReadTensor(&context_, &request, this);
    StartRead(&chunk_);
    StartCall();
  }

  grpc::ClientContext& context() { return context_; }
  // For after the call is over. Why this side ended it, if it did.
  const absl::Status& failure() const { return failure_; }
  int64_t weights_version() const { return weights_version_; }
  absl::Status CheckComplete() const {
    if (received_ == static_cast<int64_t>(to_.size())) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("cut short after ", received_, " of ", to_.size(), " bytes"));
  }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) return;
    watch_.Progress();
    failure_ = Take();
    if (failure_.ok()) {
      StartRead(&chunk_);
    } else {
      context_.TryCancel();
    }
  }

  absl::Status Take() {
    const auto size = static_cast<int64_t>(to_.size());
    const auto count = static_cast<int64_t>(chunk_.data().size());
    if (received_ == 0) weights_version_ = chunk_.weights_version();
    if (chunk_.byte_offset() != received_ || chunk_.total_byte_count() != size || count > size - received_ ||
        chunk_.weights_version() != weights_version_) {
      return Error(absl::StatusCode::kInternal, Reason::kInvalidRows,
                   absl::StrCat("the server sent bytes [", chunk_.byte_offset(), ", +", count, ") of ",
                                chunk_.total_byte_count(), " at weights version ", chunk_.weights_version(),
                                " where byte ", received_, " of ", size, " at version ", weights_version_, " is next"));
    }
    std::memcpy(to_.data() + received_, chunk_.data().data(), count);
    received_ += count;
    return absl::OkStatus();
  }

  void OnDone(const grpc::Status& status) override { watch_.Finish(status); }

  const absl::Span<char> to_;
  CallWatch& watch_;
  grpc::ClientContext context_;
  v1::ReadTensorResponse chunk_;
  int64_t received_ = 0;
  int64_t weights_version_ = 0;
  absl::Status failure_;
};

}  // namespace

absl::StatusOr<int64_t> ReadTensorOnce(Connections& connections, const std::string& name, absl::Span<char> to) {
  SHARDMLP_ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, connections.Next());
  v1::ReadTensorRequest request;
  request.set_name(name);
  CallWatch watch;
  TensorStream stream(to, watch);
  SHARDMLP_RETURN_IF_ERROR(connection->Authorize(stream.context()));
  stream.Start(connection->stub<v1::Model::Stub>(), request);
  const ClientOptions& options = connections.options();
  absl::Status status = watch.Await(stream.context(), *connection, options.stall_timeout, options.interrupted);
  if (!stream.failure().ok()) status = stream.failure();
  if (status.ok()) status = stream.CheckComplete();
  if (IsConnectionLost(status)) connections.Replace(connection);
  if (!status.ok()) return Annotate(status, absl::StrCat("ReadTensor of ", name));
  return stream.weights_version();
}

}  // namespace shardmlp
