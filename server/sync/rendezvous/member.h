// Replicas of several processes: one of them, which keeps a stream to rank 0's coordinator.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/sync/rendezvous/coordinator_server.h"
#include "server/sync/rendezvous/loop.h"
#include "server/sync/rendezvous/member_stream.h"
#include "server/sync/rendezvous/replicas_options.h"

namespace shardmlp {

// Reconnects for as long as it takes, once it was in a generation. All calls of the observer come from one thread.
// Thread-safe. To destroy it without Stop is to die as far as the others know.
class Member final : public Replicas {
 public:
  // `server`: rank 0's coordinator, which stops with it; null on others.
  Member(const ReplicasOptions& options, std::unique_ptr<CoordinatorServer> server);
  ~Member() override;

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  void Join(const ReplicaState& state, ReplicaObserver& observer) override;
  void Propose(int64_t generation, std::string message) override;
  void Admit(int64_t generation, bool now) override;
  void Leave(const absl::Status& why) override;
  std::string Missing() const override;
  void Stop(const absl::Status& why) override;

 private:
  enum class Phase {
    kIdle,    // not joined yet
    kJoins,   // waits for a generation
    kFormed,  // is in one
    kLost,    // its owner knows that it is over, and has not joined again
    kOver,    // refused or stopped
  };

  // On the loop's thread, as is all that is not guarded.
  void Tick();
  void CheckMesh(absl::Time now);
  void Log(absl::Time now);
  void Open();
  // Whether a stream may be opened: what the last generation asked of this one has ended.
  bool MayOpen() const { return stream_ == nullptr && mesh_jobs_ == 0; }
  void SendJoin();
  void Received(const v1::MeetResponse& response);
  void Ended(const absl::Status& why);
  // Rank 0 is; another stream is opened after a while.
  void Unreachable(absl::string_view why);
  void Gather(const v1::Gather& gather);
  void Connect(const v1::Connect& connect);
  void Form(const v1::Formed& formed);
  void Agree(const v1::Agreed& agreed);
  void Lose(const absl::Status& why, bool heard_all);
  void DropGroup(const absl::Status& why);
  void Refuse(const absl::Status& why);
  void SayFailed(int64_t generation, const absl::Status& why);
  void SayLeave(const absl::Status& why);
  // Takes time, on the thread that connects to peers; `done` is called back here, with what it returns.
  template <typename Work, typename Done>
  void RunOnMesh(Work work, Done done);
  void SetMissing(std::string missing);
  // Ends the stream, with a word about why unless that is null, and is over.
  void Finish(const absl::Status* why);
  bool IsOver() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return over_; }

  const ReplicasOptions options_;
  std::unique_ptr<CoordinatorServer> server_;

  Phase phase_ = Phase::kIdle;
  ReplicaObserver* observer_ = nullptr;
  ReplicaState state_;
  int64_t generation_ = 0;               // of kFormed; else the last that was
  std::shared_ptr<ReplicaGroup> group_;  // of the generation that is formed
  int64_t gathers_ = 0;                  // the generation that is to form; 0: none
  std::shared_ptr<PeerGroup> mesh_;      // of that one, then of the one that is formed; null where it is alone
  int mesh_jobs_ = 0;                    // that have not ended
  absl::Time say_failed_at_ = absl::InfinitePast();  // once it is known that a collective on that mesh failed
  std::unique_ptr<MemberStream> stream_;             // null: none is open
  bool leaves_ = false;                              // the stream, as it has said
  absl::Time next_open_ = absl::InfinitePast();      // where the last one failed
  absl::Time joined_at_ = absl::InfinitePast();      // for the first time
  absl::Time next_log_ = absl::InfiniteFuture();
  absl::Time leave_by_ = absl::InfiniteFuture();  // when to end a stream that does not end by itself

  mutable absl::Mutex mutex_;
  std::string missing_ ABSL_GUARDED_BY(mutex_);
  bool over_ ABSL_GUARDED_BY(mutex_) = false;  // no stream is open and none will be

  Loop loop_;
  Loop mesh_loop_;  // connects to peers, which takes time
};

}  // namespace shardmlp
