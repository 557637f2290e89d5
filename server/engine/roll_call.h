// Who takes part in a step, over all replicas: what each of them says of its trainers.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/step_message.h"
#include "server/engine/step_types.h"

namespace shardmlp {

// The same on every replica that took the same reports in the same order. Thread-compatible.
class RollCall {
 public:
  // A new set of replicas, by rank; nothing that was said before counts.
  void Begin(const std::vector<int>& replicas);

  // A trainer that can't be where it is.
  struct Refusal {
    int replica = 0;
    int trainer_rank = 0;
    absl::Status why;
  };
  // Takes what replica `from` says in place of what it said before, but for the trainers that can't be: of another run
  // than another replica's trainers, or of a rank that is connected there. Where that one came in an earlier
  // generation, the trainer has moved, and it's the other that can't be.
  std::vector<Refusal> Take(int from, TrainerReport report);
  // Whether Take would take a trainer from replica `at`. FAILED_PRECONDITION (RUN_CONFLICT).
  absl::Status Check(int at, const SessionSpec& trainer) const;

  // Whether every replica has said anything.
  bool AllReported() const;
  // Whether every replica has, and all trainers of the run are connected and have sealed the attempt that is open.
  bool AllSealed(const StepPosition& open) const;
  // Whether any replica says that it has begun the attempt.
  bool InProgress(const StepPosition& open) const;
  // A step was committed, by the trainers of all.
  void Committed();
  // Whether a trainer of another replica than `at` has committed one in its session.
  bool CommittedElsewhere(int at) const;
  // "rank 1 (not connected), rank 2"
  std::string Missing(const StepPosition& open) const;

  // What all trainers sent in the attempt.
  LayerRows RowsOf(const StepPosition& open) const;
  // The first, by replicas; empty for none.
  std::string NonFiniteOrigin(const StepPosition& open) const;

 private:
  // Forgets trainers of other replicas than `from` whose rank came to that one later.
  std::vector<Refusal> LetMove(int from, const TrainerReport& report);
  // Trainers of all replicas by rank, and whether they have sealed the attempt.
  std::map<int, bool> Sealed(const StepPosition& open) const;
  int trainer_count() const;  // of the run; 0 where there is none

  std::map<int, TrainerReport> reports_;  // by replica; without a trainer where nothing was said
  std::map<int, bool> reported_;
};

}  // namespace shardmlp
