// A TileCall between a host that the test turns by hand and a sink that notes everything.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "server/engine/tile_call.h"
#include "tests/engine/bytes.h"
#include "tests/kernels/dense.h"

namespace shardmlp::testing {

// x [., 3], y and dy [., 2], f64. What the host computes can be told from anything else:
// y[r, c] = 10 x[r, c] + c, and dx[r, c] = x[r, c] + 100 dy[r, c % 2].
inline constexpr int64_t kHidden = 3;
inline constexpr int64_t kOutput = 2;
Dense HostForward(const Dense& x);
Dense HostBackward(const Dense& x, const Dense& dy);

// Keeps tiles until the test starts and finishes them. Not thread-safe.
class HandHost final : public CallHost {
 public:
  absl::StatusOr<Admitted> StartTile(const CallSpec& spec, const Tile& tile, TileRows rows) override;
  absl::Status FinishTile(const Event& done) override;
  void SubmitTile(int64_t session_id, std::unique_ptr<TileJob> job) override;
  int64_t weights_version() const override { return version; }
  void CallFinished(const CallSpec& spec, bool answered) override;

  // Starts, or finishes, the next tile; false where there is none.
  bool Start();
  bool Finish();
  // Both, for all tiles that are there.
  void Run();

  int64_t version = 5;
  bool repeat = false;      // tiles were counted before
  absl::Status admission;   // what StartTile answers
  absl::Status device;      // what FinishTile answers
  std::vector<Tile> tiles;  // that were admitted
  int awaited = 0;          // events that FinishTile was given
  int finished_calls = 0;
  int answered_calls = 0;  // of them
  size_t submitted() const { return queue_.size(); }

 private:
  std::deque<std::unique_ptr<TileJob>> queue_;
  std::deque<std::unique_ptr<TileJob>> started_;
};

// Notes what it is told, and keeps results until they are given back. Not thread-safe.
class NotingSink final : public CallSink {
 public:
  explicit NotingSink(int64_t cols) : rows_(0, cols) {}
  void OnRoom() override;
  void OnResult(CallResult result) override;
  void OnFinished(absl::StatusOr<CallSummary> summary) override;

  // Takes, or gives back, the oldest result that is held.
  std::shared_ptr<void> Take();
  void GiveBack() { Take(); }
  size_t held() const { return held_.size(); }
  const Dense& rows() const { return rows_; }

  // Runs once, inside the sink method after the next `react_after`.
  absl::AnyInvocable<void()> react;
  int react_after = 0;
  bool keep = false;  // results, until GiveBack
  int rooms = 0;
  int results = 0;
  int finishes = 0;
  absl::StatusOr<CallSummary> summary = absl::UnknownError("not finished");
  int total() const { return rooms + results + finishes; }

 private:
  void React();
  Dense rows_;
  std::deque<std::shared_ptr<void>> held_;
};

// Everything a call needs.
struct CallRig {
  CallRig(Pass pass, int64_t row_count, int64_t tile_rows, bool input_gradient = true);
  ~CallRig();

  // Places rows [begin, begin + count) of the call as one shard; returns how many were taken.
  int64_t Place(int64_t begin, int64_t count, int64_t skip = 0);
  absl::StatusOr<int64_t> TryPlace(int64_t row_offset, int64_t row_count, int64_t skip, const std::string& x_bytes,
                                   const std::string& dy_bytes);
  // Sends it all in shards of `shard_rows`, computing whenever there is no room, and ends.
  void Send(int64_t shard_rows);

  const LayerSpec layer;
  const CallSpec spec;
  const Dense x;
  const Dense dy;
  Metrics metrics;
  std::shared_ptr<LanePool> lanes;
  std::unique_ptr<HandHost> host = std::make_unique<HandHost>();
  NotingSink sink;
  std::shared_ptr<TileCall> call;
};

}  // namespace shardmlp::testing
