#include "tests/rpc/copy_call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

absl::Status InvalidRows(absl::string_view message) {
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidRows, message);
}

}  // namespace

CopyCall::CopyCall(CopyEngine& engine, const CopySpec& spec, CallSink& sink)
    : engine_(engine), spec_(spec), row_bytes_(engine.options_.hidden_size * SizeOf(spec.dtype)), sink_(sink) {
  for (int64_t i = 0; i < engine.options_.slot_count; ++i) {
    free_.push_back(engine_.TakeSlot());
    const auto bytes = static_cast<size_t>(engine.options_.tile_row_count * row_bytes_);
    free_.back()->x.resize(bytes);
    free_.back()->dy.resize(spec.backward ? bytes : 0);
  }
}

CopyCall::~CopyCall() {
  for (auto& slot : free_) engine_.ReturnSlot(std::move(slot));
  for (auto& slot : ready_) engine_.ReturnSlot(std::move(slot));
  if (filling_ != nullptr) engine_.ReturnSlot(std::move(filling_));
}

absl::Status CopyCall::Check(int64_t row_offset, int64_t row_count, int64_t skip, const ByteSource& x,
                             const ByteSource* dy) const {
  if (row_offset + skip != placed_rows_) {
    return InvalidRows(absl::StrCat("got rows from ", row_offset, ", expected ", placed_rows_ - skip));
  }
  if (row_count > spec_.row_count - row_offset) {
    return InvalidRows(absl::StrCat("got ", row_count, " rows at ", row_offset, " of ", spec_.row_count));
  }
  for (const ByteSource* source : {&x, dy}) {
    if (source != nullptr && source->size() != row_count * row_bytes_) {
      return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidShape,
                   absl::StrCat("got ", source->size(), " bytes, expected ", row_count * row_bytes_));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> CopyCall::Place(int64_t row_offset, int64_t row_count, int64_t skip, const ByteSource& x,
                                        const ByteSource* dy) {
  absl::MutexLock lock(&mutex_);
  SHARDMLP_RETURN_IF_ERROR(Check(row_offset, row_count, skip, x, dy));
  int64_t placed = 0;
  while (skip + placed < row_count) {
    if (filling_ == nullptr) {
      if (free_.empty()) break;
      filling_ = std::move(free_.front());
      free_.pop_front();
      filling_->row_begin = placed_rows_;
      filling_->rows = 0;
    }
    CopySlot& slot = *filling_;
    const int64_t rows = std::min(row_count - skip - placed, engine_.options_.tile_row_count - slot.rows);
    x.CopyTo((skip + placed) * row_bytes_, rows * row_bytes_, slot.x.data() + slot.rows * row_bytes_);
    if (dy != nullptr)
      dy->CopyTo((skip + placed) * row_bytes_, rows * row_bytes_, slot.dy.data() + slot.rows * row_bytes_);
    slot.rows += rows;
    placed += rows;
    placed_rows_ += rows;
    if (slot.rows == engine_.options_.tile_row_count) ready_.push_back(std::move(filling_));
  }
  wants_room_ = skip + placed < row_count;
  if (wants_room_) engine_.NoteBlocked();
  if (!ready_.empty()) engine_.Schedule(shared_from_this());
  return placed;
}

absl::Status CopyCall::End(int64_t row_count) {
  absl::MutexLock lock(&mutex_);
  if (row_count != spec_.row_count || placed_rows_ != spec_.row_count) {
    return InvalidRows(
        absl::StrCat("got an end of ", row_count, " rows after ", placed_rows_, ", expected ", spec_.row_count));
  }
  ended_ = true;
  if (filling_ != nullptr) ready_.push_back(std::move(filling_));
  engine_.Schedule(shared_from_this());
  return absl::OkStatus();
}

void CopyCall::Cancel() {
  {
    absl::MutexLock lock(&mutex_);
    over_ = true;
    const auto outside = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !in_sink_; };
    mutex_.Await(absl::Condition(&outside));
  }
  engine_.NoteEnded(this);
}

CopyCall::Next CopyCall::Choose() {
  if (over_) return Next::kNothing;
  if (wants_room_ && !free_.empty()) {
    wants_room_ = false;
    return Next::kRoom;
  }
  if (!ready_.empty()) return Next::kTile;
  return ended_ && answered_rows_ == spec_.row_count ? Next::kFinish : Next::kNothing;
}

bool CopyCall::Step() {
  std::unique_ptr<CopySlot> slot;
  Next next;
  CallSummary summary;
  {
    absl::MutexLock lock(&mutex_);
    next = Choose();
    if (next == Next::kNothing) return false;
    if (next == Next::kTile) {
      slot = std::move(ready_.front());
      ready_.pop_front();
      answered_rows_ += slot->rows;
    }
    summary = {.row_count = answered_rows_, .weights_version = CopyEngine::kWeightsVersion, .repeated_row_count = 0};
    in_sink_ = true;
  }
  const absl::Status failure = engine_.FailureAt(summary.row_count);
  if (!failure.ok()) {
    Finish(failure);
  } else if (next == Next::kRoom) {
    sink_.OnRoom();
  } else if (next == Next::kFinish) {
    Finish(summary);
  } else if (spec_.results) {
    sink_.OnResult(Compute(std::move(slot)));
  }
  if (slot != nullptr) Free(std::move(slot));
  absl::MutexLock lock(&mutex_);
  in_sink_ = false;
  return true;
}

void CopyCall::Fail(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (over_) return;
    in_sink_ = true;
  }
  Finish(status);
  absl::MutexLock lock(&mutex_);
  in_sink_ = false;
}

CallResult CopyCall::Compute(std::unique_ptr<CopySlot> slot) {
  const std::vector<char>& staged = spec_.backward ? slot->dy : slot->x;
  CallResult result{.row_offset = slot->row_begin,
                    .row_count = slot->rows,
                    .data = staged.data(),
                    .byte_count = slot->rows * row_bytes_,
                    .hold = nullptr};
  result.hold = std::shared_ptr<CopySlot>(
      slot.release(), [call = shared_from_this()](CopySlot* held) { call->Free(std::unique_ptr<CopySlot>(held)); });
  return result;
}

void CopyCall::Finish(absl::StatusOr<CallSummary> summary) {
  {
    absl::MutexLock lock(&mutex_);
    over_ = true;
  }
  engine_.NoteEnded(this);
  sink_.OnFinished(std::move(summary));
}

void CopyCall::Free(std::unique_ptr<CopySlot> slot) {
  absl::MutexLock lock(&mutex_);
  free_.push_back(std::move(slot));
  if (wants_room_ && !over_) engine_.Schedule(shared_from_this());
}

}  // namespace shardmlp
