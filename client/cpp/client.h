// The shardmlp client: forward and backward of remote MLP layers on the caller's own memory, and the steps of training.
//
//   auto client = shardmlp::Client::Connect("localhost:50051");
//   auto session = (*client)->OpenSession({.run_id = "demo"});
//   auto version = (*session)->Forward(0, x, y);             // x [T, H], y [T, O]: f32, bf16, f16 or f64
//   (*session)->Backward(0, *version, x, dy, dx);
//   auto sealed = (*session)->SealStep();
//   (*session)->CommitStep({.groups = {{sealed_tensors, AdamW{.learning_rate = 1e-3}}}});
//
// Thread-safety: Client and Session may be used from several threads; calls of one session run side by side.
// Ownership: matrices are the caller's, are not copied on the way out, and must stay until the method returns.
// Failure: absl::Status with a Reason (kernels/status.h). What can be sent again safely is, with back-off, within
// RetryOptions; the server counts a backward once however often it is sent. ABORTED means that the step's attempt is
// over: drop local gradients, call DiscardStep, and run the batch again.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/matrix.h"
#include "kernels/optimizer.h"

namespace shardmlp {

struct RetryOptions {
  absl::Duration budget = absl::Seconds(60);          // from the first failure of a call to giving up
  absl::Duration initial_backoff = absl::Milliseconds(100);
  absl::Duration max_backoff = absl::Seconds(5);
};

struct ClientOptions {
  int connections = 1;                                // TCP connections; calls take them in turn
  absl::Duration connect_timeout = absl::Seconds(10);
  absl::Duration stall_timeout = absl::Seconds(120);  // a call that neither sends nor gets a message for so long fails
  absl::Duration seal_timeout = absl::Minutes(10);    // above the server's own
  RetryOptions retry;
};

struct ClientPosition {
  int64_t step = 0;
  int64_t attempt = 0;
  int64_t weights_version = 0;
};

struct ClientLayer {
  int layer = 0;
  std::string module;      // "model.layers.0.mlp"
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t output_size = 0;
  std::string activation;  // canonical name, as kernels/activation.h
  bool gated = false;
};

struct ClientTensor {
  std::string name;        // as in the Hugging Face files
  int layer = 0;
  std::vector<int64_t> shape;
  DType dtype = DType::kF32;
  uint64_t checksum = 0;   // XXH3-64; 0 unless asked for
};

struct ClientTrainer {
  std::string run_id;
  int trainer_rank = 0;
  int trainer_count = 0;
  bool sealed = false;
};

struct ClientMemoryPlan {
  int64_t weights_bytes = 0;
  int64_t gradients_bytes = 0;
  int64_t master_weights_bytes = 0;
  int64_t optimizer_bytes = 0;
  int64_t workspace_bytes = 0;
  int64_t staging_bytes = 0;
};

// What the server serves, and how.
struct ServedModel {
  std::string model_type;
  DType compute_dtype = DType::kF32;
  bool frozen = false;
  std::vector<ClientLayer> layers;
  std::vector<ClientTensor> tensors;
  int64_t max_message_bytes = 0;
  int64_t preferred_shard_bytes = 0;
  int64_t tile_row_count = 0;
  int64_t max_call_count = 0;
  ClientPosition position;
  std::vector<ClientTrainer> trainers;
  ClientMemoryPlan memory;

  // Null where the server does not serve it.
  const ClientLayer* FindLayer(int layer) const;
};

enum class ClientRole { kTrain, kRead };

struct SessionOptions {
  std::string run_id = "default";
  ClientRole role = ClientRole::kTrain;
  int trainer_count = 1;
  int trainer_rank = 0;
};

struct SealedStep {
  std::vector<double> tensor_sums_of_squares;  // ServedModel::tensors' order; unscaled, summed over trainers
  bool finite = true;
  std::string non_finite_origin;
};

struct ClientParameterGroup {
  std::vector<std::string> tensors;            // from ServedModel::tensors; the groups hold each exactly once
  Hyperparameters hyperparameters;
};

struct CommitOptions {
  std::vector<ClientParameterGroup> groups;
  double gradient_scale = 1;                   // clip factor / (loss scale * averaged trainers)
};

struct ClientCheckpoint {
  std::string name;
  int64_t step = 0;
  int64_t byte_count = 0;
};

// A trainer's, or reader's, place on the server. Its own thread renews the lease. The destructor closes it.
class Session {
 public:
  virtual ~Session() = default;

  virtual int64_t id() const = 0;
  // The step that backward calls go to. Changed by CommitStep and DiscardStep alone, so that an attempt that ended
  // under this session is noticed (ABORTED) and never slipped past.
  virtual ClientPosition position() const = 0;

  // y = MLP(x). x [T, H], y [T, O] of one dtype, any row stride. Returns the weights version for Backward.
  virtual absl::StatusOr<int64_t> Forward(int layer, ConstMatrixView x, MatrixView y) = 0;
  // dx = the input gradient; adds the weight gradients to the open step. x [T, H], dy [T, O], dx [T, H] of one dtype.
  // An empty dx with T > 0 asks for no input gradient; `weight_gradient` false asks for none on the server.
  virtual absl::Status Backward(int layer, int64_t weights_version, ConstMatrixView x, ConstMatrixView dy,
                                MatrixView dx, bool weight_gradient = true) = 0;

  // Says that all backward calls of this step were made, and waits for the other trainers.
  virtual absl::StatusOr<SealedStep> SealStep() = 0;
  // Applies the sealed step.
  virtual absl::StatusOr<ClientPosition> CommitStep(const CommitOptions& options) = 0;
  // Drops what the step holds, sealed or not, and moves to the attempt that is open now. Succeeds also where the attempt
  // had ended by itself.
  virtual absl::StatusOr<ClientPosition> DiscardStep(const std::string& reason) = 0;
  // Rows that backward sent with weight gradients in this attempt, over all layers.
  virtual int64_t pending_row_count() const = 0;
  // Follows a restore: moves to the position that the server reports now.
  virtual absl::StatusOr<ClientPosition> Resync() = 0;

  // Ends it now; the destructor otherwise does, ignoring the result.
  virtual absl::Status Close() = 0;
};

class Client {
 public:
  virtual ~Client() = default;

  // `target`: "host:port" or "unix:/path". Reads the model once, which also proves the connection.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& target, const ClientOptions& options = {});

  // As read when connecting.
  virtual const ServedModel& model() const = 0;
  // Reads it again.
  virtual absl::StatusOr<ServedModel> GetModel(bool checksums = false) = 0;

  // The session must not outlive the client.
  virtual absl::StatusOr<std::unique_ptr<Session>> OpenSession(const SessionOptions& options) = 0;

  // Fills `to`, of exactly the tensor's size, with its weights in the file's shape and ClientTensor::dtype.
  virtual absl::Status ReadTensor(const std::string& name, absl::Span<char> to) = 0;

  virtual absl::StatusOr<ClientCheckpoint> SaveCheckpoint(const std::string& name) = 0;
  virtual absl::StatusOr<ClientPosition> RestoreCheckpoint(const std::string& name) = 0;
  virtual absl::StatusOr<std::vector<ClientCheckpoint>> ListCheckpoints() = 0;
};

}  // namespace shardmlp
