// The naive twin: the MLP and its gradients in f64 by plain loops, straight from the formulas and never tiled.
//
// It shares nothing with the implementation but the names of activations.
#pragma once

#include "kernels/activation.h"
#include "tests/kernels/dense.h"

namespace shardmlp::testing {

// One layer's tensors, or their gradients. Biases are [1, n], or empty for none.
struct NaiveMlp {
  Activation activation;
  Dense gate_up;       // [2I, H], gate rows first; [I, H] where ungated
  Dense gate_up_bias;  // [1, 2I] or [1, I]
  Dense down;          // [O, I]
  Dense down_bias;     // [1, O]
};

struct NaiveGradients {
  Dense dx;  // [T, H]
  Dense gate_up, gate_up_bias, down, down_bias;
};

// A for one element, u alone where ungated.
double NaiveActivation(const Activation& activation, double g, double u);
// dA/dg (0 where ungated) and dA/du.
double NaiveGateSlope(const Activation& activation, double g, double u);
double NaiveUpSlope(const Activation& activation, double g, double u);

Dense NaiveForward(const NaiveMlp& mlp, const Dense& x);                             // [T, O]
NaiveGradients NaiveBackward(const NaiveMlp& mlp, const Dense& x, const Dense& dy);  // dy [T, O]

}  // namespace shardmlp::testing
