// Backward by ticket: to the bit what it is with x sent, whatever is sent again, cut or gone; and nothing stays behind.
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/lane.h"
#include "tests/engine/bytes.h"
#include "tests/engine/hand_clock.h"
#include "tests/engine/lazy_device.h"
#include "tests/engine/outcome.h"
#include "tests/engine/trainer.h"

namespace shardmlp::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kTileRows = 4;
constexpr int64_t kRows = 22;  // six tiles, the last of two rows
constexpr int64_t kPlenty = 1 << 20;

EngineOptions WithStash(const TinyModel& model, int64_t stash_bytes, int64_t tile_rows = kTileRows) {
  EngineOptions options = TilesOf(tile_rows, model);
  options.stash_bytes = stash_bytes;
  return options;
}

bool MetricsSay(const TestEngine& engine, const std::string& line) {
  return absl::StrContains(engine.metrics.Text(), absl::StrCat(line, "\n"));
}

// The answer of a forward that asks for its x to be kept.
CallSummary Keep(Trainer& trainer, size_t layer, const Dense& x, DType dtype = DType::kF32) {
  ForwardSpec spec = trainer.ForwardHeader(layer, x.rows);
  spec.dtype = dtype;
  spec.keep_input = KeepInput::kIfRoom;
  const auto call = trainer.Start(spec, x);
  EXPECT_TRUE(Succeeds(call->SendAll(3)));
  return call->Wait().value();
}

Dense NoX(int64_t rows) { return Dense(rows, 0); }

// What a step came to, to the bit.
struct Outcome {
  std::vector<Dense> dx;
  std::vector<double> squares;
  std::vector<Dense> weights;
  bool operator==(const Outcome&) const = default;
};

void SealAndCommit(TestEngine& engine, Trainer& trainer, Outcome& outcome) {
  const absl::StatusOr<SealResult> seal = trainer.Seal();
  ASSERT_TRUE(Succeeds(seal));
  outcome.squares = seal->tensor_sums_of_squares;
  ASSERT_TRUE(Succeeds(trainer.Commit(AdamW{.learning_rate = 0.01})));
  for (const TensorSpec& tensor : engine->model().tensors) outcome.weights.push_back(engine.Read(tensor));
}

enum class Kept { kNothing, kX, kXAndGateUp };

struct BitsCase {
  DType compute;
  DType wire;
  bool lazy_device;
};

class StashBitsTest : public ::testing::TestWithParam<BitsCase> {
 protected:
  static std::unique_ptr<Backend> MakeBackend() {
    if (GetParam().lazy_device) return std::make_unique<LazyDevice>();
    return OneThread();
  }

  // Two steps of two micro-batches: forward through all layers, then backward through them in the opposite order.
  Outcome Run(Kept kept) {
    const DType compute = GetParam().compute;
    const TinyModel model({OddMlp(compute), PlainMlp(compute), UngatedMlp(compute)});
    const auto size = [&](const MlpConfig& mlp) {
      const int64_t gate_up = mlp.gate_up_size() * SizeOf(compute);
      return (kRows + 1) * (mlp.hidden_size * SizeOf(GetParam().wire) + (kept == Kept::kX ? 0 : gate_up)) + 128;
    };
    int64_t bytes = 0;
    for (const LayerSpec& layer : model.spec().layers) bytes += kept == Kept::kNothing ? 0 : size(layer.mlp);
    const int tiles = GetParam().lazy_device ? kLaneDepth : 1;
    TestEngine engine(model, WithStash(model, bytes, tiles * kTileRows), MakeBackend());
    Trainer trainer(*engine);
    Outcome outcome;
    for (int step = 0; step < 2; ++step) {
      for (int micro = 0; micro < 2; ++micro) RunMicroBatch(trainer, kept, 10 * step + micro, outcome);
      EXPECT_TRUE(MetricsSay(engine, "shardmlp_stash_bytes 0"));
      SealAndCommit(engine, trainer, outcome);
    }
    EXPECT_EQ(MetricsSay(engine, "shardmlp_gemm_flops_total{kind=\"recomputed\"} 0"), kept == Kept::kXAndGateUp);
    const int hits = kept == Kept::kNothing ? 0 : 2 * 2 * 3;
    EXPECT_TRUE(MetricsSay(engine, absl::StrCat("shardmlp_stash_tickets_total{event=\"hit\"} ", hits)));
    return outcome;
  }

  void RunMicroBatch(Trainer& trainer, Kept kept, int seed, Outcome& outcome) {
    const auto& layers = trainer.engine().model().layers;
    std::vector<Dense> x;
    std::vector<int64_t> tickets;
    for (size_t n = 0; n < layers.size(); ++n) {
      x.push_back(RandomDense(kRows, layers[n].mlp.hidden_size, 100 * seed + n));
      const CallSummary summary = Keep(trainer, n, x.back(), GetParam().wire);
      EXPECT_EQ(summary.ticket != 0, kept != Kept::kNothing);
      EXPECT_TRUE(summary.gate_up_kept || kept != Kept::kXAndGateUp);
      tickets.push_back(summary.ticket);
    }
    for (size_t n = layers.size(); n-- > 0;) {
      BackwardSpec header = trainer.BackwardHeader(n, kRows);
      header.dtype = GetParam().wire;
      header.ticket = tickets[n];
      const Dense dy = RandomDense(kRows, layers[n].mlp.output_size, 100 * seed + n + 50, 0.1);
      const auto call = trainer.Start(header, header.ticket == 0 ? x[n] : NoX(kRows), dy);
      EXPECT_TRUE(Succeeds(call->SendAll(2)));
      EXPECT_TRUE(Succeeds(call->Wait()));
      outcome.dx.push_back(call->rows());
    }
  }
};

TEST_P(StashBitsTest, AStepIsTheSameWhateverIsKept) {
  const Outcome sent = Run(Kept::kNothing);
  ASSERT_EQ(sent.dx.size(), 12U);
  EXPECT_EQ(Run(Kept::kX), sent);
  EXPECT_EQ(Run(Kept::kXAndGateUp), sent);
}

INSTANTIATE_TEST_SUITE_P(
    DTypes, StashBitsTest,
    ::testing::Values(BitsCase{DType::kF32, DType::kF32, false}, BitsCase{DType::kF32, DType::kBF16, false},
                      BitsCase{DType::kBF16, DType::kBF16, false}, BitsCase{DType::kBF16, DType::kF32, false},
                      BitsCase{DType::kF64, DType::kF64, false}, BitsCase{DType::kF32, DType::kF32, true},
                      BitsCase{DType::kF32, DType::kF16, true}),
    [](const auto& info) {
      return absl::StrCat(Name(info.param.compute), "Sent", Name(info.param.wire),
                          info.param.lazy_device ? "Lazy" : "Cpu");
    });

class StashTest : public ::testing::Test {
 protected:
  // A step in which `backward` runs the backward of a forward that was kept under the ticket it is given.
  using RunBackward = std::function<Dense(Trainer&, int64_t ticket)>;
  Outcome Step(const RunBackward& backward) {
    TestEngine engine(model_, WithStash(model_, kPlenty));
    Trainer trainer(*engine);
    Outcome outcome;
    outcome.dx.push_back(backward(trainer, Keep(trainer, 0, x_, DType::kF64).ticket));
    SealAndCommit(engine, trainer, outcome);
    EXPECT_TRUE(MetricsSay(engine, "shardmlp_stash_bytes 0"));
    return outcome;
  }
  Outcome Undisturbed() {
    return Step([this](Trainer& trainer, int64_t) { return trainer.Backward(0, x_, dy_); });
  }
  BackwardSpec HeaderOf(Trainer& trainer, int64_t ticket) const {
    BackwardSpec header = trainer.BackwardHeader(0, kRows);
    header.ticket = ticket;
    return header;
  }
  // The backward under `header`, with x where it has no ticket, to its end; the trainer does not count its rows.
  std::unique_ptr<RunningCall> Send(Trainer& trainer, const BackwardSpec& header) const {
    auto call = RunningCall::Backward(trainer.engine(), header, header.ticket == 0 ? x_ : NoX(kRows), dy_).value();
    EXPECT_TRUE(Succeeds(call->SendAll()));
    EXPECT_TRUE(Succeeds(call->Wait()));
    return call;
  }
  absl::Status Refusal(Trainer& trainer, const BackwardSpec& header) const {
    return RunningCall::Backward(trainer.engine(), header, NoX(header.row_count), dy_).status();
  }
  bool Missing(Trainer& trainer, int64_t ticket) const {
    return Fails(Refusal(trainer, HeaderOf(trainer, ticket)), absl::StatusCode::kFailedPrecondition,
                 Reason::kTicketMissing);
  }

  const TinyModel model_{{OddMlp(), UngatedMlp()}};
  const Dense x_ = RandomDense(kRows, 13, 1);
  const Dense dy_ = RandomDense(kRows, 7, 2);
};

TEST_F(StashTest, ABackwardByTicketThatIsCutAndSentAgain) {
  const Outcome undisturbed = Undisturbed();
  for (const int64_t answered : {0, 4, 12, 20}) {
    for (const bool again_with_x : {false, true}) {
      EXPECT_EQ(Step([&](Trainer& trainer, int64_t ticket) {
                  BackwardSpec header = HeaderOf(trainer, ticket);
                  const auto first = trainer.Start(header, NoX(kRows), dy_);
                  if (answered > 0) {
                    EXPECT_TRUE(Succeeds(first->Send(answered)));
                  }
                  first->WaitForRows(answered);
                  first->Cancel();
                  // Where G and U were used up, they are recomputed.
                  if (again_with_x) header.ticket = 0;
                  const auto again = Send(trainer, header);
                  EXPECT_EQ(again->Wait()->repeated_row_count, answered);
                  return again->rows();
                }),
                undisturbed)
          << "cut after " << answered << " rows";
    }
  }
}

TEST_F(StashTest, ABackwardWhoseAnswerWasLostIsSentAgainWithX) {
  EXPECT_EQ(Step([&](Trainer& trainer, int64_t ticket) {
              BackwardSpec header = HeaderOf(trainer, ticket);
              const auto first = trainer.Start(header, NoX(kRows), dy_);
              EXPECT_TRUE(Succeeds(first->SendAll()));
              EXPECT_TRUE(Succeeds(first->Wait()));
              EXPECT_TRUE(Fails(Refusal(trainer, header), absl::StatusCode::kFailedPrecondition, Reason::kTicketMissing,
                                {"send the same call with x"}));
              header.ticket = 0;
              const auto again = Send(trainer, header);
              EXPECT_EQ(again->Wait()->repeated_row_count, kRows);
              EXPECT_EQ(again->rows(), first->rows());
              return again->rows();
            }),
            Undisturbed());
}

TEST_F(StashTest, ASecondBackwardOfOneForwardAddsAgainWithX) {
  const auto twice = [&](bool by_ticket) {
    return Step([&](Trainer& trainer, int64_t ticket) {
      trainer.sent()[LayerIndex(0)] += 2 * kRows;
      Send(trainer, HeaderOf(trainer, by_ticket ? ticket : 0));
      if (by_ticket) {
        EXPECT_TRUE(Missing(trainer, ticket));
      }
      return Send(trainer, HeaderOf(trainer, 0))->rows();
    });
  };
  EXPECT_EQ(twice(true), twice(false));
}

TEST_F(StashTest, XWithATicketOrATicketOfSomethingElseIsRefused) {
  TestEngine engine(model_, WithStash(model_, kPlenty));
  Trainer trainer(*engine);
  Trainer reader(*engine, 0, 1, SessionRole::kRead);
  const int64_t ticket = Keep(trainer, 0, x_, DType::kF64).ticket;
  const auto with_x = RunningCall::Backward(*engine, HeaderOf(trainer, ticket), x_, dy_).value();
  EXPECT_TRUE(Fails(with_x->SendAll(), absl::StatusCode::kInvalidArgument, Reason::kInvalidShape, {"expected none"}));
  with_x->Cancel();
  const BackwardSpec right = HeaderOf(trainer, ticket);
  BackwardSpec session = right, layer = right, rows = right, dtype = right, version = right, attempt = right;
  session.session_id = reader.session();
  session.weight_gradient = false;
  layer.layer = LayerIndex(1);
  rows.row_count = kRows - 1;
  dtype.dtype = DType::kF32;
  for (const BackwardSpec& other : {session, layer, rows, dtype}) {
    EXPECT_TRUE(Fails(Refusal(trainer, other), absl::StatusCode::kFailedPrecondition, Reason::kTicketMissing));
  }
  version.weights_version += 1;
  EXPECT_EQ(ReasonOf(Refusal(trainer, version)), Reason::kStaleWeights);
  attempt.attempt += 1;
  EXPECT_EQ(ReasonOf(Refusal(trainer, attempt)), Reason::kStaleAttempt);
  EXPECT_TRUE(Succeeds(Send(trainer, right)->Wait()));
}

TEST_F(StashTest, EveryEndLeavesNothing) {
  HandClock clock;
  EngineOptions options = WithStash(model_, kPlenty);
  options.clock = clock.reader();
  const std::vector<std::pair<std::string, std::function<void(TestEngine&, Trainer&)>>> ends = {
      {"commit",
       [&](TestEngine&, Trainer& trainer) {
         trainer.Backward(1, x_, dy_);
         ASSERT_TRUE(Succeeds(trainer.Seal()));
         ASSERT_TRUE(Succeeds(trainer.Commit()));
       }},
      {"discard", [](TestEngine&, Trainer& trainer) { ASSERT_TRUE(Succeeds(trainer.Discard())); }},
      {"close",
       [](TestEngine& engine, Trainer& trainer) { ASSERT_TRUE(engine->CloseSession(trainer.session()).ok()); }},
      {"lease", [&](TestEngine& engine, Trainer&) {
         clock.Advance(absl::Minutes(1));
         while (!MetricsSay(engine, "shardmlp_sessions{role=\"train\"} 0")) std::this_thread::yield();
       }}};
  for (const auto& [name, end] : ends) {
    SCOPED_TRACE(name);
    TestEngine engine(model_, options);
    Trainer trainer(*engine);
    const int64_t ticket = Keep(trainer, 0, x_, DType::kF64).ticket;
    EXPECT_FALSE(MetricsSay(engine, "shardmlp_stash_bytes 0"));
    end(engine, trainer);
    EXPECT_TRUE(MetricsSay(engine, "shardmlp_stash_bytes 0"));
    if (name == "commit" || name == "discard") {
      EXPECT_TRUE(Missing(trainer, ticket));
    }
  }
}

TEST_F(StashTest, AForwardThatIsCancelledLeavesNothing) {
  TestEngine engine(model_, WithStash(model_, kPlenty));
  Trainer trainer(*engine);
  ForwardSpec spec = trainer.ForwardHeader(0, kRows);
  spec.keep_input = KeepInput::kIfRoom;
  const auto call = trainer.Start(spec, x_);
  EXPECT_TRUE(Succeeds(call->Send(kTileRows)));
  EXPECT_FALSE(MetricsSay(engine, "shardmlp_stash_bytes 0"));
  call->Cancel();
  EXPECT_TRUE(MetricsSay(engine, "shardmlp_stash_bytes 0"));
}

TEST_F(StashTest, APinnedInputIsThereForEveryBackwardAndReleasedWithTheNextCall) {
  TestEngine engine(model_, WithStash(model_, kRows * x_.cols * SizeOf(DType::kF64) + 64));  // x alone, once
  Trainer trainer(*engine);
  ForwardSpec spec = trainer.ForwardHeader(0, kRows);
  spec.keep_input = KeepInput::kPinned;
  spec.dtype = DType::kF64;
  const auto forward = trainer.Start(spec, x_);
  EXPECT_TRUE(Succeeds(forward->SendAll()));
  const int64_t ticket = forward->Wait()->ticket;
  ASSERT_NE(ticket, 0);
  const Dense first = Send(trainer, HeaderOf(trainer, ticket))->rows();
  EXPECT_EQ(Send(trainer, HeaderOf(trainer, ticket))->rows(), first);
  EXPECT_EQ(Send(trainer, HeaderOf(trainer, 0))->rows(), first);
  // Room for one: the next is refused, until it says that the first is done with.
  EXPECT_TRUE(Fails(RunningCall::Forward(*engine, spec, x_).status(), absl::StatusCode::kFailedPrecondition,
                    Reason::kStashFull, {"22 rows of layer"}));
  spec.released_tickets = {ticket};
  const auto next = trainer.Start(spec, x_);
  EXPECT_TRUE(Succeeds(next->SendAll()));
  EXPECT_NE(next->Wait()->ticket, 0);
  EXPECT_TRUE(Missing(trainer, ticket));
  // Nothing that was refused holds its place: the engine still has calls for all.
  for (int64_t n = 0; n < engine->limits().max_call_count; ++n) {
    EXPECT_EQ(ReasonOf(RunningCall::Forward(*engine, trainer.ForwardHeader(0, -1), x_).status()), Reason::kInvalidRows);
  }
  ASSERT_TRUE(Succeeds(trainer.Discard()));
  EXPECT_TRUE(MetricsSay(engine, "shardmlp_stash_bytes 0"));
}

TEST_F(StashTest, ANaNInAnXThatWasKeptIsFoundAsInOneThatIsSent) {
  for (const double in_dy : {1.0, static_cast<double>(INFINITY)}) {
    TestEngine engine(model_, WithStash(model_, kPlenty));
    Trainer trainer(*engine);
    Dense x = x_, dy = dy_;
    x.at(9, 3) = NAN;
    dy.at(15, 1) *= in_dy;
    const int64_t ticket = Keep(trainer, 0, x, DType::kF64).ticket;
    const auto call = trainer.Start(HeaderOf(trainer, ticket), NoX(kRows), dy);
    EXPECT_TRUE(Succeeds(call->SendAll()));
    EXPECT_TRUE(Succeeds(call->Wait()));
    const absl::StatusOr<SealResult> seal = trainer.Seal();
    ASSERT_TRUE(Succeeds(seal));
    EXPECT_FALSE(seal->finite);
    EXPECT_THAT(seal->non_finite_origin, HasSubstr("row 9"));
  }
}

}  // namespace
}  // namespace shardmlp::testing
