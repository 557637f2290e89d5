// For rows that come from a device, and go there, while a call runs.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"

namespace shardmlp {

// Both are called on the thread that made the call, with no lock held; a failure ends the call, and is its own. Empty:
// the inputs' rows are in place, and nobody asks for the output's before the call is over.
struct RowHooks {
  // Returns once rows [0, row_end) of the inputs are in place. They stay there for a second try.
  std::function<absl::Status(int64_t row_end)> await_inputs = {};
  // Rows [0, row_end) of the output have arrived. 0 begins a try, and what arrived in the one before counts for
  // nothing.
  std::function<absl::Status(int64_t row_end)> output_arrived = {};
};

}  // namespace shardmlp
