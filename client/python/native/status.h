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

// Whether a signal's handler raised, as Ctrl-C's does: ClientOptions::interrupted. Takes the GIL. The exception is left
// to the thread's WithoutGil. Python's handlers run on its main thread alone, so that nothing interrupts another.
bool RaisedBySignal();

// Runs `wait`, which returns a Status or StatusOr and touches no Python object, with the GIL released. Returns its
// value or raises, first of all what RaisedBySignal found.
template <typename Wait>
auto WithoutGil(Wait wait) {
  auto result = [&] {
    pybind11::gil_scoped_release release;
    return wait();
  }();
  if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  if (!result.ok()) Raise(StatusOf(result));
  if constexpr (!std::is_same_v<decltype(result), absl::Status>) return *std::move(result);
}

}  // namespace shardmlp::python
