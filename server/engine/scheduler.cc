#include "server/engine/scheduler.h"

#include <utility>

#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr int64_t kTensorTurn = -1;  // in place of a session

}  // namespace

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

void Scheduler::SubmitTensorJob(ControlJob job) {
  {
    absl::MutexLock lock(&mutex_);
    if (!stopped_) {
      if (tensor_jobs_.empty()) turns_.push_back(kTensorTurn);
      tensor_jobs_.push_back(std::move(job));
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
  std::deque<ControlJob> tensor_jobs;
  absl::flat_hash_map<int64_t, std::deque<std::unique_ptr<TileJob>>> tiles;
  {
    absl::MutexLock lock(&mutex_);
    controls.swap(controls_);
    tensor_jobs.swap(tensor_jobs_);
    tiles.swap(tiles_);
    turns_.clear();
    queued_tiles_ = 0;
  }
  for (ControlJob& job : controls) job(ShuttingDown());
  for (ControlJob& job : tensor_jobs) job(ShuttingDown());
}

int64_t Scheduler::queued_tile_count() const {
  absl::MutexLock lock(&mutex_);
  return queued_tiles_;
}

bool Scheduler::HasWork() const { return !controls_.empty() || !turns_.empty(); }

Scheduler::ControlJob Scheduler::TakeControl() {
  const bool ahead = !controls_.empty();
  if (!ahead && (turns_.empty() || turns_.front() != kTensorTurn)) return nullptr;
  std::deque<ControlJob>& queue = ahead ? controls_ : tensor_jobs_;
  ControlJob job = std::move(queue.front());
  queue.pop_front();
  if (ahead) return job;
  turns_.pop_front();
  if (!queue.empty()) turns_.push_back(kTensorTurn);
  return job;
}

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
      control = TakeControl();
      if (!control && !turns_.empty() && started.size() < depth_) tile = TakeTile();
    }
    const Pulse::Scope works(pulse_, Pulse::At::kWork);
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
