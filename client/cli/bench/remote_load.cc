#include "client/cli/bench/remote_load.h"

#include <unistd.h>

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/elements.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr absl::Duration kDiscardWithin = absl::Seconds(5);

// `count` elements: some thousand numbers of [-1, 1], over and over.
std::string MakeElements(int64_t count, DType dtype) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> sixty_fourths(-64, 64);
  std::vector<double> values(4099);
  for (double& value : values) value = sixty_fourths(random) / 64.0;
  const std::string block = EncodeElements(values, dtype);
  std::string bytes;
  const auto size = static_cast<size_t>(count * SizeOf(dtype));
  bytes.reserve(size + block.size());
  while (bytes.size() < size) bytes += block;
  bytes.resize(size);
  return bytes;
}

int64_t WidestRow(const std::vector<ClientLayer>& layers) {
  int64_t widest = 0;
  for (const ClientLayer& layer : layers) widest = std::max({widest, layer.hidden_size, layer.output_size});
  return widest;
}

class RemoteLoad final : public LoadClient {
 public:
  RemoteLoad(std::unique_ptr<Client> client, const LoadShape& shape, SessionOptions session_options)
      : client_(std::move(client)),
        shape_(shape),
        session_options_(std::move(session_options)),
        weights_version_(client_->model().position.weights_version),
        inputs_(MakeElements(2 * shape.rows * WidestRow(shape.layers), shape.dtype)),
        output_(inputs_.size() / 2, 0) {}

  ~RemoteLoad() override {
    if (session_ != nullptr && shape_.train) session_->DiscardStep("bench", kDiscardWithin).IgnoreError();
  }

  absl::Status OpenSession() {
    SHARDMLP_ASSIGN_OR_RETURN(session_, client_->OpenSession(session_options_));
    return absl::OkStatus();
  }

  LoadCall Run() override {
    const auto count = static_cast<int64_t>(shape_.layers.size());
    const bool forward = next_ < count;
    const ClientLayer& layer = shape_.layers[forward ? next_ : 2 * count - 1 - next_];
    next_ = (next_ + 1) % (shape_.forward_only ? count : 2 * count);
    const CallKind kind = forward ? CallKind::kForward : CallKind::kBackward;
    LoadCall call{.kind = kind,
                  .cost = CostOf(layer, kind, shape_.rows, shape_.dtype, {.weight_gradient = shape_.train}),
                  .status = {}};
    if (session_ == nullptr) call.status = OpenSession();
    if (call.status.ok()) call.status = forward ? Forward(layer) : Backward(layer);
    if (!call.status.ok()) Recover(call.status);
    return call;
  }

 private:
  ConstMatrixView X(const ClientLayer& layer) const {
    return {inputs_.data(), shape_.rows, layer.hidden_size, shape_.dtype};
  }
  ConstMatrixView Dy(const ClientLayer& layer) const {
    return {inputs_.data() + inputs_.size() / 2, shape_.rows, layer.output_size, shape_.dtype};
  }
  MatrixView Output(int64_t cols) { return {output_.data(), shape_.rows, cols, shape_.dtype}; }

  absl::Status Forward(const ClientLayer& layer) {
    SHARDMLP_ASSIGN_OR_RETURN(const Forwarded forwarded,
                              session_->Forward(layer.layer, X(layer), Output(layer.output_size)));
    weights_version_ = forwarded.weights_version;
    return absl::OkStatus();
  }
  absl::Status Backward(const ClientLayer& layer) {
    return session_->Backward(layer.layer, weights_version_, X(layer), Dy(layer), Output(layer.hidden_size),
                              {.weight_gradient = shape_.train});
  }

  // So that the next call has a chance.
  void Recover(const absl::Status& failure) {
    const Reason reason = ReasonOf(failure);
    if (reason == Reason::kUnknownSession) session_ = nullptr;
    if (reason == Reason::kStaleWeights) next_ = 0;
    if (reason == Reason::kStepAborted && session_ != nullptr) {
      session_->DiscardStep("bench", kDiscardWithin).IgnoreError();
    }
  }

  const std::unique_ptr<Client> client_;
  const LoadShape shape_;
  const SessionOptions session_options_;
  int64_t weights_version_;
  const std::string inputs_;  // x and dy, each [rows, H or O]
  std::string output_;        // y or dx
  std::unique_ptr<Session> session_;
  int64_t next_ = 0;  // of a forward of each layer, and a backward of each
};

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<LoadClient>>> ConnectLoadClients(const std::string& target,
                                                                            const ClientOptions& options,
                                                                            const LoadShape& shape, int count) {
  const std::string run_id = absl::StrCat("bench-", getpid());
  std::vector<std::unique_ptr<LoadClient>> clients;
  for (int rank = 0; rank < count; ++rank) {
    SHARDMLP_ASSIGN_OR_RETURN(auto connected, Client::Connect(target, options));
    SessionOptions session{.run_id = run_id, .role = shape.train ? ClientRole::kTrain : ClientRole::kRead};
    if (shape.train) {
      session.trainer_count = count;
      session.trainer_rank = rank;
    }
    auto client = std::make_unique<RemoteLoad>(std::move(connected), shape, session);
    SHARDMLP_RETURN_IF_ERROR(client->OpenSession());
    clients.push_back(std::move(client));
  }
  return clients;
}

}  // namespace shardmlp
