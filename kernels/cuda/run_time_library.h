// A library that is opened when a function of it is first called: a program that is linked with it could run only where
// it is installed.
#pragma once

#include <dlfcn.h>

#include <string>
#include <utility>

namespace shardmlp {

class RunTimeLibrary {
 public:
  // `name`: "libnccl.so.2", found where the system looks for libraries.
  explicit RunTimeLibrary(std::string name)
      : missing_(name + " was not found where the system looks for libraries"),
        library_(dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {}

  // What there is to say where the library is not there; else null.
  const char* missing() const { return library_ == nullptr ? missing_.c_str() : nullptr; }

  // Calls the library's function `name`, which has type Function, or returns `otherwise` where there is none.
  template <typename Function, typename Result, typename... Args>
  Result Call(const char* name, Result otherwise, Args... args) const {
    auto* const function = library_ == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library_, name));
    return function == nullptr ? otherwise : function(args...);
  }

 private:
  const std::string missing_;
  void* const library_;
};

}  // namespace shardmlp
