#include <algorithm>
#include <functional>
#include <queue>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/sync/replicas.h"

namespace shardmlp {
namespace {

class LocalReplicas final : public Replicas {
 public:
  ~LocalReplicas() override { Stop(absl::OkStatus()); }

  int rank() const override { return 0; }
  int size() const override { return 1; }

  void Join(const ReplicaState& state, ReplicaObserver& observer) override {
    Generation generation;
    generation.number = std::max(state.generation, state.checkpoint_generation) + 1;
    generation.members = {{.rank = 0, .state = state}};
    generation.group = MakeLocalGroup();
    {
      absl::MutexLock lock(&mutex_);
      if (stopped_) return;
      generation_ = generation.number;
      observer_ = &observer;
      calls_.push([&observer, generation] { observer.Formed(generation); });
    }
    MakeCalls();
  }

  void Propose(int64_t generation, std::string message) override {
    {
      absl::MutexLock lock(&mutex_);
      if (stopped_ || generation != generation_) return;
      calls_.push([observer = observer_, index = next_index_++, message = std::move(message)] {
        observer->Agreed(index, 0, message);
        observer->Stable(index);
      });
    }
    MakeCalls();
  }

  void Admit(int64_t, bool) override {}
  void Leave(const absl::Status&) override {}
  std::string Missing() const override { return ""; }

  void Stop(const absl::Status&) override {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
    calls_ = {};
    if (calling_ != std::this_thread::get_id()) mutex_.Await(absl::Condition(this, &LocalReplicas::NobodyCalls));
  }

 private:
  using Call = std::function<void()>;

  bool NobodyCalls() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return calling_ == std::thread::id(); }

  // Makes the calls that wait, or, from within one, leaves them to whoever makes that.
  void MakeCalls() {
    {
      absl::MutexLock lock(&mutex_);
      if (calling_ == std::this_thread::get_id()) return;
      mutex_.Await(absl::Condition(this, &LocalReplicas::NobodyCalls));
      calling_ = std::this_thread::get_id();
    }
    while (const Call call = NextCall()) call();
  }

  // Empty where none waits, and then nobody calls any more.
  Call NextCall() {
    absl::MutexLock lock(&mutex_);
    if (calls_.empty()) {
      calling_ = std::thread::id();
      return nullptr;
    }
    Call call = std::move(calls_.front());
    calls_.pop();
    return call;
  }

  absl::Mutex mutex_;
  ReplicaObserver* observer_ ABSL_GUARDED_BY(mutex_) = nullptr;
  int64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: not joined
  int64_t next_index_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::queue<Call> calls_ ABSL_GUARDED_BY(mutex_);
  std::thread::id calling_ ABSL_GUARDED_BY(mutex_);  // the thread that makes the calls, one at a time
};

}  // namespace

std::unique_ptr<Replicas> MakeLocalReplicas() { return std::make_unique<LocalReplicas>(); }

}  // namespace shardmlp
