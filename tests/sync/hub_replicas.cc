#include "tests/sync/hub_replicas.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "tests/sync/hub_group.h"

namespace shardmlp::testing {

class HubReplicas::Hub {
 public:
  Hub(int size, OnLoss on_loss) : on_loss_(on_loss), seats_(size) {}

  int size() const { return static_cast<int>(seats_.size()); }

  int64_t Start(int rank) {
    End(rank, -1, absl::UnavailableError(absl::StrCat("rank ", rank, " was started again")));
    absl::MutexLock lock(&mutex_);
    Seat& seat = seats_[rank];
    Seat started;
    started.cut = seat.cut;
    started.incarnation = seat.incarnation + 1;
    started.alive = true;
    seat = std::move(started);
    return seat.incarnation;
  }

  void Join(int rank, int64_t incarnation, const ReplicaState& state, ReplicaObserver& observer) {
    {
      absl::MutexLock lock(&mutex_);
      Seat& seat = seats_[rank];
      if (!IsAlive(seat, incarnation)) return;
      seat.observer = &observer;
      seat.state = state;
      seat.joining = true;
      Settle();
    }
    Pump();
  }

  void Propose(int rank, int64_t incarnation, int64_t generation, std::string message) {
    {
      absl::MutexLock lock(&mutex_);
      if (!IsAlive(seats_[rank], incarnation) || !seats_[rank].member || generation != generation_) return;
      const int64_t index = next_index_++;
      const auto shared = std::make_shared<std::string>(std::move(message));
      ForMembers([&](Seat& seat) {
        seat.calls.push_back({[=](ReplicaObserver& observer) { observer.Agreed(index, rank, *shared); }, index});
      });
    }
    Pump();
  }

  void Admit(int rank, int64_t incarnation, int64_t generation, bool now) {
    {
      absl::MutexLock lock(&mutex_);
      if (rank != 0 || !IsAlive(seats_[rank], incarnation) || generation != generation_) return;
      admits_ = now;
      Settle();
    }
    Pump();
  }

  void Leave(int rank, int64_t incarnation, const absl::Status& why) {
    {
      absl::MutexLock lock(&mutex_);
      Seat& seat = seats_[rank];
      if (!IsAlive(seat, incarnation) || seat.joining || (seat.member && !seat.heard)) return;
      if (seat.member) {
        EndGeneration(absl::UnavailableError(absl::StrCat("rank ", rank, " was lost: it stopped: ", why.message())));
      }
      seat.was_member = seat.joining = false;
      Settle();
    }
    Pump();
  }

  // Ends the part of a server; -1: of whichever has the rank. Returns after the last call of its observer.
  void End(int rank, int64_t incarnation, const absl::Status& why) {
    {
      absl::MutexLock lock(&mutex_);
      Seat& seat = seats_[rank];
      if (!seat.alive || (incarnation >= 0 && seat.incarnation != incarnation)) return;
      if (seat.member) EndGeneration(why);
      seat.alive = seat.joining = false;
      seat.calls.clear();
      Settle();
      const auto idle = [this, &seat] {
        mutex_.AssertReaderHeld();
        return seat.calling == std::thread::id();
      };
      if (seat.calling != std::this_thread::get_id()) mutex_.Await(absl::Condition(&idle));
    }
    Pump();
  }

  void SetCut(int rank, bool cut) {
    {
      absl::MutexLock lock(&mutex_);
      seats_[rank].cut = cut;
      if (cut && seats_[rank].member) EndGeneration(absl::UnavailableError(absl::StrCat("rank ", rank, " was lost")));
      Settle();
    }
    Pump();
  }

  void SetHeld(bool held) {
    absl::MutexLock lock(&mutex_);
    held_ = held;
  }

  // The next call of one observer; of any, where rank is -1. False where there is none.
  bool Deliver(int rank) {
    Call call;
    ReplicaObserver* observer = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      for (int r = 0; r < size() && observer == nullptr; ++r) {
        Seat& seat = seats_[r];
        if ((rank >= 0 && r != rank) || seat.calls.empty() || seat.calling != std::thread::id()) continue;
        rank = r;
        call = std::move(seat.calls.front());
        seat.calls.pop_front();
        seat.calling = std::this_thread::get_id();
        observer = seat.observer;
        seat.heard |= call.forms;
        call.generation = generation_;
      }
    }
    if (observer == nullptr) return false;
    call.make(*observer);
    absl::MutexLock lock(&mutex_);
    seats_[rank].calling = std::thread::id();
    if (call.index >= 0 && call.generation == generation_ && seats_[rank].member) {
      seats_[rank].delivered = call.index;
      Stabilize();
    }
    return true;
  }

  // Delivers everything; unless held.
  void Pump() {
    while (!held() && Deliver(-1)) continue;
  }

  int64_t generation() const {
    absl::MutexLock lock(&mutex_);
    return generation_;
  }

  std::string Missing() const {
    absl::MutexLock lock(&mutex_);
    std::string missing;
    for (int rank = 0; rank < size(); ++rank) {
      const Seat& seat = seats_[rank];
      if (!seat.member && (seat.cut || !seat.joining))
        absl::StrAppend(&missing, missing.empty() ? "" : ", ", "rank ", rank);
    }
    return missing;
  }

 private:
  struct Call {
    std::function<void(ReplicaObserver&)> make;
    int64_t index = -1;       // of the message that this delivers
    bool forms = false;       // whether it is Formed
    int64_t generation = -1;  // when it is made
  };
  struct Seat {
    bool cut = false;
    int64_t incarnation = 0;
    bool alive = false;
    bool joining = false;     // has asked for a place
    bool member = false;      // of the generation that is formed
    bool was_member = false;  // of the last one
    bool heard = false;       // of that generation
    ReplicaState state;
    ReplicaObserver* observer = nullptr;
    std::shared_ptr<ReplicaGroup> group;
    int64_t delivered = -1;
    std::deque<Call> calls;
    std::thread::id calling;  // who makes a call now
  };

  static bool IsAlive(const Seat& seat, int64_t incarnation) { return seat.alive && seat.incarnation == incarnation; }

  bool held() const {
    absl::MutexLock lock(&mutex_);
    return held_;
  }

  template <typename Do>
  void ForMembers(Do act) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (Seat& seat : seats_) {
      if (seat.member) act(seat);
    }
  }

  void EndGeneration(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    ForMembers([&](Seat& seat) {
      seat.member = false;
      seat.group->Abort(why);
      const bool heard_all = !seat.cut && std::none_of(seat.calls.begin(), seat.calls.end(),
                                                       [](const Call& call) { return call.index >= 0; });
      seat.calls.clear();
      // Who has not heard of it waits as before.
      seat.joining = !seat.heard;
      if (seat.heard) seat.calls.push_back({[=](ReplicaObserver& observer) { observer.Lost(why, heard_all); }});
    });
    generation_ = 0;
  }

  static bool Waits(const Seat& seat) { return seat.alive && seat.joining && !seat.cut; }

  // Forms a generation where it is time, or ends one to let a rank in.
  void Settle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto waiting = std::count_if(seats_.begin(), seats_.end(), Waits);
    if (generation_ != 0) {
      if (!admits_ || waiting == 0) return;
      EndGeneration(absl::UnavailableError("a rank came back"));
      return;
    }
    const bool all = waiting == size();
    const bool rest = last_generation_ > 0 && on_loss_ == OnLoss::kContinue && Waits(seats_[0]) &&
                      std::none_of(seats_.begin(), seats_.end(), [](const Seat& seat) {
                        return seat.alive && seat.was_member && !seat.cut && !Waits(seat);
                      });
    if (all || rest) Form();
  }

  void Form() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Generation generation;
    for (int rank = 0; rank < size(); ++rank) {
      seats_[rank].was_member = seats_[rank].member = Waits(seats_[rank]);
      if (!seats_[rank].member) continue;
      generation.members.push_back({.rank = rank, .state = seats_[rank].state});
      const ReplicaState& state = seats_[rank].state;
      last_generation_ = std::max({last_generation_, state.generation, state.checkpoint_generation});
    }
    generation.number = generation_ = ++last_generation_;
    generation.source = MostAdvanced(generation.members);
    next_index_ = 0;
    stable_ = -1;
    admits_ = false;
    const auto groups = MakeHubGroup(static_cast<int>(generation.members.size()));
    int index = 0;
    ForMembers([&](Seat& seat) {
      seat.joining = seat.heard = false;
      seat.delivered = -1;
      seat.group = generation.group = groups[index++];
      seat.calls.push_back(
          {.make = [generation](ReplicaObserver& observer) { observer.Formed(generation); }, .forms = true});
    });
  }

  void Stabilize() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    int64_t least = next_index_ - 1;
    ForMembers([&](Seat& seat) { least = std::min(least, seat.delivered); });
    while (stable_ < least) {
      const int64_t index = ++stable_;
      ForMembers(
          [&](Seat& seat) { seat.calls.push_back({[index](ReplicaObserver& observer) { observer.Stable(index); }}); });
    }
  }

  const OnLoss on_loss_;
  mutable absl::Mutex mutex_;
  bool held_ ABSL_GUARDED_BY(mutex_) = false;
  bool admits_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: none is formed
  int64_t last_generation_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t next_index_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t stable_ ABSL_GUARDED_BY(mutex_) = -1;
  std::vector<Seat> seats_;  // by rank; the size is constant, the elements are guarded by mutex_
};

class HubReplicas::Member final : public Replicas {
 public:
  Member(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank), incarnation_(hub_->Start(rank)) {}
  ~Member() override { Stop(absl::UnavailableError(absl::StrCat("rank ", rank_, " was lost"))); }

  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }
  void Join(const ReplicaState& state, ReplicaObserver& observer) override {
    hub_->Join(rank_, incarnation_, state, observer);
  }
  void Propose(int64_t generation, std::string message) override {
    hub_->Propose(rank_, incarnation_, generation, std::move(message));
  }
  void Admit(int64_t generation, bool now) override { hub_->Admit(rank_, incarnation_, generation, now); }
  void Leave(const absl::Status& why) override { hub_->Leave(rank_, incarnation_, why); }
  std::string Missing() const override { return hub_->Missing(); }
  void Stop(const absl::Status& why) override { hub_->End(rank_, incarnation_, why); }

 private:
  const std::shared_ptr<Hub> hub_;
  const int rank_;
  const int64_t incarnation_;
};

HubReplicas::HubReplicas(int size, OnLoss on_loss) : hub_(std::make_shared<Hub>(size, on_loss)) {}
HubReplicas::~HubReplicas() = default;
std::unique_ptr<Replicas> HubReplicas::Start(int rank) { return std::make_unique<Member>(hub_, rank); }
void HubReplicas::Hold() { hub_->SetHeld(true); }
void HubReplicas::Release() {
  hub_->SetHeld(false);
  hub_->Pump();
}
bool HubReplicas::Deliver(int rank) { return hub_->Deliver(rank); }
void HubReplicas::DeliverAll() {
  while (hub_->Deliver(-1)) continue;
}
void HubReplicas::Cut(int rank) { hub_->SetCut(rank, true); }
void HubReplicas::Mend(int rank) { hub_->SetCut(rank, false); }
void HubReplicas::Kill(int rank) {
  hub_->End(rank, -1, absl::UnavailableError(absl::StrCat("rank ", rank, " was lost")));
}
int64_t HubReplicas::generation() const { return hub_->generation(); }

}  // namespace shardmlp::testing
