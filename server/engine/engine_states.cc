// ServingEngine's state among its replicas: which of them all go on from, and how it gets to the others.
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "kernels/status.h"
#include "server/engine/replica_sync.h"
#include "server/engine/serving_engine.h"

namespace shardmlp {
namespace {

int64_t HighestAttempt(const Generation& generation) {
  int64_t attempt = 0;
  for (const ReplicaMember& member : generation.members) attempt = std::max(attempt, member.state.attempt);
  return attempt;
}

// Whether they are the same but for the attempt.
bool IsSame(const ReplicaState& a, const ReplicaState& b) {
  return a.generation == b.generation && a.step == b.step && a.weights_version == b.weights_version;
}

bool AllAre(const Generation& generation, const ReplicaState& state) {
  return std::all_of(generation.members.begin(), generation.members.end(),
                     [&](const ReplicaMember& member) { return IsSame(member.state, state); });
}

}  // namespace

// Keeps the device thread from starting anything, from when it's made until it's destroyed.
class ServingEngine::DeviceHold {
 public:
  // On the sync thread, whose `pulse` stands for both from then on.
  DeviceHold(Scheduler& scheduler, Pulse& pulse) : state_(std::make_shared<State>()) {
    const Pulse::Scope waits(pulse, Pulse::At::kReplicas);
    scheduler.SubmitControl([state = state_, &scheduler](const absl::Status& turn) {
      state->turn = turn;
      state->held.Notify();
      if (!turn.ok()) return;
      const Pulse::Scope held(scheduler.pulse(), Pulse::At::kReplicas);
      state->released.WaitForNotification();
    });
    state_->held.WaitForNotification();
  }
  ~DeviceHold() { state_->released.Notify(); }

  // UNAVAILABLE where the scheduler has stopped.
  const absl::Status& status() const { return state_->turn; }

 private:
  struct State {
    absl::Status turn;
    absl::Notification held;
    absl::Notification released;
  };
  const std::shared_ptr<State> state_;
};

void ServingEngine::GoOnTogether(const Generation& generation) {
  const ReplicaState& source = generation.members[generation.source].state;
  const ReplicaState& own = generation.members[generation.group->rank()].state;
  if (source.step == kNoStep) {
    return Fail(
        Error(absl::StatusCode::kDataLoss, Reason::kReplicaMissing, "no replica that is left has a whole state"));
  }
  ReplicaSync sync(*backend_, model_, *parameters_, generation, [this](const auto& work) { return OnDevice(work); });
  absl::StatusOr<bool> alike = AllAre(generation, source);
  if (source.generation == 0 && sync.size() > 1) alike = sync.StartedAlike(own.step);
  const StepPosition target = {source.step, HighestAttempt(generation), source.weights_version};
  const bool replaces = alike.ok() && !*alike && !IsSame(own, source);
  absl::StatusOr<StateHeader> shared;
  std::optional<DeviceHold> hold;
  if (alike.ok() && !*alike) {
    hold.emplace(*scheduler_, sync_->pulse());
    StateHeader header{"", target, std::nullopt, parameters_->updates()};
    {
      absl::MutexLock lock(&mutex_);
      header.committed = step_.committed();
    }
    shared = ShareState(generation, generation.source, header, replaces);
  }
  Outbox outbox;
  absl::MutexLock lock(&mutex_);
  // Where they fail, the generation is lost, and that is on its way.
  if (!alike.ok() || (!*alike && !shared.ok())) return;
  if (replaces) {
    step_.Received(target, shared->committed, outbox);
  } else {
    step_.GoOnFrom(target, outbox);
  }
  state_generation_ = generation.number;
  if (generation_ == nullptr || generation_->number != generation.number) return;
  std::vector<int> ranks;
  for (const ReplicaMember& member : generation.members) ranks.push_back(member.rank);
  step_.Formed(generation.number, ranks, outbox);
  formed_ = true;
  UpdateAdmission(outbox);
}

absl::StatusOr<StateHeader> ServingEngine::ShareState(const Generation& generation, int root, const StateHeader& header,
                                                      bool replaces) {
  ReplicaSync sync(*backend_, model_, *parameters_, generation,
                   [this](const auto& work) { return NoteDevice(work()); });
  SHARDMLP_RETURN_IF_ERROR(Gather(generation));
  SHARDMLP_ASSIGN_OR_RETURN(StateHeader shared, sync.ShareHeader(root, header));
  if (!shared.failure.empty()) return Error(absl::StatusCode::kUnavailable, Reason::kReplicaMissing, shared.failure);
  const auto set_whole = [&](const absl::Status& whole) {
    absl::MutexLock lock(&mutex_);
    whole_ = whole;
  };
  // Who gets what it has already is whole whatever comes.
  if (replaces) {
    set_whole(Error(absl::StatusCode::kUnavailable, Reason::kReplicaMissing,
                    absl::StrCat("this replica is to get its state from rank ", generation.members[root].rank)));
  }
  SHARDMLP_RETURN_IF_ERROR(sync.ShareTensors(root));
  if (replaces) {
    parameters_->set_updates(shared.updates);
    checksums_version_ = 0;
    set_whole(absl::OkStatus());
  }
  return shared;
}

void ServingEngine::Restore(int from, const CheckpointEdition& checkpoint) {
  sync_->Submit(
      [this, generation = generation_, from, checkpoint] { RestoreTogether(generation.get(), from, checkpoint); });
}

void ServingEngine::RestoreTogether(const Generation* generation, int from, const CheckpointEdition& checkpoint) {
  const DeviceHold hold(*scheduler_, sync_->pulse());
  const bool here = from == replicas_->rank();
  // What stays where the generation was lost before this was its turn.
  absl::StatusOr<int64_t> step = absl::UnavailableError("the replica that has it is lost");
  if (!hold.status().ok()) {
    step = hold.status();
  } else if (here) {
    const Pulse::Scope files(sync_->pulse(), Pulse::At::kFiles);
    step = RestoreHere(checkpoint);
  }
  if (generation != nullptr && generation->group->size() > 1) {
    const auto root = std::find_if(generation->members.begin(), generation->members.end(),
                                   [from](const ReplicaMember& member) { return member.rank == from; });
    StateHeader header;
    header.failure = std::string(step.status().message());
    header.position.step = step.value_or(0);
    header.updates = parameters_->updates();
    const auto shared = ShareState(*generation, static_cast<int>(root - generation->members.begin()), header, !here);
    if (!here) step = shared.ok() ? absl::StatusOr<int64_t>(shared->position.step) : shared.status();
  }
  Outbox outbox;
  absl::MutexLock lock(&mutex_);
  step_.Restored(checkpoint, std::move(step), outbox);
  UpdateAdmission(outbox);
}

}  // namespace shardmlp
