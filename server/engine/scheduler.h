// The device thread, and whose turn it is on it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/pulse.h"

namespace shardmlp {

// The answer to whatever a stopping server can no longer do: UNAVAILABLE (DRAINING).
absl::Status ShuttingDown();

// Work of one tile. Start and then Finish are called, without a lock held; neither is where the scheduler stops first.
class TileJob {
 public:
  virtual ~TileJob() = default;
  // Enqueues the work on the device.
  virtual void Start() = 0;
  // Waits until it is done, and hands on the result. Tiles finish in the order in which they started.
  virtual void Finish() = 0;
};

// One thread that owns the device. Sessions take turns tile by tile, and so do jobs on whole tensors (reading,
// checksums, checkpoints), which together count as one more session: however many of them are asked for, a tile waits
// for one a round, and they for one tile of each session. A step's jobs go ahead of all that have not started, since
// tiles of the next attempt build on them. Each queue is in the order in which it came. Thread-safe; submitting never
// blocks.
class Scheduler {
 public:
  // Called with OK on the device thread when it is the job's turn and no tile is in flight, or with UNAVAILABLE where
  // the scheduler stopped first.
  using ControlJob = absl::AnyInvocable<void(absl::Status)>;

  // `depth`: tiles that are started before the oldest is finished; above 1 only helps where Start is asynchronous.
  explicit Scheduler(int depth);
  ~Scheduler();

  // Ahead of everything.
  void SubmitControl(ControlJob job);
  // By turns with the tiles.
  void SubmitTensorJob(ControlJob job);
  void SubmitTile(int64_t session_id, std::unique_ptr<TileJob> job);

  // Finishes the tiles that have started, joins the thread, answers the control jobs that are left and drops the tiles
  // that are: whoever submitted them ends their calls. So it does with later ones, at once. Not for the device thread.
  // Repeats do nothing.
  void Stop();

  // Submitted and not started.
  int64_t queued_tile_count() const;
  // The device thread's: at work while it starts or finishes a tile, or runs a job, unless that says otherwise.
  Pulse& pulse() { return pulse_; }

 private:
  void Run();
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The next job that needs the device to itself, where it is the turn of one; else null.
  ControlJob TakeControl() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool WorkOrStopped() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopped_ || HasWork(); }
  // The next tile by turn, which must be a session's.
  std::unique_ptr<TileJob> TakeTile() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t depth_;
  Pulse pulse_;
  mutable absl::Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<ControlJob> controls_ ABSL_GUARDED_BY(mutex_);
  std::deque<ControlJob> tensor_jobs_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<int64_t, std::deque<std::unique_ptr<TileJob>>> tiles_ ABSL_GUARDED_BY(mutex_);
  // Sessions with tiles, and kTensorTurn where there are tensor jobs, each once; whose turn is next first.
  std::deque<int64_t> turns_ ABSL_GUARDED_BY(mutex_);
  int64_t queued_tiles_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

}  // namespace shardmlp
