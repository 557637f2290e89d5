// Steps of several replicas, with everything that they agree on delivered by hand.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/step_harness.h"

namespace shardmlp::testing {

using Log = std::vector<std::pair<int, StepMessage>>;  // by whom

class Replica final : public StepPeers {
 public:
  Replica(Log& log, int rank) : log_(log), rank_(rank) {}

  void Propose(const StepMessage& message, Outbox&) override { log_.emplace_back(rank_, message); }
  void Rejoin() override { ++rejoined; }
  std::string Missing() const override { return ""; }

  // Hears of the next `count` messages; of all, where that is -1.
  void Hear(int count = -1) {
    Outbox outbox;
    for (; heard_ < log_.size() && count != 0; --count, ++heard_) {
      step.Agreed(static_cast<int64_t>(heard_), log_[heard_].first, log_[heard_].second, absl::Now(), outbox);
    }
  }
  // Never hears of what was agreed on up to now.
  void Miss() { heard_ = log_.size(); }
  void Lose(bool heard_all = true) {
    Outbox outbox;
    step.Lost(absl::UnavailableError("replica 2 died"), heard_all, outbox);
  }
  void Receive(StepPosition position, const std::optional<CommittedStep>& committed) {
    Outbox outbox;
    step.Received(position, committed, outbox);
  }
  void GoOn(StepPosition position) {
    Outbox outbox;
    step.GoOnFrom(position, outbox);
  }
  void Form(const std::vector<int>& replicas, int64_t generation = 2) {
    Outbox outbox;
    step.Formed(generation, replicas, outbox);
  }
  void Remove(int64_t session, bool lost) {
    Outbox outbox;
    step.RemoveTrainer(session, lost, outbox);
  }
  void Expire(absl::Time now) {
    Outbox outbox;
    step.ExpireSeals(now, outbox);
  }
  void Open(int64_t session, int rank, int count) {
    Outbox outbox;
    step.AddTrainer(session, {"run", SessionRole::kTrain, count, rank}, outbox);
  }
  absl::StatusOr<LedgerVerdict> Add(int64_t session, int64_t rows) {
    Outbox outbox;
    return step.Admit({session, 7, 0, rows, 0, rows, 1}, step.position().step, step.position().attempt, "", outbox);
  }
  std::shared_ptr<Answer<SealResult>> Seal(int64_t session, const LayerRows& rows = {}) {
    auto [answer, done] = Expected<SealResult>();
    Outbox outbox;
    step.Seal({session, step.position().step, step.position().attempt, rows}, absl::Now(), std::move(done), outbox);
    return answer;
  }
  std::shared_ptr<Answer<StepPosition>> Commit(int64_t session, StepPosition at) {
    auto [answer, done] = Expected<StepPosition>();
    Outbox outbox;
    step.Commit({session, at.step, at.attempt, {{{"gate", "down"}, Sgd{.learning_rate = 0.5}}}}, std::move(done),
                outbox);
    return answer;
  }
  std::shared_ptr<Answer<StepPosition>> Discard(int64_t session) {
    auto [answer, done] = Expected<StepPosition>();
    Outbox outbox;
    step.Discard({session, step.position().step, step.position().attempt, "no"}, std::move(done), outbox);
    return answer;
  }
  void Sum(std::vector<double> squares) {
    Outbox outbox;
    step.Summed(step.position(), std::move(squares), outbox);
  }
  void Apply() {
    Outbox outbox;
    step.Applied(absl::OkStatus(), outbox);
  }
  void Stabilize() {
    Outbox outbox;
    step.Stable(static_cast<int64_t>(heard_) - 1, outbox);
  }

  int rejoined = 0;
  NotingDevice device;
  Metrics metrics;

 private:
  Log& log_;
  const int rank_;
  size_t heard_ = 0;

 public:
  StepProtocol step{device, *this, metrics, {"gate", "down"}, absl::Minutes(5), /*first_weights_version=*/1, rank_};
};

// Session 1 at replica 0 is trainer 0, session 2 at replica 1 is trainer 1.
class AgreementTest : public ::testing::Test {
 protected:
  AgreementTest() {
    for (Replica* replica : {&zero_, &one_}) replica->Form({0, 1}, 1);
    zero_.Open(1, 0, 2);
    one_.Open(2, 1, 2);
    HearAll();
  }
  void HearAll() {
    size_t before = 0;
    do {
      before = log_.size();
      zero_.Hear();
      one_.Hear();
    } while (log_.size() > before);
  }
  void SealBoth() {
    zero_.Seal(1);
    one_.Seal(2);
    HearAll();
    zero_.Sum({4, 9});
    one_.Sum({4, 9});
    HearAll();
  }

  Log log_;
  Replica zero_{log_, 0};
  Replica one_{log_, 1};
};

}  // namespace shardmlp::testing
