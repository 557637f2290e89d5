#include "client/python/native/status.h"

#include <string>

#include "kernels/status.h"

namespace shardmlp::python {

namespace py = pybind11;

void Raise(const absl::Status& status) {
  py::dict metadata;
  for (const auto& [key, value] : MetadataOf(status)) metadata[py::str(key)] = value;
  py::object type = py::module_::import("shardmlp.errors").attr("Error");
  py::object error = type(std::string(status.message()), absl::StatusCodeToString(status.code()),
                          std::string(Name(ReasonOf(status))), metadata);
  PyErr_SetObject(type.ptr(), error.ptr());
  throw py::error_already_set();
}

bool RaisedBySignal() {
  const py::gil_scoped_acquire acquire;
  return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
}

}  // namespace shardmlp::python
