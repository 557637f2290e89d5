#include "tests/engine/running_call.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "gtest/gtest.h"
#include "kernels/status.h"
#include "tests/engine/bytes.h"

namespace shardmlp::testing {
namespace {

int64_t ResultCols(const Engine& engine, int layer, bool backward) {
  const LayerSpec* spec = engine.model().FindLayer(layer);
  if (spec == nullptr) return 0;
  return backward ? spec->mlp.hidden_size : spec->mlp.output_size;
}

}  // namespace

RunningCall::RunningCall(const Dense& x, const Dense* dy, DType dtype, int64_t result_cols)
    : x_(x),
      dy_(dy == nullptr ? Dense() : *dy),
      backward_(dy != nullptr),
      dtype_(dtype),
      rows_(0, result_cols),
      summary_(absl::UnknownError("not finished")) {}

RunningCall::~RunningCall() {
  if (call_ != nullptr) call_->Cancel();
}

absl::StatusOr<std::unique_ptr<RunningCall>> RunningCall::Forward(Engine& engine, const ForwardSpec& spec,
                                                                  const Dense& x) {
  auto running =
      absl::WrapUnique(new RunningCall(x, nullptr, spec.dtype, ResultCols(engine, spec.layer, /*backward=*/false)));
  SHARDMLP_ASSIGN_OR_RETURN(running->call_, engine.StartForward(spec, *running));
  return running;
}

absl::StatusOr<std::unique_ptr<RunningCall>> RunningCall::Backward(Engine& engine, const BackwardSpec& spec,
                                                                   const Dense& x, const Dense& dy) {
  auto running =
      absl::WrapUnique(new RunningCall(x, &dy, spec.dtype, ResultCols(engine, spec.layer, /*backward=*/true)));
  SHARDMLP_ASSIGN_OR_RETURN(running->call_, engine.StartBackward(spec, *running));
  return running;
}

absl::Status RunningCall::Send(int64_t count) {
  const PieceSource x(Encode(RowsOf(x_, sent_, count), dtype_), 1000);
  const PieceSource dy(backward_ ? Encode(RowsOf(dy_, sent_, count), dtype_) : "", 1000);
  const int64_t row_offset = sent_;
  for (int64_t placed = 0; placed < count;) {
    {
      absl::MutexLock lock(&mutex_);
      room_ = false;
    }
    SHARDMLP_ASSIGN_OR_RETURN(const int64_t rows,
                              call_->Place(row_offset, count, placed, x, backward_ ? &dy : nullptr));
    placed += rows;
    sent_ += rows;
    absl::MutexLock lock(&mutex_);
    if (placed < count) mutex_.Await(absl::Condition(this, &RunningCall::RoomOrFinished));
    if (finished_) break;
  }
  return absl::OkStatus();
}

absl::Status RunningCall::SendAll(int64_t shards) {
  for (int64_t left = shards; left > 0; --left) {
    const int64_t rows = (x_.rows - sent_ + left - 1) / left;
    if (rows > 0) SHARDMLP_RETURN_IF_ERROR(Send(rows));
    if (finished()) return absl::OkStatus();
  }
  return End();
}

void RunningCall::StopReading() {
  absl::MutexLock lock(&mutex_);
  keep_ = true;
}

void RunningCall::Read() {
  std::shared_ptr<void> oldest;
  absl::MutexLock lock(&mutex_);
  oldest = std::move(kept_.front());
  kept_.pop_front();
}

void RunningCall::ReadOn() {
  std::deque<std::shared_ptr<void>> kept;
  absl::MutexLock lock(&mutex_);
  keep_ = false;
  kept.swap(kept_);
}

void RunningCall::WaitForRows(int64_t count) {
  const auto there = [this, count]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return rows_.rows >= count || finished_; };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&there));
}

absl::StatusOr<CallSummary> RunningCall::Wait() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&finished_));
  return summary_;
}

bool RunningCall::finished() const {
  absl::MutexLock lock(&mutex_);
  return finished_;
}

Dense RunningCall::rows() const {
  absl::MutexLock lock(&mutex_);
  return rows_;
}

void RunningCall::OnRoom() {
  absl::MutexLock lock(&mutex_);
  room_ = true;
}

void RunningCall::OnResult(CallResult result) {
  // Declared ahead of the lock, so that it is given back without it.
  std::shared_ptr<void> hold = std::move(result.hold);
  absl::MutexLock lock(&mutex_);
  EXPECT_EQ(result.row_offset, rows_.rows) << "results in order, without gap";
  EXPECT_EQ(result.byte_count, result.row_count * rows_.cols * SizeOf(dtype_));
  EXPECT_FALSE(finished_) << "a result after the end";
  const Dense part = Decode(result.data, result.row_count, rows_.cols, dtype_);
  rows_.rows += part.rows;
  rows_.values.insert(rows_.values.end(), part.values.begin(), part.values.end());
  if (keep_) kept_.push_back(std::move(hold));
}

void RunningCall::OnFinished(absl::StatusOr<CallSummary> summary) {
  absl::MutexLock lock(&mutex_);
  EXPECT_FALSE(finished_) << "finished twice";
  finished_ = true;
  summary_ = std::move(summary);
}

}  // namespace shardmlp::testing
