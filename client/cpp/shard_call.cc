#include "client/cpp/shard_call.h"

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/call_watch.h"
#include "client/cpp/pinned_slices.h"
#include "kernels/status.h"
#include "proto/wire.h"
#include "shardmlp/v1/compute.pb.h"

namespace shardmlp {
namespace {

constexpr int kShardField = v1::ForwardRequest::kShardFieldNumber;
constexpr int kResultField = v1::ForwardResponse::kResultFieldNumber;
constexpr int kEndField = v1::ForwardResponse::kEndFieldNumber;
static_assert(kShardField == v1::BackwardRequest::kShardFieldNumber);
static_assert(kResultField == v1::BackwardResponse::kResultFieldNumber);
static_assert(kEndField == v1::BackwardResponse::kEndFieldNumber);

absl::Status BadAnswer(Reason reason, absl::string_view what) {
  return Error(absl::StatusCode::kInternal, reason, absl::StrCat("the server broke the protocol: ", what));
}

// The rows of `matrix` as one slice: the matrix's own memory, or a copy where gaps lie between the rows.
grpc::Slice SliceOf(ConstMatrixView matrix, PinnedSlices& pins) {
  if (matrix.contiguous()) return pins.Pin(matrix.data, matrix.byte_count());
  const int64_t row_bytes = matrix.cols * SizeOf(matrix.dtype);
  grpc::Slice copy(static_cast<size_t>(matrix.byte_count()));
  auto* to = const_cast<uint8_t*>(copy.begin());  // ours alone until it is sent
  for (int64_t row = 0; row < matrix.rows; ++row) {
    std::memcpy(to + row * row_bytes, matrix.Rows(row, 1).data, row_bytes);
  }
  return copy;
}

// Puts the rows of an answer where they belong, checking that they are the next ones.
class ResultRows {
 public:
  explicit ResultRows(MatrixView output) : output_(output) {}

  absl::Status Take(const WireShard& shard) {
    const WirePayload& payload = shard.payloads[0];
    if (shard.row_offset != next_row_ || shard.row_count < 1 || shard.row_count > output_.rows - next_row_) {
      return BadAnswer(Reason::kInvalidRows,
                       absl::StrCat("rows [", shard.row_offset, ", +", shard.row_count, ") of the result where row ",
                                    next_row_, " of ", output_.rows, " is next"));
    }
    const MatrixView rows = output_.Rows(next_row_, shard.row_count);
    if (payload.size() != rows.byte_count()) {
      return BadAnswer(Reason::kInvalidShape, absl::StrCat(payload.size(), " bytes of result, expected ",
                                                           rows.byte_count(), " for ", rows.ToString()));
    }
    if (rows.contiguous()) {
      payload.CopyTo(0, rows.byte_count(), rows.data);
    } else {
      const int64_t row_bytes = rows.cols * SizeOf(rows.dtype);
      for (int64_t row = 0; row < rows.rows; ++row) {
        payload.CopyTo(row * row_bytes, row_bytes, rows.Rows(row, 1).data);
      }
    }
    next_row_ += shard.row_count;
    return absl::OkStatus();
  }

  int64_t row_end() const { return next_row_; }
  bool complete() const { return next_row_ == output_.rows; }
  std::string ToString() const { return absl::StrCat(next_row_, " of ", output_.rows, " rows"); }

 private:
  const MatrixView output_;
  int64_t next_row_ = 0;
};

// gRPC calls OnWriteDone one at a time and OnReadDone one at a time, but one beside the other: what each of them uses
// is its own. Where rows are still to come, a write waits for Release, which goes on in its place.
class ShardStream : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  ShardStream(const ShardCall& call, PinnedSlices& pins, CallWatch& watch)
      : call_(call),
        pins_(pins),
        watch_(watch),
        in_place_(call.hooks.await_inputs ? 0 : call.inputs.front().rows),
        results_(call.output) {}

  // Where rows are still to come, RemoveHold has to follow once Release was called for the last time.
  void Start(grpc::GenericStub& stub) {
    stub.PrepareBidiStreamingCall(&context_, call_.method, {}, this);
    if (call_.hooks.await_inputs) AddHold();
    StartRead(&read_);
    outgoing_ = call_.header;
    StartWrite(&outgoing_);
    StartCall();
  }

  // Rows [0, row_end) of the inputs are in place.
  void Release(int64_t row_end) {
    {
      absl::MutexLock lock(&mutex_);
      in_place_ = row_end;
      if (!std::exchange(held_back_, false)) return;
    }
    WriteNext();
  }
  // Rows of the output that have arrived.
  int64_t arrived() const { return arrived_.load(std::memory_order_acquire); }

  grpc::ClientContext& context() { return context_; }
  // The rest is for after the call is over. Why this side ended it, if it did.
  const absl::Status& failure() const { return failure_; }
  absl::StatusOr<std::string> TakeEnd() {
    if (!ended_) return absl::UnavailableError("the answer was cut short: the stream closed without an end");
    if (!wrote_end_) return BadAnswer(Reason::kInvalidMessageOrder, "it answered before all rows were sent");
    return std::move(end_body_);
  }

 private:
  void OnWriteDone(bool ok) override {
    outgoing_.Clear();
    if (!ok) return;  // the call is ending; OnDone says why
    watch_.Progress();
    WriteNext();
  }

  void WriteNext() {
    const int64_t rows = call_.inputs.front().rows;
    if (next_row_ < rows) {
      const int64_t count = std::min(call_.rows_per_shard, rows - next_row_);
      if (HoldBack(next_row_ + count)) return;
      outgoing_ = MakeShard(next_row_, count);
      next_row_ += count;
      StartWrite(&outgoing_);
    } else if (!wrote_end_) {
      wrote_end_ = true;
      outgoing_ = call_.end;
      StartWriteLast(&outgoing_, grpc::WriteOptions());
    }
  }

  // Whether a shard has to wait for its rows.
  bool HoldBack(int64_t row_end) {
    absl::MutexLock lock(&mutex_);
    held_back_ = in_place_ < row_end;
    return held_back_;
  }

  grpc::ByteBuffer MakeShard(int64_t row, int64_t count) {
    std::vector<std::vector<grpc::Slice>> payloads;
    for (const ConstMatrixView& input : call_.inputs) {
      std::vector<grpc::Slice>& payload = payloads.emplace_back();
      if (!input.empty()) payload.push_back(SliceOf(input.Rows(row, count), pins_));
    }
    return MakeWireShard(kShardField, row, count, payloads);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    watch_.Progress();
    failure_ = TakeAnswer();
    read_.Clear();
    if (failure_.ok()) {
      StartRead(&read_);
    } else {
      context_.TryCancel();
    }
  }

  absl::Status TakeAnswer() {
    if (ended_) return BadAnswer(Reason::kInvalidMessageOrder, "a message after the end");
    absl::StatusOr<WireMessage> message = ReadWireMessage(read_, kResultField);
    if (!message.ok()) return BadAnswer(Reason::kMalformedMessage, message.status().message());
    if (message->field == kResultField) {
      SHARDMLP_RETURN_IF_ERROR(results_.Take(message->shard));
      arrived_.store(results_.row_end(), std::memory_order_release);
      if (call_.hooks.output_arrived) watch_.Notify();
      return absl::OkStatus();
    }
    if (message->field != kEndField) return BadAnswer(Reason::kMalformedMessage, "an answer that is neither");
    if (!results_.complete()) {
      return BadAnswer(Reason::kInvalidRows, absl::StrCat("the answer ends after ", results_.ToString()));
    }
    ended_ = true;
    end_body_ = std::move(message->body);
    return absl::OkStatus();
  }

  void OnDone(const grpc::Status& status) override { watch_.Finish(status); }

  const ShardCall& call_;
  PinnedSlices& pins_;
  CallWatch& watch_;
  grpc::ClientContext context_;

  absl::Mutex mutex_;
  int64_t in_place_ ABSL_GUARDED_BY(mutex_);
  bool held_back_ ABSL_GUARDED_BY(mutex_) = false;

  grpc::ByteBuffer outgoing_;
  int64_t next_row_ = 0;
  bool wrote_end_ = false;

  grpc::ByteBuffer read_;
  ResultRows results_;
  std::atomic<int64_t> arrived_ = 0;
  absl::Status failure_;
  bool ended_ = false;
  std::string end_body_;
};

// Lets each shard go when its rows are in place.
absl::Status ReleaseRows(const ShardCall& call, ShardStream& stream) {
  const int64_t rows = call.inputs.front().rows;
  for (int64_t row_end = 0; row_end < rows;) {
    row_end = std::min(row_end + call.rows_per_shard, rows);
    SHARDMLP_RETURN_IF_ERROR(call.hooks.await_inputs(row_end));
    stream.Release(row_end);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> RunStream(Connection& connection, const ShardCall& call, PinnedSlices& pins,
                                      const ClientOptions& options) {
  CallWatch watch;
  ShardStream stream(call, pins, watch);
  const auto output_arrived = [&] {
    return call.hooks.output_arrived ? call.hooks.output_arrived(stream.arrived()) : absl::OkStatus();
  };
  SHARDMLP_RETURN_IF_ERROR(output_arrived());  // none yet
  SHARDMLP_RETURN_IF_ERROR(connection.Authorize(stream.context()));
  stream.Start(connection.stub<grpc::GenericStub>());
  if (call.hooks.await_inputs) {
    const absl::Status released = ReleaseRows(call, stream);
    stream.RemoveHold();
    if (!released.ok()) {
      watch.Cancel(stream.context(), connection);
      return released;
    }
  }
  const absl::Status status =
      watch.Await(stream.context(), connection, options.stall_timeout, options.interrupted, output_arrived);
  SHARDMLP_RETURN_IF_ERROR(stream.failure());
  SHARDMLP_RETURN_IF_ERROR(status);
  SHARDMLP_ASSIGN_OR_RETURN(std::string end, stream.TakeEnd());
  SHARDMLP_RETURN_IF_ERROR(output_arrived());
  return end;
}

}  // namespace

absl::StatusOr<std::string> RunShardCall(Connection& connection, const ShardCall& call, const ClientOptions& options) {
  PinnedSlices pins;
  absl::StatusOr<std::string> end = RunStream(connection, call, pins, options);
  if (!pins.AwaitReleased(kCancelGrace)) {
    connection.Break();
    pins.AwaitReleased();
  }
  return end;
}

}  // namespace shardmlp
