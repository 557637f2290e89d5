// What a call of one layer costs server and link.
#pragma once

#include <cstdint>

#include "client/cpp/served_model.h"
#include "kernels/matrix.h"

namespace shardmlp {

enum class CallKind { kForward, kBackward };

struct CallCost {
  int64_t rows = 0;
  double flops = 0;            // of matrix products, recompute included
  int64_t sent_bytes = 0;      // activations to the server
  int64_t received_bytes = 0;  // and back
};

// What a backward's cost depends on.
struct CostOptions {
  bool weight_gradient = false;  // asked for, beside the input gradient
  bool x_kept = false;           // by the stash: not sent again
  bool gate_up_kept = false;     // by the stash: not recomputed
};

// Of `rows` rows that travel as `dtype`.
CallCost CostOf(const ClientLayer& layer, CallKind kind, int64_t rows, DType dtype, const CostOptions& options);

}  // namespace shardmlp
