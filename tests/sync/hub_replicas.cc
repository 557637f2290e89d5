#include "tests/sync/hub_replicas.h"

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/sync/rendezvous/coordinator.h"
#include "server/sync/rendezvous/messages.h"
#include "tests/sync/hub_group.h"

namespace shardmlp::testing {

class HubReplicas::Hub final : private Coordinator::Carrier {
 public:
  Hub(int size, OnLoss on_loss) : on_loss_(on_loss), seats_(size) {}

  int size() const { return static_cast<int>(seats_.size()); }

  int64_t Start(int rank) {
    End(rank, -1, std::nullopt);
    {
      absl::MutexLock lock(&mutex_);
      Seat& seat = seats_[rank];
      Seat started;
      started.cut = seat.cut;
      started.incarnation = seat.incarnation + 1;
      started.alive = true;
      seat = std::move(started);
      if (rank == 0) {
        coordinator_.emplace(HelloOf(0), on_loss_, absl::InfiniteDuration(), static_cast<Carrier&>(*this));
        for (int other = 1; other < size(); ++other) Connect(other);
        Work();
      }
    }
    Pump();
    return incarnation(rank);
  }

  void Join(int rank, int64_t incarnation, const ReplicaState& state, ReplicaObserver& observer) {
    Do(rank, incarnation, [&](Seat& seat) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      if (seat.phase != Phase::kIdle && seat.phase != Phase::kLost) return;
      seat.phase = Phase::kJoins;
      seat.observer = &observer;
      seat.state = state;
      if (seat.connection == 0) return Connect(rank);
      SayJoin(seat);
    });
  }

  void Propose(int rank, int64_t incarnation, int64_t generation, std::string message) {
    v1::MeetRequest request;
    request.mutable_propose()->set_generation(generation);
    request.mutable_propose()->set_message(std::move(message));
    SayAsMember(rank, incarnation, generation, std::move(request));
  }

  void Admit(int rank, int64_t incarnation, int64_t generation, bool now) {
    if (rank != 0) return;
    v1::MeetRequest request;
    request.mutable_admit()->set_generation(generation);
    request.mutable_admit()->set_now(now);
    SayAsMember(rank, incarnation, generation, std::move(request));
  }

  void Leave(int rank, int64_t incarnation, const absl::Status& why) {
    Do(rank, incarnation, [&](Seat& seat) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      if (seat.phase != Phase::kFormed && seat.phase != Phase::kLost) return;
      if (seat.connection != 0) SayLeave(seat, why);
      CutOff(seat, why);
    });
  }

  // Ends the part of a server, of whichever has the rank where `incarnation` is -1; with a word where it stops. Returns
  // after the last call of its observer.
  void End(int rank, int64_t incarnation, const std::optional<absl::Status>& stops) {
    {
      absl::MutexLock lock(&mutex_);
      Seat& seat = seats_[rank];
      if (!seat.alive || (incarnation >= 0 && seat.incarnation != incarnation)) return;
      seat.alive = false;
      if (stops.has_value() && seat.connection != 0) SayLeave(seat, *stops);
      Work();
      if (rank == 0) {
        coordinator_.reset();
        generation_ = 0;
        for (int other = 1; other < size(); ++other) Disconnect(other);
      }
      Disconnect(rank);
      Work();
      if (seat.group != nullptr) seat.group->Abort(stops.value_or(LostError(rank)));
      seat.calls.clear();
      seat.phase = Phase::kIdle;
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
      for (int r = 1; r < size(); ++r) {
        if (IsCut(r)) Disconnect(r);
        if (!cut) Connect(r);
      }
      Work();
    }
    Pump();
  }

  void SetHeld(bool held) {
    absl::MutexLock lock(&mutex_);
    held_ = held;
  }

  // The next call of one observer; of any, where rank is -1. False where there is none.
  bool Deliver(int rank) {
    std::function<void()> call;
    Seat* called = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      for (int r = 0; r < size() && call == nullptr; ++r) {
        Seat& seat = seats_[r];
        if ((rank >= 0 && r != rank) || seat.calling != std::thread::id()) continue;
        while (call == nullptr && !seat.calls.empty()) {
          const Call next = std::move(seat.calls.front());
          seat.calls.pop_front();
          call = next(seat);
        }
        called = &seat;
      }
      if (call == nullptr) return false;
      called->calling = std::this_thread::get_id();
    }
    call();
    absl::MutexLock lock(&mutex_);
    called->calling = std::thread::id();
    if (const auto acknowledge = std::exchange(called->acknowledge, std::nullopt); called->phase == Phase::kFormed) {
      if (acknowledge.has_value()) Say(*called, *acknowledge);
    }
    Work();
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
    return coordinator_.has_value() ? coordinator_->Missing() : "rank 0 is missing";
  }

 private:
  enum class Phase { kIdle, kJoins, kFormed, kLost };  // as its observer has heard
  struct Seat;
  // What a seat hears when it is its turn: the call of its observer; null where it is of no concern any more.
  using Call = std::function<std::function<void()>(Seat&)>;
  struct Seat {
    bool cut = false;
    int64_t incarnation = 0;
    bool alive = false;
    int64_t connection = 0;  // to the coordinator; 0: none
    Phase phase = Phase::kIdle;
    ReplicaState state;
    int64_t generation = 0;  // of kFormed; else the last that was
    ReplicaObserver* observer = nullptr;
    std::shared_ptr<ReplicaGroup> group;  // of the generation that forms or is formed
    std::deque<Call> calls;
    std::optional<v1::MeetRequest> acknowledge;  // what is being delivered
    std::thread::id calling;                     // who makes a call now
  };

  v1::Hello HelloOf(int rank) const {
    v1::Hello hello;
    hello.set_rank(rank);
    hello.set_size(size());
    return hello;
  }

  static absl::Status LostError(int rank) { return absl::UnavailableError(absl::StrCat("rank ", rank, " was lost")); }

  bool held() const {
    absl::MutexLock lock(&mutex_);
    return held_;
  }
  int64_t incarnation(int rank) const {
    absl::MutexLock lock(&mutex_);
    return seats_[rank].incarnation;
  }
  // Rank 0 reaches its own coordinator whatever is cut.
  bool IsCut(int rank) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return rank != 0 && (seats_[rank].cut || seats_[0].cut);
  }

  // What a server does.
  template <typename Act>
  void Do(int rank, int64_t incarnation, Act act) {
    {
      absl::MutexLock lock(&mutex_);
      Seat& seat = seats_[rank];
      if (!seat.alive || seat.incarnation != incarnation) return;
      act(seat);
      Work();
    }
    Pump();
  }
  void SayAsMember(int rank, int64_t incarnation, int64_t generation, v1::MeetRequest request) {
    Do(rank, incarnation, [&](Seat& seat) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      if (seat.phase == Phase::kFormed && seat.generation == generation) Say(seat, std::move(request));
    });
  }

  // To the coordinator; by Work, as it may be at something.
  void Say(const Seat& seat, v1::MeetRequest request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (seat.connection != 0) said_.push_back({seat.connection, std::move(request)});
  }
  void SayJoin(const Seat& seat) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    v1::MeetRequest request;
    *request.mutable_join()->mutable_position() = PositionOf(seat.state);
    request.mutable_join()->set_last_generation(seat.generation);
    Say(seat, std::move(request));
  }
  void SayLeave(const Seat& seat, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    v1::MeetRequest request;
    request.mutable_leave()->set_reason(std::string(why.message()));
    Say(seat, std::move(request));
  }
  void Work() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    while (!said_.empty()) {
      const auto [connection, request] = std::move(said_.front());
      said_.pop_front();
      if (coordinator_.has_value() && ranks_.contains(connection)) coordinator_->Receive(connection, request);
    }
  }

  // Where a server that has joined has no connection, and may have one.
  void Connect(int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Seat& seat = seats_[rank];
    if (!coordinator_.has_value() || seat.connection != 0 || seat.phase != Phase::kJoins || IsCut(rank)) return;
    seat.connection = ++last_connection_;
    ranks_[seat.connection] = rank;
    v1::MeetRequest request;
    *request.mutable_hello() = HelloOf(rank);
    Say(seat, std::move(request));
    SayJoin(seat);
  }
  // What is on the way is lost.
  void Disconnect(int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Seat& seat = seats_[rank];
    if (seat.connection != 0) {
      const int64_t connection = std::exchange(seat.connection, 0);
      ranks_.erase(connection);
      if (coordinator_.has_value()) coordinator_->Closed(connection, absl::UnavailableError("its connection ended"));
      CutOff(seat, LostError(seat.alive ? 0 : rank));
    }
  }
  void CutOff(Seat& seat, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    seat.calls.clear();
    if (seat.group != nullptr) seat.group->Abort(why);
    seat.calls.push_back([=, this](Seat& seat) { return Lose(seat, why, /*heard_all=*/false); });
  }
  // Of a generation that it has not heard of, there is nothing to tell.
  std::function<void()> Lose(Seat& seat, const absl::Status& why, bool heard_all) {
    if (seat.phase != Phase::kFormed) return nullptr;
    seat.phase = Phase::kLost;
    std::exchange(seat.group, nullptr)->Abort(why);
    return [=, observer = seat.observer] { observer->Lost(why, heard_all); };
  }

  // Coordinator::Carrier, from within its calls.
  void End(int64_t connection, const absl::Status& why) override {
    mutex_.AssertHeld();
    const auto rank = ranks_.find(connection);
    if (rank == ranks_.end()) return;
    Seat& seat = seats_[rank->second];
    ranks_.erase(rank);
    seat.connection = 0;
    seat.calls.push_back([=, this](Seat& seat) { return Lose(seat, why, /*heard_all=*/false); });
  }
  void Send(int64_t connection, const v1::MeetResponse& response) override {
    mutex_.AssertHeld();
    const auto rank = ranks_.find(connection);
    if (rank == ranks_.end()) return;
    Seat& seat = seats_[rank->second];
    switch (response.message_case()) {
      case v1::MeetResponse::kGather: return Gather(seat, response.gather());
      case v1::MeetResponse::kConnect: return Say(seat, Connected(response.connect().generation()));
      case v1::MeetResponse::kFormed: generation_ = response.formed().generation(); break;
      case v1::MeetResponse::kLost: generation_ = 0; break;
      default: break;
    }
    seat.calls.push_back([=, this](Seat& seat) { return Hear(seat, response); });
  }
  void Gather(Seat& seat, const v1::Gather& gather) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (gather.index() == 0) groups_ = MakeHubGroup(gather.member_count());
    seat.group = std::move(groups_[gather.index()]);
    v1::MeetRequest request;
    request.mutable_addresses()->set_generation(gather.generation());
    for (int member = 0; member < gather.member_count(); ++member) request.mutable_addresses()->add_addresses("");
    Say(seat, std::move(request));
  }
  static v1::MeetRequest Connected(int64_t generation) {
    v1::MeetRequest request;
    request.mutable_connected()->set_generation(generation);
    return request;
  }

  std::function<void()> Hear(Seat& seat, const v1::MeetResponse& response) {
    ReplicaObserver* const observer = seat.observer;
    if (response.has_formed() && seat.phase == Phase::kJoins) {
      const Generation generation = Form(seat, response.formed());
      return [=] { observer->Formed(generation); };
    }
    if (response.has_lost()) {
      return Lose(seat, absl::UnavailableError(response.lost().reason()), /*heard_all=*/true);
    }
    if (seat.phase != Phase::kFormed) return nullptr;
    if (response.has_stable()) return [=, index = response.stable().index()] { observer->Stable(index); };
    if (!response.has_agreed()) return nullptr;
    seat.acknowledge.emplace();
    seat.acknowledge->mutable_acknowledge()->set_generation(seat.generation);
    seat.acknowledge->mutable_acknowledge()->set_index(response.agreed().index());
    return [=, agreed = response.agreed()] { observer->Agreed(agreed.index(), agreed.rank(), agreed.message()); };
  }
  static Generation Form(Seat& seat, const v1::Formed& formed) {
    if (seat.group == nullptr) seat.group = MakeLocalGroup();
    seat.phase = Phase::kFormed;
    seat.generation = formed.generation();
    Generation generation;
    generation.number = seat.generation;
    generation.group = seat.group;
    for (const v1::Member& member : formed.members()) {
      generation.members.push_back({.rank = member.rank(), .state = StateOf(member.position())});
    }
    generation.source = MostAdvanced(generation.members);
    return generation;
  }

  const OnLoss on_loss_;
  mutable absl::Mutex mutex_;
  std::optional<Coordinator> coordinator_ ABSL_GUARDED_BY(mutex_);  // while rank 0 lives
  int64_t last_connection_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, int> ranks_ ABSL_GUARDED_BY(mutex_);  // by connection
  std::deque<std::pair<int64_t, v1::MeetRequest>> said_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<ReplicaGroup>> groups_ ABSL_GUARDED_BY(mutex_);  // that are still to be taken
  int64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;                             // 0: none is formed
  bool held_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Seat> seats_;  // by rank; the size is constant, the elements are guarded by mutex_
};

class HubReplicas::Member final : public Replicas {
 public:
  Member(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank), incarnation_(hub_->Start(rank)) {}
  ~Member() override { hub_->End(rank_, incarnation_, std::nullopt); }

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
void HubReplicas::Kill(int rank) { hub_->End(rank, -1, std::nullopt); }
int64_t HubReplicas::generation() const { return hub_->generation(); }

}  // namespace shardmlp::testing
