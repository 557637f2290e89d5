// The backends that the conformance suite runs over; each that is built adds itself here.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/backend.h"

namespace shardmlp::testing {

struct BackendFactory {
  std::string name;
  std::function<std::unique_ptr<Backend>()> make;
  friend std::ostream& operator<<(std::ostream& out, const BackendFactory& factory) { return out << factory.name; }
};

std::vector<BackendFactory> Backends();

// A test of one backend.
class BackendTest : public ::testing::TestWithParam<BackendFactory> {
 protected:
  Backend& backend() { return *backend_; }

 private:
  std::unique_ptr<Backend> backend_ = GetParam().make();
};

// Instantiates a suite that derives from BackendTest for every backend.
inline std::string BackendName(const ::testing::TestParamInfo<BackendFactory>& info) { return info.param.name; }

}  // namespace shardmlp::testing
