// A step protocol on a device that only notes what it was asked.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "server/engine/step_protocol.h"
#include "server/metrics.h"
#include "tests/engine/outcome.h"

namespace shardmlp::testing {

// What a callback was given, and how often.
template <typename T>
struct Answer {
  int count = 0;
  absl::StatusOr<T> result = absl::UnknownError("not answered");
};

template <typename T>
std::pair<std::shared_ptr<Answer<T>>, absl::AnyInvocable<void(absl::StatusOr<T>)>> Expected() {
  auto answer = std::make_shared<Answer<T>>();
  return {answer, [answer](absl::StatusOr<T> result) {
            ++answer->count;
            answer->result = std::move(result);
          }};
}

class NotingDevice final : public StepDevice {
 public:
  void Restore(int from, const CheckpointEdition& checkpoint) override {
    asked.push_back(absl::StrCat("restore ", checkpoint.name, " of ", from));
  }
  void SumGradients(StepPosition of) override {
    asked.push_back("sum");
    summing = of;
  }
  void Apply(std::shared_ptr<const CommitSpec> commit) override {
    asked.push_back("apply");
    decision = std::move(commit);
  }
  void ClearGradients() override { asked.push_back("clear"); }
  void ReleaseStash() override { ++stash_releases; }

  std::vector<std::string> asked;  // in order
  int stash_releases = 0;
  StepPosition summing;
  std::shared_ptr<const CommitSpec> decision;
};

// The set of one: what is proposed is agreed on as soon as the outbox delivers.
class OwnPeers final : public StepPeers {
 public:
  explicit OwnPeers(StepProtocol& step) : step_(step) {}
  void Propose(const StepMessage& message, Outbox& outbox) override {
    outbox.Do([this, message = ParseStepMessage(Serialize(message)).value()] {
      Outbox next;
      step_.Agreed(index_, 0, message, absl::Now(), next);
      step_.Stable(index_++, next);
    });
  }
  void Rejoin() override {}
  std::string Missing() const override { return ""; }

 private:
  StepProtocol& step_;
  int64_t index_ = 0;
};

// Sessions 1, 2, ... are ranks 0, 1, ... of one run. Layer 0 has the tensors "gate" and "down".
class StepTest : public ::testing::Test {
 protected:
  StepTest() {
    Outbox outbox;
    step_.Formed(1, {0}, outbox);
  }

  using Asked = std::vector<std::string>;
  using SealAnswer = std::shared_ptr<Answer<SealResult>>;
  using PositionAnswer = std::shared_ptr<Answer<StepPosition>>;

  static constexpr absl::Duration kSealTimeout = absl::Minutes(5);

  // Opens sessions 1 to `connected` of a run of `count` trainers.
  void Connect(int connected, int count) {
    for (int rank = 0; rank < connected; ++rank) {
      AddTrainer(rank + 1, {"run", SessionRole::kTrain, count, rank});
    }
  }

  void AddTrainer(int64_t session, const SessionSpec& spec) {
    Outbox outbox;
    step_.AddTrainer(session, spec, outbox);
  }

  // A tile of `rows` rows, in a call of its own, to `layer`.
  absl::StatusOr<LedgerVerdict> Add(int64_t session, int64_t rows, int layer = 0, const std::string& non_finite = "") {
    return Admit({session, ++calls_, layer, rows, 0, rows, 1}, step_.position(), non_finite);
  }
  absl::StatusOr<LedgerVerdict> Admit(const Contribution& contribution, StepPosition at,
                                      const std::string& non_finite = "") {
    Outbox outbox;
    return step_.Admit(contribution, at.step, at.attempt, non_finite, outbox);
  }

  SealAnswer Seal(int64_t session, const LayerRows& rows, StepPosition at) {
    auto [answer, done] = Expected<SealResult>();
    Outbox outbox;
    step_.Seal({session, at.step, at.attempt, rows}, now_, std::move(done), outbox);
    return answer;
  }
  SealAnswer Seal(int64_t session, const LayerRows& rows = {}) { return Seal(session, rows, step_.position()); }

  static CommitSpec CommitOf(int64_t session, StepPosition at, double learning_rate = 0.5) {
    return {session, at.step, at.attempt, {{{"gate", "down"}, Sgd{.learning_rate = learning_rate}}}, 0.25};
  }
  PositionAnswer Commit(const CommitSpec& spec) {
    auto [answer, done] = Expected<StepPosition>();
    Outbox outbox;
    step_.Commit(spec, std::move(done), outbox);
    return answer;
  }
  PositionAnswer Commit(int64_t session) { return Commit(CommitOf(session, step_.position())); }

  PositionAnswer Discard(int64_t session, StepPosition at) {
    auto [answer, done] = Expected<StepPosition>();
    Outbox outbox;
    step_.Discard({session, at.step, at.attempt, "the loss overflowed"}, std::move(done), outbox);
    return answer;
  }
  PositionAnswer Discard(int64_t session) { return Discard(session, step_.position()); }

  // The device's turns.
  void Sum(absl::StatusOr<std::vector<double>> squares = std::vector<double>{4, 9}) {
    Outbox outbox;
    step_.Summed(device_.summing, std::move(squares), outbox);
  }
  void Apply(const absl::Status& status = absl::OkStatus()) {
    Outbox outbox;
    step_.Applied(status, outbox);
  }
  void Restore(int64_t step) {
    Outbox outbox;
    step_.Restored({"checkpoint", "1"}, step, outbox);
  }
  void Leave(int64_t session, bool lost) {
    Outbox outbox;
    step_.RemoveTrainer(session, lost, outbox);
  }
  void Expire() {
    Outbox outbox;
    step_.ExpireSeals(now_, outbox);
  }

  // One trainer's step, up to the sums, or up to the new weights.
  void SealOne(int64_t rows = 4) {
    ASSERT_TRUE(Succeeds(Add(1, rows)));
    Seal(1, {{0, rows}});
    Sum();
  }
  void CommitOne() {
    SealOne();
    Commit(1);
    Apply();
  }

  Metrics metrics_;
  NotingDevice device_;
  OwnPeers peers_{step_};
  StepProtocol step_{device_,   peers_, metrics_, {"gate", "down"}, kSealTimeout, /*first_weights_version=*/1,
                     /*rank=*/0};
  absl::Time now_ = absl::FromUnixSeconds(1'000'000);

 private:
  int64_t calls_ = 0;
};

}  // namespace shardmlp::testing
