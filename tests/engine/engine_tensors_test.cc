// Weights as the model's files have them, and optimizers tensor by tensor.
#include <xxhash.h>

#include <cmath>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/bytes.h"
#include "tests/engine/lazy_device.h"
#include "tests/engine/outcome.h"
#include "tests/engine/trainer.h"
#include "tests/kernels/layer.h"

namespace shardmlp::testing {
namespace {

absl::StatusOr<TensorRows> Read(const TestEngine& engine, int64_t tensor, int64_t row_begin, int64_t row_count) {
  Reply<TensorRows> reply;
  engine->ReadTensor(tensor, row_begin, row_count, reply.done());
  return reply.Wait();
}

TEST(EngineTensorsTest, AnyRowsOfAnyTensorAreTheFiles) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    const TinyModel model({OddMlp(dtype), PlainMlp(dtype), UngatedMlp(dtype)});
    const TestEngine engine(model);
    for (size_t i = 0; i < model.spec().tensors.size(); ++i) {
      const TensorSpec& tensor = model.spec().tensors[i];
      SCOPED_TRACE(tensor.name);
      const Dense file = PartOf(tensor, model.layers()[(tensor.layer - 10) / 3]);
      for (int64_t begin = 0; begin <= file.rows; ++begin) {
        for (const int64_t count : {int64_t{0}, int64_t{1}, file.rows - begin}) {
          if (begin + count > file.rows) continue;
          const absl::StatusOr<TensorRows> read = Read(engine, static_cast<int64_t>(i), begin, count);
          ASSERT_TRUE(Succeeds(read));
          EXPECT_EQ(read->bytes, Encode(RowsOf(file, begin, count), dtype));
          EXPECT_EQ(read->weights_version, 1);
        }
      }
    }
  }
}

TEST(EngineTensorsTest, WhatIsNotThereIsRefused) {
  const TinyModel model({UngatedMlp()});  // up.weight [13, 37], up.bias, down.weight, down.bias
  const TestEngine engine(model);
  EXPECT_TRUE(Fails(Read(engine, -1, 0, 1), absl::StatusCode::kInvalidArgument, Reason::kUnknownTensor, {"0 to 3"}));
  EXPECT_TRUE(Fails(Read(engine, 4, 0, 1), absl::StatusCode::kInvalidArgument, Reason::kUnknownTensor, {"tensor 4"}));
  const std::pair<int64_t, int64_t> ranges[] = {{-1, 1}, {0, -1}, {0, 14}, {13, 1}, {14, 0}, {1, INT64_MAX}};
  for (const auto& [begin, count] : ranges) {
    EXPECT_TRUE(Fails(Read(engine, 0, begin, count), absl::StatusCode::kInvalidArgument, Reason::kInvalidRows,
                      {"which has 13"}));
  }
  EXPECT_TRUE(Fails(Read(engine, 1, 0, 2), absl::StatusCode::kInvalidArgument, Reason::kInvalidRows, {"which has 1"}));
}

TEST(EngineTensorsTest, ChecksumsAreOfTheBytesThatAreRead) {
  const TinyModel model({OddMlp(), UngatedMlp()});
  const TestEngine engine(model);
  Reply<std::vector<uint64_t>> reply;
  engine->Checksums(reply.done());
  const absl::StatusOr<std::vector<uint64_t>> checksums = reply.Wait();
  ASSERT_TRUE(Succeeds(checksums));
  ASSERT_EQ(checksums->size(), model.spec().tensors.size());
  for (size_t i = 0; i < checksums->size(); ++i) {
    const TensorSpec& tensor = model.spec().tensors[i];
    const std::string bytes = Encode(PartOf(tensor, model.layers()[(tensor.layer - 10) / 3]), DType::kF64);
    EXPECT_EQ((*checksums)[i], XXH3_64bits(bytes.data(), bytes.size())) << tensor.name;
  }
}

TEST(EngineTensorsTest, ChecksumsAreComputedOnceForEachWeights) {
  const TinyModel model({OddMlp()});
  auto lazy = std::make_unique<LazyDevice>();
  const LazyDevice& device = *lazy;
  const TestEngine engine(model, TilesOf(4, model), std::move(lazy));
  const auto checksums = [&] {
    Reply<std::vector<uint64_t>> reply;
    engine->Checksums(reply.done());
    return reply.Wait().value();
  };
  const std::vector<uint64_t> first = checksums();
  const int64_t allocated = device.allocation_count();  // each tensor that is read takes a buffer
  EXPECT_EQ(checksums(), first);
  EXPECT_EQ(device.allocation_count(), allocated) << "they were computed again";
  Trainer trainer(*engine);
  trainer.Backward(0, RandomDense(4, 13, 1), RandomDense(4, 7, 2));
  ASSERT_TRUE(Succeeds(trainer.Seal()));
  ASSERT_TRUE(Succeeds(trainer.Commit()));
  const std::vector<uint64_t> second = checksums();
  for (size_t i = 0; i < second.size(); ++i) EXPECT_NE(second[i], first[i]) << model.spec().tensors[i].name;
}

TEST(EngineTensorsTest, EachTensorGetsItsOwnHyperparametersScaleAndUpdateCount) {
  const TinyModel model({OddMlp()});  // gate, up and down, each weight and bias
  const TestEngine engine(model, TilesOf(4, model));
  Trainer trainer(*engine);
  const auto name = [](const char* tensor) { return absl::StrCat("layers.10.mlp.", tensor); };
  const AdamW adamw{.learning_rate = 0.25, .beta1 = 0.5, .beta2 = 0.75, .epsilon = 1e-3, .weight_decay = 0.125};
  // Biases of the gate follow plain SGD, the others' momentum; the rest comes and goes.
  const auto groups = [&](const Hyperparameters& of_down) {
    return std::vector<ParameterGroup>{{{name("up.weight"), name("gate.weight")}, adamw},
                                       {{name("gate.bias")}, Sgd{.learning_rate = 2}},
                                       {{name("up.bias"), name("down.bias")}, Sgd{.learning_rate = 1, .momentum = 0.5}},
                                       {{name("down.weight")}, of_down}};
  };
  NaiveMlp expected = model.layers()[0];
  NaiveMlp m{}, v{}, b{};  // moments of gate_up; momentum buffers
  m.gate_up = v.gate_up = Dense(74, 13);
  b.gate_up_bias = Dense(1, 74);
  b.down_bias = Dense(1, 7);
  for (int step = 1; step <= 3; ++step) {
    const Dense x = RandomDense(9, 13, step), dy = RandomDense(9, 7, step, 0.01);
    NaiveGradients g = NaiveBackward(expected, x, dy);
    trainer.Backward(0, x, dy);
    ASSERT_TRUE(Succeeds(trainer.Seal()));
    CommitSpec commit = trainer.CommitOf(KeepFrozen{}, 0.5);
    commit.groups = groups(step == 2 ? Hyperparameters(KeepFrozen{}) : Hyperparameters(Sgd{.learning_rate = 4}));
    ASSERT_TRUE(Succeeds(trainer.StartCommit(commit).Wait()));
    trainer.CatchUp();
    // torch.optim's formulas, on half the gradient.
    for (size_t i = 0; i < g.gate_up.values.size(); ++i) {
      const double grad = 0.5 * g.gate_up.values[i];
      double& w = expected.gate_up.values[i];
      double& m1 = m.gate_up.values[i];
      double& m2 = v.gate_up.values[i];
      w -= 0.25 * 0.125 * w;
      m1 = 0.5 * m1 + 0.5 * grad;
      m2 = 0.75 * m2 + 0.25 * grad * grad;
      w -= 0.25 * (m1 / (1 - std::pow(0.5, step))) / (std::sqrt(m2 / (1 - std::pow(0.75, step))) + 1e-3);
    }
    for (int64_t i = 0; i < 37; ++i) {
      expected.gate_up_bias.values[i] -= 2 * 0.5 * g.gate_up_bias.values[i];
      double& buffer = b.gate_up_bias.values[37 + i];
      buffer = 0.5 * buffer + 0.5 * g.gate_up_bias.values[37 + i];
      expected.gate_up_bias.values[37 + i] -= buffer;
    }
    for (int64_t i = 0; i < 7; ++i) {
      double& buffer = b.down_bias.values[i];
      buffer = 0.5 * buffer + 0.5 * g.down_bias.values[i];
      expected.down_bias.values[i] -= buffer;
    }
    if (step != 2) {
      for (size_t i = 0; i < g.down.values.size(); ++i) expected.down.values[i] -= 4 * 0.5 * g.down.values[i];
    }
    const NaiveMlp got = engine.Weights()[0];
    EXPECT_LE(RelativeDifference(got.gate_up, expected.gate_up), 1e-12) << "step " << step;
    EXPECT_LE(RelativeDifference(got.gate_up_bias, expected.gate_up_bias), 1e-12) << "step " << step;
    EXPECT_LE(RelativeDifference(got.down, expected.down), 1e-12) << "step " << step;
    EXPECT_LE(RelativeDifference(got.down_bias, expected.down_bias), 1e-12) << "step " << step;
  }
}

TEST(EngineTensorsTest, ACommitThatIsWrongInItselfIsRefusedAndTheStepStaysSealed) {
  const TinyModel model({OddMlp()});
  const TestEngine engine(model);
  Trainer trainer(*engine);
  ASSERT_TRUE(Succeeds(trainer.Seal()));
  const auto refused = [&](const CommitSpec& commit, Reason reason) {
    EXPECT_TRUE(Fails(trainer.StartCommit(commit).Wait(), absl::StatusCode::kInvalidArgument, reason));
  };
  for (const double scale : {0.0, -1.0, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    refused(trainer.CommitOf(Sgd{}, scale), Reason::kInvalidArgument);
  }
  CommitSpec missing = trainer.CommitOf(Sgd{});
  missing.groups[0].tensors.pop_back();
  refused(missing, Reason::kInvalidArgument);
  CommitSpec unknown = trainer.CommitOf(Sgd{});
  unknown.groups[0].tensors.push_back("lm_head.weight");
  refused(unknown, Reason::kUnknownTensor);
  refused(trainer.CommitOf(AdamW{.beta1 = 1.5}), Reason::kInvalidArgument);
  EXPECT_TRUE(Succeeds(trainer.Commit()));
}

TEST(EngineTensorsTest, ABf16ModelIsItsMastersRounded) {
  // One step of 1e-4 is less than half a unit of most bf16 weights here; that 64 of them show is the f32 masters'
  // doing.
  const TinyModel model({PlainMlp(DType::kBF16)});
  const TestEngine engine(model);
  Trainer trainer(*engine);
  const std::vector<NaiveMlp> before = engine.Weights();
  const Dense x = RandomDense(4, 16, 1), dy(4, 16, 1e-3);
  for (int step = 0; step < 64; ++step) {
    trainer.Backward(0, x, dy);
    ASSERT_TRUE(Succeeds(trainer.Seal()));
    ASSERT_TRUE(Succeeds(trainer.Commit(AdamW{.learning_rate = 1e-4, .weight_decay = 0})));
  }
  // Adam with a gradient that stays as it is moves each weight by the learning rate a step.
  const Dense moved = Difference(before, engine.Weights())[0].down;
  for (const double distance : moved.values) EXPECT_NEAR(std::abs(distance), 64e-4, 64e-4 * 0.2 + 0x1p-8);
  EXPECT_GT(LargestMagnitude(moved), 64e-4 / 2);
}

}  // namespace
}  // namespace shardmlp::testing
