// What the engine is compared with: the naive twin in f64, over whole steps.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/engine/trainer.h"
#include "tests/kernels/layer.h"

namespace shardmlp::testing {

// How far from the twin a server in f64 may be.
inline constexpr double kTwinBound = 1e-12;

// One layer's gradients; those of layers that got no rows are 0.
std::vector<NaiveGradients> ZeroGradients(const std::vector<NaiveMlp>& weights);

double RelativeDifference(const std::vector<double>& got, const std::vector<double>& reference);

// x of `tokens` rows, and a dy that is small enough for the weights to stay as they are, about, over a hundred steps.
Dense InputOf(const MlpConfig& mlp, int64_t tokens, uint64_t seed);
Dense OutputGradientOf(const MlpConfig& mlp, int64_t tokens, uint64_t seed);

// Seals and commits, and finds the gradients that `expected` are, by layer; their dx is not looked at.
void ExpectStep(const TestEngine& engine, Trainer& trainer, std::vector<NaiveGradients> expected);

}  // namespace shardmlp::testing
