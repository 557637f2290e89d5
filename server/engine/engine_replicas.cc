// ServingEngine among its replicas: what they agree on, and the sync thread, which waits for them.
#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "kernels/status.h"
#include "server/engine/replica_sync.h"
#include "server/engine/serving_engine.h"
#include "server/log.h"

namespace shardmlp {

ReplicaPlace ServingEngine::replica() const {
  absl::MutexLock lock(&mutex_);
  std::vector<int> members;
  if (generation_ != nullptr) {
    for (const ReplicaMember& member : generation_->members) members.push_back(member.rank);
  }
  return {replicas_->rank(), replicas_->size(), static_cast<int>(members.size()), state_generation_, members};
}

absl::Status ServingEngine::OnDevice(const std::function<absl::Status()>& work) {
  const Pulse::Scope waits(sync_->pulse(), Pulse::At::kReplicas);
  absl::Notification done;
  absl::Status status;
  scheduler_->SubmitControl([&](const absl::Status& turn) {
    status = turn.ok() ? NoteDevice(work()) : turn;
    done.Notify();
  });
  done.WaitForNotification();
  return status;
}

void ServingEngine::Propose(const StepMessage& message, Outbox& outbox) {
  if (generation_ == nullptr) return;  // lost; the protocol hears of it in its turn
  unsent_.push_back({generation_->number, Serialize(message)});
  outbox.Do([this] { SendProposals(); });
}

void ServingEngine::SendProposals() {
  const auto nobody_sends = [this] {
    mutex_.AssertReaderHeld();
    return sender_ == std::thread::id();
  };
  while (true) {
    Proposal proposal;
    {
      absl::MutexLock lock(&mutex_);
      if (sender_ == std::this_thread::get_id()) return;  // it goes on once it is back there
      // Whoever sends sends these too. A server alone waits for that: what it agrees on with itself is then done.
      if (!nobody_sends() && replicas_->size() > 1) return;
      mutex_.Await(absl::Condition(&nobody_sends));
      if (unsent_.empty()) return;
      sender_ = std::this_thread::get_id();
      proposal = std::move(unsent_.front());
      unsent_.pop_front();
    }
    replicas_->Propose(proposal.generation, std::move(proposal.message));
    absl::MutexLock lock(&mutex_);
    sender_ = std::thread::id();
  }
}

void ServingEngine::UpdateAdmission(Outbox& outbox) {
  const bool idle = step_.Idle();
  if (generation_ == nullptr || replicas_->rank() != 0 || idle == admitting_) return;
  admitting_ = idle;
  outbox.Do([this, generation = generation_->number, idle] { replicas_->Admit(generation, idle); });
}

void ServingEngine::Agreed(int64_t index, int from_rank, const std::string& message) {
  absl::StatusOr<StepMessage> parsed = ParseStepMessage(message);
  if (!parsed.ok()) return Fail(parsed.status());
  Outbox outbox;
  absl::MutexLock lock(&mutex_);
  if (std::holds_alternative<Arrival>(*parsed)) {
    ++arrivals_[from_rank];
    return;
  }
  step_.Agreed(index, from_rank, *std::move(parsed), options_.clock(), outbox);
  UpdateAdmission(outbox);
}

void ServingEngine::Stable(int64_t index) {
  Outbox outbox;
  absl::MutexLock lock(&mutex_);
  step_.Stable(index, outbox);
}

void ServingEngine::Lost(const absl::Status& why, bool heard_all) {
  LogWarning("replicas lost", {{"why", std::string(why.message())}});
  metrics_.CountLostGeneration();
  Outbox outbox;
  absl::MutexLock lock(&mutex_);
  generation_ = nullptr;
  sync_stillness_ = Stillness();  // what it's at, if a collective, is aborted from now on
  step_.Lost(why, heard_all, outbox);
}

void ServingEngine::Refused(const absl::Status& why) { Fail(why); }

void ServingEngine::Rejoin() {
  // After the collectives of the generation that is over: they may leave a state that is torn.
  sync_->Submit([this] { JoinReplicas(); });
}

void ServingEngine::JoinReplicas() {
  ReplicaState state;
  {
    const Pulse::Scope waits(sync_->pulse(), Pulse::At::kReplicas);
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &ServingEngine::may_join));
    if (stopping_ || !health_.ok()) return;
    const StepPosition position = step_.JoinPosition();
    state = {state_generation_, state_generation_ == 0 ? checkpoint_generation_ : 0, position.step, position.attempt,
             position.weights_version};
    if (!whole_.ok()) state = {.step = kNoStep, .attempt = position.attempt};
  }
  replicas_->Join(state, *this);
}

absl::Status ServingEngine::Gather(const Generation& generation) {
  if (generation.group->size() == 1) return absl::OkStatus();
  const Pulse::Scope waits(sync_->pulse(), Pulse::At::kReplicas);
  const auto is_over = [&] {
    mutex_.AssertReaderHeld();
    return generation_ == nullptr || generation_->number != generation.number || !health_.ok();
  };
  const auto is_done = [&] {
    mutex_.AssertReaderHeld();
    return is_over() || Late().empty();
  };
  {
    Outbox outbox;
    absl::MutexLock lock(&mutex_);
    if (!is_over()) {
      ++gathers_;
      Propose(Arrival(), outbox);
    }
  }
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&is_done));
  if (!is_over()) return absl::OkStatus();
  return health_.ok() ? Error(absl::StatusCode::kUnavailable, Reason::kReplicaLost, "the generation is over") : health_;
}

std::vector<int> ServingEngine::Late() const {
  std::vector<int> late;
  for (const auto& [rank, count] : arrivals_) {
    if (count < gathers_) late.push_back(rank);
  }
  return late;
}

std::string ServingEngine::Missing() const {
  if (generation_ == nullptr) return replicas_->Missing();
  const std::vector<int> late = Late();
  if (late.empty()) return "";
  return absl::StrCat(late.size() == 1 ? "rank " : "ranks ", absl::StrJoin(late, ", "), " not ready yet");
}

void ServingEngine::Formed(const Generation& generation) {
  if (replicas_->size() > 1) {
    LogInfo("replicas formed", {{"generation", generation.number},
                                {"members", static_cast<int64_t>(generation.members.size())},
                                {"replicas", replicas_->size()}});
  }
  absl::MutexLock lock(&mutex_);
  generation_ = std::make_shared<const Generation>(generation);
  metrics_.SetReplicas(generation.number, static_cast<int64_t>(generation.members.size()));
  admitting_ = false;
  arrivals_.clear();
  for (const ReplicaMember& member : generation.members) arrivals_[member.rank] = 0;
  gathers_ = 0;
  sync_->Submit([this, generation = generation_] { GoOnTogether(*generation); });
}

void ServingEngine::SumGradients(StepPosition of) {
  sync_->Submit([this, generation = generation_, of] {
    absl::StatusOr<std::vector<double>> sums = SumOverReplicas(generation.get(), of);
    if (sums.status().code() == absl::StatusCode::kDataLoss) return Fail(sums.status());
    Outbox outbox;
    absl::MutexLock lock(&mutex_);
    step_.Summed(of, std::move(sums), outbox);
  });
}

absl::StatusOr<std::vector<double>> ServingEngine::SumOverReplicas(const Generation* generation, StepPosition of) {
  const absl::Time start = absl::Now();
  if (generation != nullptr && generation->group->size() > 1) {
    SHARDMLP_ASSIGN_OR_RETURN(const bool summed, SumTogether(*generation, of));
    if (!summed) return absl::AbortedError("the attempt is over");
  }
  absl::StatusOr<std::vector<double>> squares;
  SHARDMLP_RETURN_IF_ERROR(OnDevice([&] {
    squares = parameters_->GradientSquares();
    return squares.status();
  }));
  metrics_.ObserveStepPhase(StepPhase::kSync, absl::Now() - start);
  return squares;
}

absl::StatusOr<bool> ServingEngine::SumTogether(const Generation& generation, StepPosition of) {
  const absl::Cleanup resume = [this] { ResumeSaves(); };
  if (!backend_->device().unified_memory) {  // the device is needed all along
    absl::MutexLock lock(&mutex_);
    saves_wait_ = true;
  }
  ReplicaSync sync(*backend_, model_, *parameters_, generation, [this](const auto& work) { return OnDevice(work); });
  // The tiles that were counted are done once the device thread has been here.
  SHARDMLP_RETURN_IF_ERROR(OnDevice([] { return absl::OkStatus(); }));
  SHARDMLP_RETURN_IF_ERROR(Gather(generation));
  const auto is_open = [this, of] {
    absl::MutexLock lock(&mutex_);
    return step_.position() == of;
  };
  bool wanted = false;
  {
    absl::MutexLock lock(&mutex_);
    wanted = step_.position() == of;
    gradients_lent_ = wanted && sync.sums_in_place();
  }
  // Who has come to these sums takes part in them, since the others wait for it, also where its attempt is over.
  const absl::StatusOr<bool> all_want = sync.CheckAlike(of, wanted);
  absl::Status status = all_want.status();
  if (status.ok() && *all_want) {
    status = sync.SumGradients(is_open);
    metrics_.AddSyncedBytes(plan_.gradients_bytes);
  }
  TakeGradientsBack();
  if (status.ok()) return *all_want;
  if (status.code() == absl::StatusCode::kDataLoss) {
    {
      Outbox outbox;
      absl::MutexLock lock(&mutex_);
      step_.Stop(status, outbox);
    }
    sync.Meet().IgnoreError();  // none leaves before all know
    return status;
  }
  return status;
}

void ServingEngine::TakeGradientsBack() {
  absl::MutexLock lock(&mutex_);
  gradients_lent_ = false;
  if (!clear_owed_) return;
  scheduler_->SubmitControl([this](const absl::Status& turn) {
    if (turn.ok()) NoteDevice(parameters_->ClearGradients()).IgnoreError();
    absl::MutexLock lock(&mutex_);
    clear_owed_ = false;
  });
}

void ServingEngine::ClearGradients() {
  if (gradients_lent_) {
    clear_owed_ = true;
    return;
  }
  scheduler_->SubmitControl([this](const absl::Status& turn) {
    if (turn.ok() && !options_.frozen) NoteDevice(parameters_->ClearGradients()).IgnoreError();
  });
}

void ServingEngine::Fail(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  if (!health_.ok()) return;
  health_ = why;
  LogError("server failed", {{"reason", std::string(Name(ReasonOf(why)))}, {"why", std::string(why.message())}});
  // The others don't go on with a replica that is broken.
  if (replicas_->size() > 1 && sync_ != nullptr) sync_->Submit([this, why] { LeaveReplicas(why); });
}

void ServingEngine::StopReplicas() {
  replicas_->Stop(ShuttingDown());
  std::shared_ptr<const Generation> generation;
  {
    absl::MutexLock lock(&mutex_);
    generation = std::exchange(generation_, nullptr);
  }
  if (generation != nullptr) generation->group->Abort(ShuttingDown());
  if (sync_ != nullptr) sync_->Stop();
}

void ServingEngine::LeaveReplicas(const absl::Status& why) {
  replicas_->Stop(why);
  Outbox outbox;
  absl::MutexLock lock(&mutex_);
  generation_ = nullptr;
  step_.Stop(why, outbox);
  step_.Lost(why, /*heard_all=*/false, outbox);
}

}  // namespace shardmlp
