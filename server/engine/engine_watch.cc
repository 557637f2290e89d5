// ServingEngine's watch: ends what has waited for too long, and sees whether the threads that others wait for go on.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"
#include "server/engine/serving_engine.h"
#include "server/log.h"

namespace shardmlp {

void ServingEngine::WatchTime() {
  const absl::Duration period = std::clamp(std::min({options_.lease, options_.seal_timeout, options_.hang_timeout}) / 8,
                                           absl::Milliseconds(5), absl::Seconds(1));
  while (true) {
    Outbox outbox;
    absl::MutexLock lock(&mutex_);
    if (mutex_.AwaitWithTimeout(absl::Condition(this, &ServingEngine::stopping), period)) return;
    const absl::Time now = options_.clock();
    for (const int64_t session_id : sessions_.Expire(now)) {
      step_.RemoveTrainer(session_id, /*lost=*/true, outbox);
      stash_->ReleaseSession(session_id);
      outbox.Do([session_id] { LogWarning("session lost: its lease ended", {{"session", session_id}}); });
    }
    step_.ExpireSeals(now, outbox);
    WatchThreads(now, outbox);
    UpdateSessionMetrics();
    metrics_.SetQueuedTiles(scheduler_->queued_tile_count());
  }
}

std::string ServingEngine::Hanging(absl::Time now) {
  const auto hangs = [&](absl::string_view name, Stillness& stillness, const Pulse& pulse, absl::Duration work) {
    const Pulse::At at = pulse.at();
    const absl::Duration stood = stillness.Look(pulse, now, /*most=*/options_.hang_timeout / 8);
    const absl::Duration allowed = at == Pulse::At::kWork    ? work
                                   : at == Pulse::At::kFiles ? options_.long_timeout
                                                             : absl::InfiniteDuration();
    return stood < allowed ? "" : absl::StrCat(name, " has been at one thing for ", absl::FormatDuration(allowed));
  };
  // A collective may take long, but for one that was aborted, since its generation is over.
  const absl::Duration collective = generation_ == nullptr ? options_.hang_timeout : options_.long_timeout;
  const std::string device = hangs("its device", device_stillness_, scheduler_->pulse(), options_.hang_timeout);
  const std::string sync = hangs("its part in the sums", sync_stillness_, sync_->pulse(), collective);
  return device.empty() ? sync : device;
}

void ServingEngine::WatchThreads(absl::Time now, Outbox& outbox) {
  if (replicas_->size() == 1) return;
  const std::string hanging = Hanging(now);
  if (hanging.empty()) {
    hung_ = absl::OkStatus();
    return;
  }
  if (hung_.ok()) {
    hung_ = Error(absl::StatusCode::kUnavailable, Reason::kReplicaLost, hanging);
    outbox.Do([hanging] { LogError("this replica hangs, and leaves the others", {{"why", hanging}}); });
  }
  outbox.Do([this, why = hung_] { replicas_->Leave(why); });
}

}  // namespace shardmlp
