// A Call: joins the rows that come in into tiles, sends each to the device in turn, and hands out its rows.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/engine/call.h"
#include "server/engine/lane.h"
#include "server/engine/scheduler.h"
#include "server/engine/tile_compute.h"
#include "server/metrics.h"
#include "server/model/model_spec.h"

namespace shardmlp {

// What a call is for: a header that was found to be right.
struct CallSpec {
  Pass pass = Pass::kForward;
  BackwardSpec header;       // of a forward: the fields that it shares
  size_t layer = 0;          // in ModelSpec::layers
  int64_t x_cols = 0;        // H of the layer
  int64_t dy_cols = 0;       // O of the layer
  int64_t gate_up_cols = 0;  // 2I of the layer, or I where ungated
  DType compute_dtype = DType::kF32;
  KeepInput keep_input = KeepInput::kNo;  // of a forward
  bool gate_up_kept = false;              // of a forward, under header.ticket

  // The rows' x is in the stash, and not in the shards.
  bool x_kept() const { return pass == Pass::kBackward && header.ticket != 0; }
  bool has_result() const { return pass == Pass::kForward || header.input_gradient; }
  int64_t result_cols() const { return pass == Pass::kForward ? dy_cols : x_cols; }
};

struct Tile {
  int input = 0;    // which of the lane's
  int output = -1;  // which of the lane's; -1 for none
  int64_t row_begin = 0;
  int64_t row_count = 0;
  uint64_t dy_hash = 0;
  int64_t non_finite_row = -1;  // the first, in the call, with a NaN or infinity in x or dy; -1 for none
  absl::Time complete;
};

// The engine, as its calls see it.
class CallHost {
 public:
  virtual ~CallHost() = default;

  // Computes `rows`, of a tile of `spec`, unless the step protocol or the weights version forbid. On the device thread.
  // `repeated`: the tile had been counted, and was only answered. `weights_version`: what it was computed with.
  struct Admitted {
    std::unique_ptr<Event> done;
    int64_t weights_version = 0;
    bool repeated = false;
  };
  virtual absl::StatusOr<Admitted> StartTile(const CallSpec& spec, const Tile& tile, TileRows rows) = 0;
  // Waits until the tile's result is in staging memory. On the device thread.
  virtual absl::Status FinishTile(const Event& done) = 0;

  // Under the call's lock; must only enqueue.
  virtual void SubmitTile(int64_t session_id, std::unique_ptr<TileJob> job) = 0;
  // Where weights stand now.
  virtual int64_t weights_version() const = 0;
  // The call is over; `answered`: all of it. Called once, without a lock held.
  virtual void CallFinished(const CallSpec& spec, bool answered) = 0;
};

// Locks `mutex_` for a few assignments at a time, and calls out with no lock held, except that it submits its tiles
// under it, so that they stay in order whichever threads give outputs back. After CallHost::CallFinished it touches the
// host no more, so that results which are still being sent may outlive the engine. Its lane goes back once the call is
// over, no tile of it is on the device and no result of it is being sent, however long the object itself is kept.
class TileCall final : public Call, public std::enable_shared_from_this<TileCall> {
 public:
  // `host`, `sink` and `metrics` must live until the call is finished.
  TileCall(CallHost& host, CallSink& sink, Metrics& metrics, const CallSpec& spec, std::shared_ptr<Lane> lane,
           int64_t tile_rows);
  ~TileCall() override;

  absl::StatusOr<int64_t> Place(int64_t row_offset, int64_t row_count, int64_t skip, const ByteSource& x,
                                const ByteSource* dy) override;
  absl::Status End(int64_t row_count) override;
  void Cancel() override;

  // Ends it with `status` from outside; for the engine's shutdown, after the device thread has stopped.
  void Fail(const absl::Status& status);

 private:
  class Job;
  class ResultHold;

  absl::Status CheckShard(int64_t row_offset, int64_t row_count, int64_t skip, const ByteSource& x,
                          const ByteSource* dy) const;
  // Null once the call is over.
  std::shared_ptr<Lane> OpenLane() const;
  // Takes a free input for the tile that is filled next. False where there is none, and then OnRoom will follow.
  bool TakeInput();
  // Copies rows of a shard into the tile that is being filled.
  void Fill(const Lane& lane, int64_t shard_row, int64_t rows, const ByteSource& x, const ByteSource* dy);
  // Hands the full tile on.
  void SubmitFilled();
  // Sends full tiles to the device for as long as outputs are free.
  void SubmitReady() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The job's two halves, on the device thread. They hold the lane in between, and let go of it before they say that
  // the call is over.
  void StartTile(const Tile& tile, std::shared_ptr<Lane>& lane, std::unique_ptr<Event>& done);
  void FinishTile(const Tile& tile, std::shared_ptr<Lane> lane, const Event* done);
  void Deliver(const Tile& tile, std::shared_ptr<Lane> lane);
  void ReleaseOutput(int output);

  // From now on the call is over. False where it was before.
  bool SetFinished() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool finished() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return lane_ == nullptr; }
  // Tells host and sink, after SetFinished.
  void Finish(absl::StatusOr<CallSummary> summary);
  bool NotDelivering() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !delivering_; }
  CallSummary Summary() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  TileRows RowsOf(const Tile& tile, const Lane& lane) const;
  // The tile's rows as the device gets them: with those of the stash, where they are kept there. On the device thread.
  TileRows RowsToCompute(Tile& tile, const Lane& lane) const;

  CallHost& host_;
  CallSink& sink_;
  Metrics& metrics_;
  const CallSpec spec_;
  const int64_t tile_rows_;

  // The receiving side; for whoever calls Place and End.
  int64_t placed_rows_ = 0;
  bool filling_ = false;
  Tile filled_;  // being filled
  struct HashState;
  const std::unique_ptr<HashState> hash_;

  // For the device thread.
  int64_t weights_version_ = 0;  // of the first tile; 0 before it

  mutable absl::Mutex mutex_;
  std::shared_ptr<Lane> lane_ ABSL_GUARDED_BY(mutex_);  // null once the call is over
  std::vector<int> free_inputs_ ABSL_GUARDED_BY(mutex_);
  std::vector<int> free_outputs_ ABSL_GUARDED_BY(mutex_);
  std::deque<Tile> waiting_ ABSL_GUARDED_BY(mutex_);  // full, for an output to be free; in order
  bool wants_room_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool delivering_ ABSL_GUARDED_BY(mutex_) = false;  // a sink method runs on `deliverer_`
  std::thread::id deliverer_ ABSL_GUARDED_BY(mutex_);
  int64_t answered_rows_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t repeated_rows_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t summary_version_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace shardmlp
