// Kinds of flags, over CLI11.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "absl/time/time.h"
#include "kernels/matrix.h"

namespace CLI {
class App;
}

namespace shardmlp {

// Each fills `field` as the command line is parsed, whose value it keeps where the flag is not there. CLI11 throws what
// it finds wrong, naming the flag.
void AddTimeFlag(CLI::App& app, const char* name, absl::Duration& field, const char* help,
                 absl::Duration least = absl::ZeroDuration());
void AddBytesFlag(CLI::App& app, const char* name, int64_t& field, const char* help);
void AddCountFlag(CLI::App& app, const char* name, int64_t& field, const char* help,
                  int64_t max = std::numeric_limits<int64_t>::max());
// Above zero.
void AddNumberFlag(CLI::App& app, const char* name, double& field, const char* help);
// "f32", "bf16", "f16" or "f64".
void AddDTypeFlag(CLI::App& app, const char* name, DType& field, const char* help);
void AddDTypeFlag(CLI::App& app, const char* name, std::optional<DType>& field, const char* help);
void AddSwitch(CLI::App& app, const char* name, bool& field, const char* help);

}  // namespace shardmlp
