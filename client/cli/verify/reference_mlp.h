// An MLP in plain f64 loops: what `shardmlpctl verify` holds a server against. It shares no code with the server.
//
// T tokens, H hidden, I intermediate, O out. Gated: A = act(X Wg^T + bg) * (X Wu^T + bu); else A = act(X Wu^T + bu).
// Y = A Wd^T + bd. With a limit L, gpt-oss's form: A = act(min(G, L)) * (clamp(U, -L, L) + 1).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardmlp {

using Values = std::vector<double>;  // a matrix, row-major

struct ReferenceMlp {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t output_size = 0;
  bool gated = false;
  // act(x) and act'(x) at once.
  struct Activated {
    double value;
    double slope;
  };
  Activated (*activation)(double x) = nullptr;
  std::optional<double> limit = {};  // gated alone
  // G and U that are beyond the limit by no more than this are at it, since a server rounds them to it.
  double limit_rounding = 0;
  Values gate = {};       // [I, H]; empty where ungated
  Values up = {};         // [I, H]
  Values down = {};       // [O, I]
  Values gate_bias = {};  // [I]; zeros where the layer has none
  Values up_bias = {};    // [I]
  Values down_bias = {};  // [O]
};

// "clamped_swiglu" is quick_gelu, with a limit. UNIMPLEMENTED for a name that it does not know.
absl::StatusOr<ReferenceMlp::Activated (*)(double)> FindActivation(absl::string_view name);

// y [T, O], from x [T, H].
Values ReferenceForward(const ReferenceMlp& mlp, const Values& x);
// dx [T, H], from x [T, H] and dy [T, O].
Values ReferenceBackward(const ReferenceMlp& mlp, const Values& x, const Values& dy);

}  // namespace shardmlp
