// The shardmlp client: forward and backward of remote MLP layers on the caller's own memory, and the steps of training.
//
//   auto client = shardmlp::Client::Connect("localhost:50051");
//   auto session = (*client)->OpenSession({.run_id = "demo"});
//   auto version = (*session)->Forward(0, x, y);             // x [T, H], y [T, O]: f32, bf16, f16 or f64
//   (*session)->Backward(0, *version, x, dy, dx);
//   auto sealed = (*session)->SealStep();
//   (*session)->CommitStep({.groups = {{names_of_all_tensors, AdamW{.learning_rate = 1e-3}}}});
//
// Thread-safety: all methods may be called from several threads.
// Failure: absl::Status with a Reason (kernels/status.h). What can be sent again safely is, with back-off, within
// RetryOptions; the server counts a backward once however often it is sent. Then UNAVAILABLE (UNREACHABLE) names the
// server, the tries and the last failure.
// Processes: a client does not survive fork(); what uses one in the child makes its own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/options.h"
#include "client/cpp/served_metrics.h"
#include "client/cpp/served_model.h"
#include "client/cpp/session.h"

namespace shardmlp {

class Client {
 public:
  // `target`: "host:port" or "unix:/path". Reads the model once, which also proves the connection and the credentials.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& target, const ClientOptions& options = {});
  // Private to Connect.
  Client(std::unique_ptr<Connections> connections, ServedModel model);
  ~Client();

  // As read when connecting.
  const ServedModel& model() const { return model_; }
  // Reads it again.
  absl::StatusOr<ServedModel> GetModel(bool checksums = false);
  // What /metrics has, as it is now.
  absl::StatusOr<std::vector<ClientSeries>> GetMetrics();
  // Has the server drain, and waits until it has, no longer than `timeout`; it then ends. One try: a server that goes
  // away in between may have drained. DEADLINE_EXCEEDED (STALLED) where it is not done in time, and goes on.
  absl::StatusOr<ClientDrain> Drain(absl::Duration timeout);

  // The session must not outlive the client. One that was asked for, and whose answer was not waited for, is closed.
  absl::StatusOr<std::unique_ptr<Session>> OpenSession(const SessionOptions& options);

  // Fills `to`, of exactly the tensor's size, with its weights in the file's shape and ClientTensor::dtype.
  // Returns the weights version that they are of: whoever reads several compares them.
  absl::StatusOr<int64_t> ReadTensor(const std::string& name, absl::Span<char> to);

  absl::StatusOr<ClientCheckpoint> SaveCheckpoint(const std::string& name);
  // Ends the open attempt of every session; each then calls Resync.
  absl::StatusOr<ClientPosition> RestoreCheckpoint(const std::string& name);
  // Oldest first.
  absl::StatusOr<std::vector<ClientCheckpoint>> ListCheckpoints();
  // Returns what was deleted; the name alone where a lost answer said what.
  absl::StatusOr<ClientCheckpoint> DeleteCheckpoint(const std::string& name);

 private:
  const std::unique_ptr<Connections> connections_;
  const ServedModel model_;
};

}  // namespace shardmlp
