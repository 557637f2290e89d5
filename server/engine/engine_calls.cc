// ServingEngine's calls: admission, and the tiles of calls on the device thread.
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/status.h"
#include "server/engine/serving_engine.h"
#include "server/log.h"

namespace shardmlp {

absl::StatusOr<std::shared_ptr<Call>> ServingEngine::StartForward(const ForwardSpec& spec, CallSink& sink) {
  CallSpec call;
  call.pass = Pass::kForward;
  call.header.session_id = spec.session_id;
  call.header.layer = spec.layer;
  call.header.row_count = spec.row_count;
  call.header.dtype = spec.dtype;
  call.header.weight_gradient = false;
  call.header.call_id = spec.call_id;
  call.keep_input = spec.keep_input;
  call.header.released_tickets = spec.released_tickets;
  return StartCall(call, sink);
}

absl::StatusOr<std::shared_ptr<Call>> ServingEngine::StartBackward(const BackwardSpec& spec, CallSink& sink) {
  CallSpec call;
  call.pass = Pass::kBackward;
  call.header = spec;
  return StartCall(call, sink);
}

absl::Status ServingEngine::CheckHeader(CallSpec& spec) const {
  const BackwardSpec& header = spec.header;
  const LayerSpec* const layer = model_.FindLayer(header.layer);
  if (layer == nullptr) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kUnknownLayer,
                 absl::StrCat("layer ", header.layer, " is not served here; this server has layers ",
                              model_.layers.front().layer, " to ", model_.layers.back().layer));
  }
  spec.layer = layer - model_.layers.data();
  spec.x_cols = layer->mlp.hidden_size;
  spec.dy_cols = layer->mlp.output_size;
  spec.gate_up_cols = layer->mlp.gate_up_size();
  spec.compute_dtype = layer->mlp.dtype;
  if (header.row_count < 0) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidRows,
                 absl::StrCat("row_count is ", header.row_count, "; expected 0 or more"));
  }
  if (SizeOf(header.dtype) > SizeOf(WidestWireDType(model_.dtype))) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidDType,
                 absl::StrCat("got ", Name(header.dtype), " activations; a server that computes in ",
                              Name(model_.dtype), " takes f32, bf16 and f16"));
  }
  if (header.released_tickets.size() > kMaxReleasedTickets) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 absl::StrCat("the header releases ", header.released_tickets.size(), " tickets; expected at most ",
                              kMaxReleasedTickets));
  }
  if (spec.pass == Pass::kForward) return absl::OkStatus();
  if (header.weight_gradient && header.call_id <= 0) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 absl::StrCat("call_id is ", header.call_id, "; expected a positive one"));
  }
  if (header.weight_gradient && options_.frozen) {
    return Error(absl::StatusCode::kFailedPrecondition, Reason::kFrozen, "weight gradients asked of a frozen server");
  }
  return absl::OkStatus();
}

absl::Status ServingEngine::CheckVersion(const BackwardSpec& header, int64_t weights_version) const {
  if (header.weights_version == weights_version) return absl::OkStatus();
  return Error(
      absl::StatusCode::kFailedPrecondition, Reason::kStaleWeights,
      absl::StrCat("the forward ran on weights version ", header.weights_version, " and the server has version ",
                   weights_version, "; run the forward again"),
      {{"got_version", absl::StrCat(header.weights_version)}, {"weights_version", absl::StrCat(weights_version)}});
}

absl::StatusOr<std::shared_ptr<Call>> ServingEngine::StartCall(CallSpec spec, CallSink& sink) {
  SHARDMLP_RETURN_IF_ERROR(CheckHeader(spec));
  const BackwardSpec& header = spec.header;
  absl::MutexLock lock(&mutex_);
  if (draining_) return ShuttingDown();
  SHARDMLP_RETURN_IF_ERROR(Usable());
  SHARDMLP_ASSIGN_OR_RETURN(const SessionSpec session, sessions_.Find(header.session_id, options_.clock()));
  if (spec.pass == Pass::kBackward) {
    if (header.weight_gradient && session.role == SessionRole::kRead) {
      return Error(absl::StatusCode::kFailedPrecondition, Reason::kFrozen,
                   "weight gradients asked in a read session; open a train session");
    }
    if (header.weight_gradient) SHARDMLP_RETURN_IF_ERROR(step_.CheckOpen(header.step, header.attempt));
    SHARDMLP_RETURN_IF_ERROR(CheckVersion(header, step_.position().weights_version));
  }
  SHARDMLP_ASSIGN_OR_RETURN(std::shared_ptr<Lane> lane, lanes_->Acquire(session.role));
  SHARDMLP_ASSIGN_OR_RETURN(std::shared_ptr<KeptRows> kept, UseStash(session, spec));
  CallHost& host = *this;
  TileCall::Memory memory{std::move(lane), std::move(kept)};
  auto call = std::make_shared<TileCall>(host, sink, metrics_, spec, std::move(memory), plan_.tile_row_count);
  sessions_.CallOpened(header.session_id);
  metrics_.SetOpenCalls(++open_calls_);
  std::erase_if(calls_, [](const std::weak_ptr<TileCall>& weak) { return weak.expired(); });
  calls_.push_back(call);
  return call;
}

absl::StatusOr<std::shared_ptr<KeptRows>> ServingEngine::UseStash(const SessionSpec& session, CallSpec& spec) {
  const BackwardSpec& header = spec.header;
  for (const int64_t ticket : header.released_tickets) stash_->Release(ticket, header.session_id);
  spec.header.released_tickets.clear();
  const Stash::Call call{header.session_id, header.layer, header.row_count, header.dtype};
  if (spec.x_kept()) return stash_->Find(header.ticket, call);
  if (spec.keep_input == KeepInput::kNo || header.row_count == 0) return nullptr;
  const Stash::Claim claim{.pinned = spec.keep_input == KeepInput::kPinned,
                           .reader = session.role == SessionRole::kRead,
                           .call_id = header.call_id};
  const Stash::RowSize row_size{spec.x_cols * SizeOf(header.dtype), spec.gate_up_cols * SizeOf(spec.compute_dtype)};
  Stash::Kept kept = stash_->Keep(call, claim, row_size, header.row_count / plan_.tile_row_count + 1);
  if (claim.pinned && kept.rows == nullptr) return stash_->Full(call, claim, row_size);
  spec.header.ticket = kept.ticket;
  spec.gate_up_kept = kept.rows != nullptr && kept.rows->gate_up != nullptr;
  return std::move(kept.rows);
}

void ServingEngine::CallFinished(const CallSpec& spec, bool answered) {
  if (Logs(LogLevel::kDebug)) {
    Log(LogLevel::kDebug, answered ? "call answered" : "call not answered",
        {{"pass", spec.pass == Pass::kForward ? "forward" : "backward"},
         {"session", spec.header.session_id},
         {"call", spec.header.call_id},
         {"layer", spec.header.layer},
         {"rows", spec.header.row_count}});
  }
  absl::MutexLock lock(&mutex_);
  sessions_.CallClosed(spec.header.session_id, options_.clock());
  if (spec.header.ticket != 0) stash_->Finished(spec.header.ticket, spec.pass, answered);
  metrics_.SetOpenCalls(--open_calls_);
}

void ServingEngine::SubmitTile(int64_t session_id, std::unique_ptr<TileJob> job) {
  scheduler_->SubmitTile(session_id, std::move(job));
}

absl::StatusOr<CallHost::Admitted> ServingEngine::StartTile(const CallSpec& spec, const Tile& tile, TileRows rows) {
  SHARDMLP_RETURN_IF_ERROR(usable());
  if (spec.header.weight_gradient) return StartAddingTile(spec, tile, rows);
  Admitted admitted;
  admitted.weights_version = weights_version();
  if (spec.pass == Pass::kBackward) SHARDMLP_RETURN_IF_ERROR(CheckVersion(spec.header, admitted.weights_version));
  auto done = spec.pass == Pass::kForward ? compute_->Forward(rows) : compute_->Backward(rows);
  SHARDMLP_RETURN_IF_ERROR(NoteDevice(done.status()));
  admitted.done = *std::move(done);
  return admitted;
}

absl::StatusOr<CallHost::Admitted> ServingEngine::StartAddingTile(const CallSpec& spec, const Tile& tile,
                                                                  TileRows rows) {
  const BackwardSpec& header = spec.header;
  const Contribution contribution{header.session_id, header.call_id, header.layer, header.row_count,
                                  tile.row_begin,    tile.row_count, tile.dy_hash};
  Admitted admitted;
  {
    Outbox outbox;
    absl::MutexLock lock(&mutex_);
    if (clear_owed_) {
      return Error(absl::StatusCode::kResourceExhausted, Reason::kOverloaded,
                   "the gradients of an attempt that is over are on their way through the replicas; send it again");
    }
    std::string non_finite;
    if (tile.non_finite_row >= 0) {
      SHARDMLP_ASSIGN_OR_RETURN(const SessionSpec session, sessions_.Find(header.session_id, options_.clock()));
      non_finite = absl::StrCat("trainer rank ", session.trainer_rank, ", session ", header.session_id, ", layer ",
                                header.layer, ", call ", header.call_id, ", row ", tile.non_finite_row);
    }
    SHARDMLP_ASSIGN_OR_RETURN(const LedgerVerdict verdict,
                              step_.Admit(contribution, header.step, header.attempt, non_finite, outbox));
    admitted.repeated = verdict == LedgerVerdict::kRepeat;
    admitted.weights_version = step_.position().weights_version;
  }
  // What is not finite is answered and counted, but never added: the step can then only be discarded.
  rows.add_gradients = !admitted.repeated && tile.non_finite_row < 0;
  auto done = compute_->Backward(rows);
  SHARDMLP_RETURN_IF_ERROR(NoteDevice(done.status()));
  admitted.done = *std::move(done);
  if (admitted.repeated) metrics_.CountRepeatedRows(tile.row_count);
  return admitted;
}

absl::Status ServingEngine::FinishTile(const Event& done) { return NoteDevice(backend_->Synchronize(done)); }

absl::Status ServingEngine::NoteDevice(absl::Status status) {
  if (status.ok()) return status;
  const absl::Status failure =
      Error(absl::StatusCode::kInternal, Reason::kDeviceFailed, absl::StrCat("the device failed: ", status.message()));
  Fail(failure);
  return failure;
}

}  // namespace shardmlp
