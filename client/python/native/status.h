// absl::Status as Python exceptions, and waiting without the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardmlp::python {

// Raises shardmlp.errors.Error(message, code, reason, metadata). `status` must not be OK; the GIL must be held.
[[noreturn]] void Raise(const absl::Status& status);

inline const absl::Status& StatusOf(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& value) {
  return value.status();
}

// Runs `wait`, which returns a Status or StatusOr and touches no Python object, with the GIL released. Returns its
// value or raises.
template <typename Wait>
auto WithoutGil(Wait wait) {
  auto result = [&] {
    pybind11::gil_scoped_release release;
    return wait();
  }();
  if (!result.ok()) Raise(StatusOf(result));
  if constexpr (!std::is_same_v<decltype(result), absl::Status>) return *std::move(result);
}

}  // namespace shardmlp::python
