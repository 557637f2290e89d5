// Operands and numbers that the benchmarks share.
#pragma once

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/matrix.h"

namespace shardmlp {

// Fills `m` (contiguous, host memory, f32 or bf16) with small values that differ from each other.
inline void FillSmall(MatrixView m) {
  uint32_t state = 1;
  for (int64_t i = 0; i < m.element_count(); ++i) {
    state = state * 1664525u + 1013904223u;
    const float value = static_cast<float>(state >> 8) * 0x1p-29f - 0x1p-6f;
    if (m.dtype == DType::kF32) {
      m.as<float>()[i] = value;
    } else {
      m.as<uint16_t>()[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
    }
  }
}

inline double SecondsSince(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// A benchmark has nobody to return an error to.
inline void Require(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(1);
}

}  // namespace shardmlp
