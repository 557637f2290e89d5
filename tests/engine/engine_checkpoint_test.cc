// Checkpoints through the engine: from a restored state, training goes on bit for bit as if nothing had happened.
#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/outcome.h"
#include "tests/engine/trainer.h"
#include "tests/kernels/layer.h"
#include "tests/model/files.h"

namespace shardmlp::testing {
namespace {

using ::testing::ElementsAre;

class CheckpointsTest : public ::testing::Test {
 protected:
  std::unique_ptr<TestEngine> Engine(const TinyModel& model, bool frozen = false) {
    EngineOptions options = TilesOf(4, model);
    options.frozen = frozen;
    return std::make_unique<TestEngine>(model, options, OneThread(),
                                        CheckpointStore::Open(folder_.path(), model.spec()).value());
  }

  static absl::StatusOr<CheckpointInfo> Save(TestEngine& engine, const std::string& name) {
    Reply<CheckpointInfo> reply;
    engine->SaveCheckpoint(name, reply.done());
    return reply.Wait();
  }
  static absl::StatusOr<StepPosition> Restore(TestEngine& engine, const std::string& name) {
    Reply<StepPosition> reply;
    engine->RestoreCheckpoint(name, reply.done());
    return reply.Wait();
  }
  static absl::StatusOr<CheckpointInfo> Delete(TestEngine& engine, const std::string& name) {
    Reply<CheckpointInfo> reply;
    engine->DeleteCheckpoint(name, reply.done());
    return reply.Wait();
  }
  static absl::StatusOr<std::vector<CheckpointInfo>> List(TestEngine& engine) {
    Reply<std::vector<CheckpointInfo>> reply;
    engine->ListCheckpoints(reply.done());
    return reply.Wait();
  }

  // One backward of every layer; `seed` says of what.
  static void Backward(Trainer& trainer, int seed) {
    const ModelSpec& model = trainer.engine().model();
    for (size_t n = 0; n < model.layers.size(); ++n) {
      const MlpConfig& mlp = model.layers[n].mlp;
      trainer.Backward(n, RandomDense(9, mlp.hidden_size, seed), RandomDense(9, mlp.output_size, seed + 100));
    }
  }
  // One step, with moments of both kinds and a tensor that sits steps out.
  static void Step(Trainer& trainer, int seed) {
    Backward(trainer, seed);
    ASSERT_TRUE(Succeeds(trainer.Seal()));
    CommitSpec commit = trainer.CommitOf(AdamW{.learning_rate = 0.01});
    std::vector<std::string>& names = commit.groups[0].tensors;
    const std::string first = names.front(), last = names.back();
    names.erase(names.begin());
    names.pop_back();
    commit.groups.push_back({{first}, Sgd{.learning_rate = 0.01, .momentum = 0.9}});
    commit.groups.push_back({{last}, seed % 2 == 0 ? Hyperparameters(KeepFrozen{}) : Hyperparameters(AdamW{})});
    ASSERT_TRUE(Succeeds(trainer.StartCommit(commit).Wait()));
    trainer.CatchUp();
  }
  static std::vector<Dense> WeightsOf(const TestEngine& engine) {
    std::vector<Dense> weights;
    for (const TensorSpec& tensor : engine->model().tensors) weights.push_back(engine.Read(tensor));
    return weights;
  }

  const TempFolder folder_;
};

TEST_F(CheckpointsTest, TrainingGoesOnFromARestoredStateToTheBit) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    const std::string name(Name(dtype));
    SCOPED_TRACE(name);
    const TinyModel model({OddMlp(dtype), UngatedMlp(dtype)});
    const auto engine = Engine(model);
    Trainer trainer(**engine);
    for (int step = 0; step < 3; ++step) Step(trainer, step);
    const std::vector<Dense> at_three = WeightsOf(*engine);
    const absl::StatusOr<CheckpointInfo> saved = Save(*engine, name);
    ASSERT_TRUE(Succeeds(saved));
    EXPECT_EQ(saved->step, 3);
    for (int step = 3; step < 6; ++step) Step(trainer, step);
    const std::vector<Dense> uninterrupted = WeightsOf(*engine);
    ASSERT_NE(uninterrupted, at_three);

    // The same engine, after work that is to be forgotten.
    Step(trainer, 77);
    Backward(trainer, 78);
    const absl::StatusOr<StepPosition> restored = Restore(*engine, name);
    ASSERT_TRUE(Succeeds(restored));
    EXPECT_EQ(*restored, (StepPosition{3, 1, 9})) << "an attempt and a version that never were before";
    EXPECT_EQ(WeightsOf(*engine), at_three);
    trainer.CatchUp();
    for (int step = 3; step < 6; ++step) Step(trainer, step);
    EXPECT_EQ(WeightsOf(*engine), uninterrupted);

    // Another engine, which starts from the model's own files.
    const auto fresh = Engine(model);
    ASSERT_TRUE(Succeeds(Restore(*fresh, name)));
    EXPECT_EQ(WeightsOf(*fresh), at_three);
    Trainer next(**fresh);
    EXPECT_EQ(next.position().step, 3);
    for (int step = 3; step < 6; ++step) Step(next, step);
    EXPECT_EQ(WeightsOf(*fresh), uninterrupted);
  }
}

TEST_F(CheckpointsTest, ASaveInMidStepHoldsTheLastCommitAndDisturbsNothing) {
  const TinyModel model({OddMlp(), UngatedMlp()});
  const auto disturbed = Engine(model);
  const TestEngine undisturbed(model, TilesOf(4, model));
  Trainer trainer(**disturbed), other(*undisturbed);
  for (int step = 0; step < 2; ++step) {
    Backward(trainer, step);
    EXPECT_EQ(Save(*disturbed, "mid")->step, step);
    Step(trainer, step + 10);
    Backward(other, step);
    Step(other, step + 10);
  }
  EXPECT_EQ(WeightsOf(*disturbed), WeightsOf(undisturbed));
}

TEST_F(CheckpointsTest, ARestoreEndsTheAttemptForEveryone) {
  const TinyModel model({OddMlp()});
  const auto engine = Engine(model);
  ASSERT_TRUE(Succeeds(Save(*engine, "start")));
  Trainer first(**engine, 0, 2), second(**engine, 1, 2);
  Backward(first, 1);
  const Reply<SealResult> seal = first.StartSeal();
  const BackwardSpec header = second.BackwardHeader(0, 8);
  const auto open = second.Start(header, RandomDense(8, 13, 2), RandomDense(8, 7, 3));
  ASSERT_TRUE(Succeeds(open->Send(4)));
  open->WaitForRows(4);
  ASSERT_TRUE(Succeeds(Restore(*engine, "start")));
  const auto aborted = [](const auto& result) {
    return Fails(result, absl::StatusCode::kAborted, Reason::kStepAborted, {"a checkpoint was restored"});
  };
  EXPECT_TRUE(aborted(seal.Wait()));
  ASSERT_TRUE(Succeeds(open->SendAll()));
  EXPECT_TRUE(aborted(open->Wait()));
  EXPECT_TRUE(aborted(first.Commit()));
  first.CatchUp();
  second.CatchUp();
  const Reply<SealResult> one = first.StartSeal(), two = second.StartSeal();
  ASSERT_TRUE(Succeeds(one.Wait()));
  EXPECT_THAT(one.Wait()->tensor_sums_of_squares, ::testing::Each(0)) << "no gradient is left";
  EXPECT_TRUE(Succeeds(two.Wait()));
}

TEST_F(CheckpointsTest, ACommitThatARestoreHasUndoneIsNotSaidToStand) {
  const TinyModel model({OddMlp()});
  const auto engine = Engine(model);
  ASSERT_TRUE(Succeeds(Save(*engine, "start")));
  Trainer trainer(**engine);
  Backward(trainer, 1);
  ASSERT_TRUE(Succeeds(trainer.Seal()));
  const CommitSpec commit = trainer.CommitOf(Sgd{.learning_rate = 1});
  ASSERT_TRUE(Succeeds(trainer.StartCommit(commit).Wait()));
  ASSERT_TRUE(Succeeds(Restore(*engine, "start")));
  EXPECT_TRUE(Fails(trainer.StartCommit(commit).Wait(), absl::StatusCode::kAborted, Reason::kStepAborted,
                    {"a checkpoint was restored"}));
  EXPECT_TRUE(Fails(trainer.StartSeal().Wait(), absl::StatusCode::kAborted, Reason::kStepAborted));
}

TEST_F(CheckpointsTest, ACheckpointThatIsDamagedIsRefusedAndTheStepGoesOn) {
  const TinyModel model({OddMlp()});
  const auto engine = Engine(model);
  Trainer trainer(**engine);
  Step(trainer, 1);
  ASSERT_TRUE(Succeeds(Save(*engine, "one")));
  Step(trainer, 2);
  Backward(trainer, 3);
  const std::vector<Dense> before = WeightsOf(*engine);
  const std::string file = folder_ / "one/optimizer.safetensors";
  WriteByte(file, static_cast<int64_t>(std::filesystem::file_size(file)) - 5, '!');
  EXPECT_TRUE(Fails(Restore(*engine, "one"), absl::StatusCode::kDataLoss, Reason::kCheckpointCorrupt,
                    {"optimizer.safetensors"}));
  EXPECT_TRUE(Fails(Restore(*engine, "two"), absl::StatusCode::kNotFound, Reason::kUnknownCheckpoint, {"two"}));
  EXPECT_TRUE(Succeeds((*engine)->health()));
  EXPECT_EQ((*engine)->position(), (StepPosition{2, 0, 3}));
  EXPECT_EQ(WeightsOf(*engine), before);
  ASSERT_TRUE(Succeeds(trainer.Seal()));
  const CommitSpec commit = trainer.CommitOf(KeepFrozen{});
  EXPECT_TRUE(Succeeds(trainer.StartCommit(commit).Wait()));
}

TEST_F(CheckpointsTest, ARestoreThatIsRepeatedAheadOfAnythingElseChangesNothing) {
  const TinyModel model({OddMlp()});
  const auto engine = Engine(model);
  Trainer trainer(**engine);
  Step(trainer, 1);
  ASSERT_TRUE(Succeeds(Save(*engine, "one")));
  Step(trainer, 2);
  const absl::StatusOr<StepPosition> restored = Restore(*engine, "one");
  ASSERT_TRUE(Succeeds(restored));
  EXPECT_EQ(*Restore(*engine, "one"), *restored) << "as each trainer of a run asks for it";
  trainer.CatchUp();
  Backward(trainer, 3);
  EXPECT_EQ(Restore(*engine, "one")->attempt, restored->attempt + 1) << "there were rows to drop";
}

TEST_F(CheckpointsTest, ARepeatedRestoreOfAnotherThatTookTheNameRestoresThat) {
  const TinyModel model({OddMlp()});
  const auto engine = Engine(model);
  const auto other = Engine(model);  // in the same folder
  Trainer trainer(**engine), another(**other);
  ASSERT_TRUE(Succeeds(Save(*engine, "one")));
  const absl::StatusOr<StepPosition> restored = Restore(*engine, "one");
  ASSERT_TRUE(Succeeds(restored));
  Step(another, 1);
  ASSERT_TRUE(Succeeds(Save(*other, "one")));
  const absl::StatusOr<StepPosition> again = Restore(*engine, "one");
  ASSERT_TRUE(Succeeds(again));
  EXPECT_EQ(again->step, 1);
  EXPECT_EQ(WeightsOf(*engine), WeightsOf(*other));
}

TEST_F(CheckpointsTest, ADeletedOneCanNotBeRestoredNotEvenAgain) {
  const TinyModel model({OddMlp()});
  const auto engine = Engine(model);
  ASSERT_TRUE(Succeeds(Save(*engine, "one")));
  ASSERT_TRUE(Succeeds(Restore(*engine, "one")));
  const std::vector<Dense> before = WeightsOf(*engine);
  ASSERT_TRUE(Succeeds(Delete(*engine, "one")));
  EXPECT_TRUE(Fails(Restore(*engine, "one"), absl::StatusCode::kNotFound, Reason::kUnknownCheckpoint));
  EXPECT_TRUE(Fails(Delete(*engine, "one"), absl::StatusCode::kNotFound, Reason::kUnknownCheckpoint));
  EXPECT_TRUE(List(*engine)->empty());
  EXPECT_EQ(WeightsOf(*engine), before);
}

TEST_F(CheckpointsTest, TheMomentsOfAnotherOptimizerAreRefusedAlsoAfterARestoreAndAFreshOneStartsWithout) {
  const TinyModel model({OddMlp()});
  const auto engine = Engine(model);
  Trainer trainer(**engine);
  const auto step = [&trainer](const Hyperparameters& hyperparameters, bool fresh) {
    Backward(trainer, 5);
    CommitSpec commit = trainer.CommitOf(hyperparameters);
    commit.fresh_optimizer = fresh;
    const absl::Status sealed = trainer.Seal().status();
    const absl::Status status = sealed.ok() ? trainer.StartCommit(commit).Wait().status() : sealed;
    trainer.CatchUp();
    return status;
  };
  const Sgd sgd{.learning_rate = 0.01, .momentum = 0.9};
  ASSERT_TRUE(Succeeds(Save(*engine, "loaded")));
  ASSERT_TRUE(Succeeds(step(sgd, false)));
  const std::vector<Dense> after_first = WeightsOf(*engine);
  ASSERT_TRUE(Succeeds(Restore(*engine, "loaded")));
  trainer.CatchUp();

  ASSERT_TRUE(Succeeds(step(AdamW{.learning_rate = 0}, false)));  // moments alone change
  ASSERT_TRUE(Succeeds(Save(*engine, "adamw")));
  ASSERT_TRUE(Succeeds(Restore(*engine, "adamw")));
  trainer.CatchUp();
  EXPECT_TRUE(Fails(step(sgd, false), absl::StatusCode::kFailedPrecondition, Reason::kOptimizerMismatch,
                    {"has the moments of 1 updates by adamw, got sgd"}));
  EXPECT_TRUE(Succeeds((*engine)->health()));
  ASSERT_TRUE(Succeeds(step(sgd, true)));
  EXPECT_EQ(WeightsOf(*engine), after_first) << "AdamW's moments took no part";
}

TEST_F(CheckpointsTest, TheyAreListedOldestFirstAndANameIsTakenAnew) {
  const TinyModel model({OddMlp()});
  const auto engine = Engine(model);
  Trainer trainer(**engine);
  ASSERT_TRUE(Succeeds(Save(*engine, "a")));
  Step(trainer, 1);
  ASSERT_TRUE(Succeeds(Save(*engine, "b")));
  Step(trainer, 2);
  ASSERT_TRUE(Succeeds(Save(*engine, "b")));
  std::vector<std::string> names;
  std::vector<int64_t> steps;
  const absl::StatusOr<std::vector<CheckpointInfo>> list = List(*engine);
  ASSERT_TRUE(Succeeds(list));
  for (const CheckpointInfo& info : *list) {
    names.push_back(info.name);
    steps.push_back(info.step);
  }
  EXPECT_THAT(names, ElementsAre("a", "b"));
  EXPECT_THAT(steps, ElementsAre(0, 2));
  EXPECT_TRUE(Fails(Save(*engine, "../b"), absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument));
}

TEST_F(CheckpointsTest, AFrozenEngineServesTrainedWeights) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    const std::string name(Name(dtype));
    SCOPED_TRACE(name);
    const TinyModel model({OddMlp(dtype), UngatedMlp(dtype)});
    const auto trained = Engine(model);
    Trainer trainer(**trained);
    for (int step = 0; step < 2; ++step) Step(trainer, step);
    ASSERT_TRUE(Succeeds(Save(*trained, name)));

    const auto frozen = Engine(model, /*frozen=*/true);
    ASSERT_NE(WeightsOf(*frozen), WeightsOf(*trained));
    EXPECT_TRUE(Succeeds(List(*frozen)));
    const absl::StatusOr<StepPosition> restored = Restore(*frozen, name);
    ASSERT_TRUE(Succeeds(restored));
    EXPECT_EQ(restored->step, 2);
    EXPECT_EQ(WeightsOf(*frozen), WeightsOf(*trained));
    const Dense x = RandomDense(9, model.spec().layers[0].mlp.hidden_size, 5);
    Trainer reader(**frozen, 0, 1, SessionRole::kRead), twin(**trained, 0, 1, SessionRole::kRead);
    EXPECT_EQ(reader.Forward(0, x), twin.Forward(0, x));
    EXPECT_TRUE(
        Fails(Save(*frozen, "other"), absl::StatusCode::kFailedPrecondition, Reason::kCheckpointDisabled, {"frozen"}));
  }
}

// As another hand may have made it: every checksum is right, and a moment is missing.
TEST_F(CheckpointsTest, ACheckpointThatLacksAPartIsRefusedBeforeAnythingIsChanged) {
  const TinyModel model({OddMlp()});
  const auto engine = Engine(model);
  Trainer trainer(**engine);
  Step(trainer, 1);
  CheckpointState state;
  state.step = 9;
  for (const TensorSpec& tensor : model.spec().tensors) {
    const auto zeros = [](absl::Span<char> out) {
      std::fill(out.begin(), out.end(), 0);
      return absl::OkStatus();
    };
    state.updates.push_back({.count = 1, .optimizer = "adamw"});
    state.weights.push_back({tensor.name, DType::kF64, tensor.shape, zeros});
    state.optimizer.push_back({tensor.name + ".moment1", DType::kF64, tensor.shape, zeros});
  }
  ASSERT_TRUE(Succeeds(CheckpointStore::Open(folder_.path(), model.spec()).value()->Save("partial", state)));
  const std::vector<Dense> before = WeightsOf(*engine);
  EXPECT_TRUE(Fails(Restore(*engine, "partial"), absl::StatusCode::kFailedPrecondition, Reason::kCheckpointMismatch,
                    {"lack tensor", "moment2"}));
  EXPECT_TRUE(Succeeds((*engine)->health()));
  EXPECT_EQ(WeightsOf(*engine), before);
  Step(trainer, 2);
  const auto frozen = Engine(model, /*frozen=*/true);
  EXPECT_TRUE(Succeeds(Restore(*frozen, "partial"))) << "it needs the weights alone";
}

TEST_F(CheckpointsTest, WithoutAFolderThereAreNone) {
  const TinyModel model({OddMlp()});
  TestEngine without(model, TilesOf(4, model));
  const auto disabled = [](const auto& result) {
    return Fails(result, absl::StatusCode::kFailedPrecondition, Reason::kCheckpointDisabled);
  };
  EXPECT_TRUE(disabled(Save(without, "a")));
  EXPECT_TRUE(disabled(Restore(without, "a")));
  EXPECT_TRUE(disabled(List(without)));
  EXPECT_TRUE(disabled(Delete(without, "a")));
}

}  // namespace
}  // namespace shardmlp::testing
