#include "server/engine/tile_call.h"

#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/status.h"
#include "server/engine/finite.h"

namespace shardmlp {
namespace {

absl::Status InvalidRows(const std::string& message) {
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidRows, message);
}

absl::Status CheckSize(absl::string_view name, const ByteSource& payload, int64_t rows, int64_t cols, DType dtype) {
  // By division: `rows` is whatever the client says, and the product may overflow.
  const int64_t row_bytes = cols * SizeOf(dtype);
  if (payload.size() / row_bytes == rows && payload.size() % row_bytes == 0) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidShape,
               absl::StrCat(name, " has ", payload.size(), " bytes; expected ", row_bytes, " for each row of [", rows,
                            ", ", cols, "] ", Name(dtype)),
               {{"got_bytes", absl::StrCat(payload.size())}, {"row_bytes", absl::StrCat(row_bytes)}});
}

}  // namespace

// Of the dy of the tile that is being filled.
struct TileCall::HashState {
  HashState() : xxh(XXH3_createState()) {}
  HashState(const HashState&) = delete;
  HashState& operator=(const HashState&) = delete;
  ~HashState() { XXH3_freeState(xxh); }
  XXH3_state_t* const xxh;
};

// A tile's turn on the device.
class TileCall::Job final : public TileJob {
 public:
  Job(std::shared_ptr<TileCall> call, const Tile& tile) : call_(std::move(call)), tile_(tile) {}
  void Start() override { call_->StartTile(tile_, lane_, done_); }
  void Finish() override { call_->FinishTile(tile_, std::move(lane_), done_.get()); }

 private:
  const std::shared_ptr<TileCall> call_;
  const Tile tile_;
  std::shared_ptr<Lane> lane_;  // while the tile is on the device
  std::unique_ptr<Event> done_;
};

// Gives an output back to its call once its rows are sent.
class TileCall::ResultHold {
 public:
  ResultHold(std::shared_ptr<TileCall> call, std::shared_ptr<Lane> lane, int output)
      : call_(std::move(call)), lane_(std::move(lane)), output_(output) {}
  ResultHold(const ResultHold&) = delete;
  ResultHold& operator=(const ResultHold&) = delete;
  ~ResultHold() { call_->ReleaseOutput(output_); }

 private:
  const std::shared_ptr<TileCall> call_;
  const std::shared_ptr<Lane> lane_;
  const int output_;
};

TileCall::TileCall(CallHost& host, CallSink& sink, Metrics& metrics, const CallSpec& spec, std::shared_ptr<Lane> lane,
                   int64_t tile_rows)
    : host_(host),
      sink_(sink),
      metrics_(metrics),
      spec_(spec),
      tile_rows_(tile_rows),
      hash_(std::make_unique<HashState>()),
      lane_(std::move(lane)) {
  absl::MutexLock lock(&mutex_);
  for (int i = kLaneDepth - 1; i >= 0; --i) {
    free_inputs_.push_back(i);
    free_outputs_.push_back(i);
  }
}

TileCall::~TileCall() = default;

absl::Status TileCall::CheckShard(int64_t row_offset, int64_t row_count, int64_t skip, const ByteSource& x,
                                  const ByteSource* dy) const {
  const int64_t total = spec_.header.row_count;
  if (row_count < 1 || row_count > total) {
    return InvalidRows(absl::StrCat("a shard of ", row_count, " rows; expected 1 to the call's ", total));
  }
  if (row_offset < 0 || row_offset != placed_rows_ - skip) {
    return InvalidRows(absl::StrCat("a shard at row ", row_offset, "; expected row ", placed_rows_ - skip,
                                    ", since shards come in order without gap or overlap"));
  }
  if (row_count > total - row_offset) {
    return InvalidRows(
        absl::StrCat("a shard of ", row_count, " rows at row ", row_offset, "; the call has ", total, " rows"));
  }
  if (!spec_.x_kept()) {
    SHARDMLP_RETURN_IF_ERROR(CheckSize("x", x, row_count, spec_.x_cols, spec_.header.dtype));
  } else if (x.size() > 0) {
    return Error(
        absl::StatusCode::kInvalidArgument, Reason::kInvalidShape,
        absl::StrCat("x has ", x.size(), " bytes; expected none, since the header names ticket ", spec_.header.ticket));
  }
  if (dy != nullptr) SHARDMLP_RETURN_IF_ERROR(CheckSize("dy", *dy, row_count, spec_.dy_cols, spec_.header.dtype));
  return absl::OkStatus();
}

std::shared_ptr<Lane> TileCall::OpenLane() const {
  absl::MutexLock lock(&mutex_);
  return lane_;
}

bool TileCall::SetFinished() {
  if (finished()) return false;
  lane_ = nullptr;
  waiting_.clear();
  return true;
}

absl::StatusOr<int64_t> TileCall::Place(int64_t row_offset, int64_t row_count, int64_t skip, const ByteSource& x,
                                        const ByteSource* dy) {
  SHARDMLP_RETURN_IF_ERROR(CheckShard(row_offset, row_count, skip, x, dy));
  const std::shared_ptr<Lane> lane = OpenLane();
  if (lane == nullptr) return Error(absl::StatusCode::kCancelled, Reason::kCancelled, "the call is over");
  int64_t placed = 0;
  while (placed < row_count - skip) {
    if (!filling_ && !TakeInput()) break;
    const int64_t rows = std::min(row_count - skip - placed, tile_rows_ - filled_.row_count);
    Fill(*lane, skip + placed, rows, x, dy);
    placed += rows;
    placed_rows_ += rows;
    if (filled_.row_count == tile_rows_ || placed_rows_ == spec_.header.row_count) SubmitFilled();
  }
  return placed;
}

bool TileCall::TakeInput() {
  absl::MutexLock lock(&mutex_);
  if (free_inputs_.empty()) {
    wants_room_ = true;
    return false;
  }
  filled_ = Tile();
  filled_.input = free_inputs_.back();
  free_inputs_.pop_back();
  filled_.row_begin = placed_rows_;
  filling_ = true;
  XXH3_64bits_reset(hash_->xxh);
  return true;
}

void TileCall::Fill(const Lane& lane, int64_t shard_row, int64_t rows, const ByteSource& x, const ByteSource* dy) {
  const int64_t size = SizeOf(spec_.header.dtype);
  const auto copy = [&](const ByteSource& from, const Buffer& buffer, int64_t cols) {
    const int64_t row_bytes = cols * size;
    char* to = static_cast<char*>(buffer.data()) + filled_.row_count * row_bytes;
    from.CopyTo(shard_row * row_bytes, rows * row_bytes, to);
    const ConstMatrixView copied(to, rows, cols, spec_.header.dtype);
    if ((dy != nullptr || spec_.header.ticket != 0) && filled_.non_finite_row < 0) {
      const int64_t row = FirstNonFiniteRow(copied);
      if (row >= 0) filled_.non_finite_row = filled_.row_begin + filled_.row_count + row;
    }
    return copied;
  };
  const Lane::Input& input = lane.inputs[filled_.input];
  int64_t bytes = spec_.x_kept() ? 0 : copy(x, input.x, spec_.x_cols).byte_count();
  if (dy != nullptr) {
    const ConstMatrixView copied = copy(*dy, input.dy, spec_.dy_cols);
    XXH3_64bits_update(hash_->xxh, copied.data, copied.byte_count());
    bytes += copied.byte_count();
  }
  metrics_.AddPayloadBytes(bytes, 0);
  filled_.row_count += rows;
}

void TileCall::SubmitFilled() {
  filling_ = false;
  filled_.dy_hash = XXH3_64bits_digest(hash_->xxh);
  filled_.complete = absl::Now();
  absl::MutexLock lock(&mutex_);
  if (finished()) return;
  waiting_.push_back(filled_);
  SubmitReady();
}

void TileCall::SubmitReady() {
  while (!waiting_.empty() && !(spec_.has_result() && free_outputs_.empty())) {
    Tile tile = waiting_.front();
    waiting_.pop_front();
    if (spec_.has_result()) {
      tile.output = free_outputs_.back();
      free_outputs_.pop_back();
    }
    host_.SubmitTile(spec_.header.session_id, std::make_unique<Job>(shared_from_this(), tile));
  }
}

absl::Status TileCall::End(int64_t row_count) {
  const int64_t expected = spec_.header.row_count;
  if (row_count != expected || placed_rows_ != expected) {
    return InvalidRows(absl::StrCat("the call ends with ", row_count, " rows said and ", placed_rows_,
                                    " rows sent; expected ", expected));
  }
  CallSummary summary;
  {
    absl::MutexLock lock(&mutex_);
    ended_ = true;
    if (answered_rows_ < expected || !SetFinished()) return absl::OkStatus();
    summary = Summary();
  }
  if (expected == 0) summary.weights_version = host_.weights_version();
  Finish(summary);
  return absl::OkStatus();
}

CallSummary TileCall::Summary() const {
  const int64_t ticket = spec_.pass == Pass::kForward ? spec_.header.ticket : 0;
  return {answered_rows_, summary_version_, repeated_rows_, ticket, spec_.gate_up_kept};
}

void TileCall::Cancel() {
  bool first = false;
  {
    absl::MutexLock lock(&mutex_);
    first = SetFinished();
    if (delivering_ && deliverer_ != std::this_thread::get_id()) {
      mutex_.Await(absl::Condition(this, &TileCall::NotDelivering));
    }
  }
  if (first) host_.CallFinished(spec_, /*answered=*/false);
}

void TileCall::Fail(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (!SetFinished()) return;
    delivering_ = true;
    deliverer_ = std::this_thread::get_id();
  }
  Finish(status);
  absl::MutexLock lock(&mutex_);
  delivering_ = false;
}

void TileCall::Finish(absl::StatusOr<CallSummary> summary) {
  host_.CallFinished(spec_, summary.ok());
  sink_.OnFinished(std::move(summary));
}

TileRows TileCall::RowsOf(const Tile& tile, const Lane& lane) const {
  const DType dtype = spec_.header.dtype;
  const Lane::Input& input = lane.inputs[tile.input];
  TileRows rows;
  rows.layer = spec_.layer;
  if (!spec_.x_kept()) rows.x = input.x.View(tile.row_count, spec_.x_cols, dtype);
  if (spec_.pass == Pass::kBackward) rows.dy = input.dy.View(tile.row_count, spec_.dy_cols, dtype);
  if (tile.output >= 0) rows.result = lane.outputs[tile.output].View(tile.row_count, spec_.result_cols(), dtype);
  return rows;
}

TileRows TileCall::RowsToCompute(Tile& tile, const Lane& lane) const {
  TileRows rows = RowsOf(tile, lane);
  if (lane.kept == nullptr) return rows;
  KeptRows& kept = *lane.kept;
  const int64_t call_rows = spec_.header.row_count;
  const auto rows_of = [&](void* data, int64_t cols, DType dtype) {
    return MatrixView(data, call_rows, cols, dtype).Rows(tile.row_begin, tile.row_count);
  };
  const int64_t index = tile.row_begin / tile_rows_;
  rows.kept_x = rows_of(kept.x.get(), spec_.x_cols, spec_.header.dtype);
  if (spec_.pass == Pass::kForward) {
    kept.non_finite_rows[index] = tile.non_finite_row;
    kept.gate_up_ready[index] = kept.gate_up != nullptr;
  } else if (const int64_t row = kept.non_finite_rows[index]; row >= 0) {
    tile.non_finite_row = tile.non_finite_row < 0 ? row : std::min(row, tile.non_finite_row);
  }
  if (kept.gate_up_ready[index])
    rows.kept_gate_up = rows_of(kept.gate_up.get(), spec_.gate_up_cols, spec_.compute_dtype);
  if (spec_.pass == Pass::kBackward) kept.gate_up_ready[index] = false;
  return rows;
}

void TileCall::StartTile(const Tile& tile, std::shared_ptr<Lane>& lane, std::unique_ptr<Event>& done) {
  lane = OpenLane();
  if (lane == nullptr) return;
  metrics_.ObserveStage(spec_.pass, Stage::kQueue, absl::Now() - tile.complete);
  Tile computed = tile;
  const TileRows rows = RowsToCompute(computed, *lane);
  absl::StatusOr<CallHost::Admitted> admitted = host_.StartTile(spec_, computed, rows);
  absl::Status status = admitted.status();
  if (status.ok() && weights_version_ != 0 && admitted->weights_version != weights_version_) {
    status = Error(absl::StatusCode::kUnavailable, Reason::kWeightsChanged,
                   "a step was committed in the middle of this call; send it again");
  }
  if (!status.ok()) {
    if (admitted.ok()) host_.FinishTile(*admitted->done).IgnoreError();
    lane = nullptr;
    return Fail(status);
  }
  weights_version_ = admitted->weights_version;
  done = std::move(admitted->done);
  absl::MutexLock lock(&mutex_);
  summary_version_ = weights_version_;
  if (admitted->repeated) repeated_rows_ += tile.row_count;
}

void TileCall::FinishTile(const Tile& tile, std::shared_ptr<Lane> lane, const Event* done) {
  if (done == nullptr) return;
  if (const absl::Status status = host_.FinishTile(*done); !status.ok()) {
    lane = nullptr;
    return Fail(status);
  }
  Deliver(tile, std::move(lane));
}

void TileCall::Deliver(const Tile& tile, std::shared_ptr<Lane> lane) {
  bool room = false;
  {
    absl::MutexLock lock(&mutex_);
    free_inputs_.push_back(tile.input);
    if (finished()) return;
    room = std::exchange(wants_room_, false);
    delivering_ = true;
    deliverer_ = std::this_thread::get_id();
  }
  metrics_.AddRows(spec_.pass, tile.row_count);
  if (room) sink_.OnRoom();
  // OnRoom may have cancelled.
  if (tile.output >= 0 && OpenLane() != nullptr) {
    const TileRows rows = RowsOf(tile, *lane);
    metrics_.AddPayloadBytes(0, rows.result.byte_count());
    sink_.OnResult({tile.row_begin, tile.row_count, rows.result.as<char>(), rows.result.byte_count(),
                    std::make_shared<ResultHold>(shared_from_this(), lane, tile.output)});
  }
  lane = nullptr;
  bool finish = false;
  CallSummary summary;
  {
    absl::MutexLock lock(&mutex_);
    answered_rows_ += tile.row_count;
    finish = ended_ && answered_rows_ == spec_.header.row_count && SetFinished();
    summary = Summary();
  }
  if (finish) Finish(summary);
  absl::MutexLock lock(&mutex_);
  delivering_ = false;
}

void TileCall::ReleaseOutput(int output) {
  absl::MutexLock lock(&mutex_);
  if (finished()) return;
  free_outputs_.push_back(output);
  SubmitReady();
}

}  // namespace shardmlp
