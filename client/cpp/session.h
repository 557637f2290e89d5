// A trainer's, or reader's, place on the server: forward, backward and the steps of training.
//
// Thread-safety: all methods may be called from several threads; calls run side by side.
// Ownership: matrices are the caller's. Rows without gaps between them are sent from where they lie, and all must stay
// until the method returns; whatever it returns, nothing refers to them any more. An output must not overlap an input,
// which may have to be sent again.
// Failure: absl::Status with a Reason (kernels/status.h). ABORTED means that the step's attempt is over: drop local
// gradients, call DiscardStep, and run the batch again. NOT_FOUND (UNKNOWN_SESSION) means that the server has dropped
// this session, or restarted: open another. Where that is at the next step, the seal or commit that failed so was done
// (TakeUp).
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/row_hooks.h"
#include "client/cpp/served_model.h"
#include "kernels/matrix.h"
#include "kernels/optimizer.h"

namespace shardmlp {

namespace v1 {
class BackwardHeader;
}

class Connections;
class Heartbeat;

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
  std::vector<std::string> tensors;  // from ServedModel::tensors; the groups hold each exactly once
  Hyperparameters hyperparameters;
  friend bool operator==(const ClientParameterGroup&, const ClientParameterGroup&) = default;
};

struct CommitOptions {
  std::vector<ClientParameterGroup> groups = {};
  double gradient_scale = 1;     // clip factor / (loss scale * averaged trainers)
  bool fresh_optimizer = false;  // zeroes the server's optimizer state first, as a new optimizer's first step needs
};

// Whether the server keeps a forward's x for its backward, which then need not send it.
enum class ClientKeepInput {
  kIfRoom,  // until that backward, or for as long as nobody else needs the room
  kPinned,  // until Release, or the session ends, or the weights change: the caller may drop x
};

struct ForwardOptions {
  // For a backward. Only where one may follow: until then it takes room on the server.
  std::optional<ClientKeepInput> keep_input = {};
  RowHooks hooks = {};
};

struct BackwardOptions {
  bool weight_gradient = true;  // false: asks for none on the server
  // The forward's, where it has one. x is then sent only where the server does not have it any more; where x has no
  // data (a pinned one that the caller dropped), that is FAILED_PRECONDITION (TICKET_MISSING).
  int64_t ticket = 0;
  RowHooks hooks = {};
};

// What a forward leaves for its backward.
struct Forwarded {
  int64_t weights_version = 0;
  int64_t ticket = 0;         // of x in the server's stash; 0: the server does not keep it
  bool gate_up_kept = false;  // and of what the gate and up projections gave
};

// From Client::OpenSession. Its own thread renews the lease.
class Session {
 public:
  // Private to Client: `connections` and `model` must outlive the session.
  Session(Connections& connections, const ServedModel& model, int64_t id, absl::Duration lease,
          const ClientPosition& position, bool run_under_way);
  // Closes it, ignoring the result.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  int64_t id() const { return id_; }
  // Whether, when this was opened, other trainers of the run had committed steps and were there yet.
  bool run_under_way() const { return run_under_way_; }
  // The step that backward calls go to. Changed by CommitStep, DiscardStep, Resync and TakeUp alone, so that an attempt
  // that ended under this session is noticed (ABORTED) and never slipped past.
  ClientPosition position() const ABSL_LOCKS_EXCLUDED(mutex_);

  // y = MLP(x). x [T, H], y [T, O] of one dtype, any row stride. FAILED_PRECONDITION (STASH_FULL) where there is no
  // room for an x that is to be pinned.
  absl::StatusOr<Forwarded> Forward(int layer, ConstMatrixView x, MatrixView y, const ForwardOptions& options = {});
  // dx = the input gradient; adds (+=) the weight gradients to the open step. x [T, H], dy [T, O], dx [T, H] of one
  // dtype. An empty dx with T > 0 asks for no input gradient. `weights_version`: the forward's.
  absl::Status Backward(int layer, int64_t weights_version, ConstMatrixView x, ConstMatrixView dy, MatrixView dx,
                        const BackwardOptions& options = {});
  // No backward will name `ticket` any more. Never blocks: the server hears of it with the next call.
  void Release(int64_t ticket) ABSL_LOCKS_EXCLUDED(mutex_);

  // Says that all backward calls of this step were made, and waits for the other trainers. UNAVAILABLE
  // (TRAINER_MISSING) names those who have not sealed, where the wait was too long for the server, or for
  // ClientOptions::seal_timeout.
  absl::StatusOr<SealedStep> SealStep();
  // Applies the sealed step.
  absl::StatusOr<ClientPosition> CommitStep(const CommitOptions& options);
  // Drops what the step holds, sealed or not, and moves to the attempt that is open now. Succeeds also where the
  // attempt had ended by itself. Gives up after `within`, where that is less than the client's own times.
  absl::StatusOr<ClientPosition> DiscardStep(const std::string& reason,
                                             absl::Duration within = absl::InfiniteDuration());
  // Stands where a session of this trainer stood that was lost, and whose step the server has committed: a seal or
  // commit of it that was lost with its answer can then be asked for again.
  void TakeUp(const ClientPosition& lost) { MoveTo(lost); }
  // Rows that backward sent with weight gradients in this attempt, over all layers.
  int64_t pending_row_count() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Follows a restore: moves to the position that the server reports now.
  absl::StatusOr<ClientPosition> Resync();

  // Ends it now. Repeats succeed.
  absl::Status Close();

 private:
  std::vector<int64_t> ReleasedTickets() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The server has heard of `tickets`.
  void Forget(const std::vector<int64_t>& tickets) ABSL_LOCKS_EXCLUDED(mutex_);
  // `x` [T, 0] where the header names a ticket.
  absl::Status RunBackward(const v1::BackwardHeader& header, ConstMatrixView x, ConstMatrixView dy, MatrixView dx,
                           const RowHooks& hooks);
  // `timed_out`, of a seal that was waited for for too long; where the server says who is missing, that.
  absl::Status NameMissing(const absl::Status& timed_out, int64_t step);
  ClientPosition MoveTo(const ClientPosition& position) ABSL_LOCKS_EXCLUDED(mutex_);

  Connections& connections_;
  const ServedModel& model_;
  const int64_t id_;
  const bool run_under_way_;
  std::atomic<int64_t> next_call_id_ = 1;

  mutable absl::Mutex mutex_;
  ClientPosition position_ ABSL_GUARDED_BY(mutex_);
  // Backward rows with weight gradients that the open attempt has from this session, by layer.
  std::map<int, int64_t> rows_ ABSL_GUARDED_BY(mutex_);
  std::vector<int64_t> released_tickets_ ABSL_GUARDED_BY(mutex_);  // that the server has not heard of
  // Null once closed.
  std::unique_ptr<Heartbeat> heartbeat_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardmlp
