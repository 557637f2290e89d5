#include "server/engine/scheduler.h"

#include <utility>

#include "kernels/status.h"

namespace shardmlp {

absl::Status ShuttingDown() {
  return Error(absl::StatusCode::kUnavailable, Reason::kDraining, "the server is shutting down");
}

Scheduler::Scheduler(int depth) : depth_(depth), thread_([this] { Run(); }) {}

Scheduler::~Scheduler() { Stop(); }

void Scheduler::SubmitControl(ControlJob job) {
  {
    absl::MutexLock lock(&mutex_);
    if (!stopped_) {
      controls_.push_back(std::move(job));
      return;
    }
  }
  job(ShuttingDown());
}

void Scheduler::SubmitTile(int64_t session_id, std::unique_ptr<TileJob> job) {
  absl::MutexLock lock(&mutex_);
  if (stopped_) return;
  std::deque<std::unique_ptr<TileJob>>& queue = tiles_[session_id];
  if (queue.empty()) turns_.push_back(session_id);
  queue.push_back(std::move(job));
  ++queued_tiles_;
}

void Scheduler::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
  }
  if (thread_.joinable()) thread_.join();
  // The thread is gone and nothing is added any more, so what is left is ours alone.
  std::deque<ControlJob> controls;
  absl::flat_hash_map<int64_t, std::deque<std::unique_ptr<TileJob>>> tiles;
  {
    absl::MutexLock lock(&mutex_);
    controls.swap(controls_);
    tiles.swap(tiles_);
    turns_.clear();
    queued_tiles_ = 0;
  }
  for (ControlJob& job : controls) job(ShuttingDown());
}

int64_t Scheduler::queued_tile_count() const {
  absl::MutexLock lock(&mutex_);
  return queued_tiles_;
}

bool Scheduler::HasWork() const { return !controls_.empty() || !turns_.empty(); }

std::unique_ptr<TileJob> Scheduler::TakeTile() {
  const int64_t session_id = turns_.front();
  turns_.pop_front();
  const auto queue = tiles_.find(session_id);
  std::unique_ptr<TileJob> job = std::move(queue->second.front());
  queue->second.pop_front();
  if (queue->second.empty()) {
    tiles_.erase(queue);
  } else {
    turns_.push_back(session_id);
  }
  --queued_tiles_;
  return job;
}

void Scheduler::Run() {
  std::deque<std::unique_ptr<TileJob>> started;
  const auto finish_oldest = [&started] {
    started.front()->Finish();
    started.pop_front();
  };
  while (true) {
    ControlJob control;
    std::unique_ptr<TileJob> tile;
    {
      absl::MutexLock lock(&mutex_);
      if (started.empty()) mutex_.Await(absl::Condition(this, &Scheduler::WorkOrStopped));
      if (stopped_) break;
      if (!controls_.empty()) {
        control = std::move(controls_.front());
        controls_.pop_front();
      } else if (!turns_.empty() && started.size() < depth_) {
        tile = TakeTile();
      }
    }
    if (control) {
      while (!started.empty()) finish_oldest();
      control(absl::OkStatus());
    } else if (tile != nullptr) {
      tile->Start();
      started.push_back(std::move(tile));
      if (started.size() == depth_) finish_oldest();
    } else if (!started.empty()) {
      finish_oldest();
    }
  }
  while (!started.empty()) finish_oldest();
}

}  // namespace shardmlp
