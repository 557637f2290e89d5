// Holders of native objects that a forked child may drop without touching the connection it inherited.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <memory>

namespace shardmlp::python {

// Destroys with the GIL released, since a session's destructor talks to the server. In a process other than the one
// that made the object, which has none of its threads, it does nothing: the parent still owns the connection.
template <typename T>
class ForkSafeDelete {
 public:
  void operator()(T* object) const {
    if (getpid() != owner_) return;
    {
      pybind11::gil_scoped_release release;
      std::default_delete<T>()(object);
    }
    // Ctrl-C in here cut it short, and nothing can be raised from here.
    if (PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      PyErr_SetInterrupt();
    }
  }

 private:
  pid_t owner_ = getpid();
};

template <typename T>
using ForkSafePtr = std::unique_ptr<T, ForkSafeDelete<T>>;

template <typename T>
ForkSafePtr<T> MakeForkSafe(std::unique_ptr<T> object) {
  return ForkSafePtr<T>(object.release());
}

}  // namespace shardmlp::python
