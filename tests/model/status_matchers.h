// What a test expects of a failure: its code, its reason, and what its message names.
#pragma once

#include <initializer_list>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "kernels/status.h"

namespace shardmlp {

inline const absl::Status& StatusOf(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& status_or) {
  return status_or.status();
}

template <typename T>
testing::AssertionResult Fails(const T& result, absl::StatusCode code, Reason reason,
                               std::initializer_list<absl::string_view> named) {
  const absl::Status& status = StatusOf(result);
  if (status.code() != code || ReasonOf(status) != reason) {
    return testing::AssertionFailure() << status << "; expected " << code << " and " << Name(reason);
  }
  for (const absl::string_view words : named) {
    if (!absl::StrContains(status.message(), words)) {
      return testing::AssertionFailure() << status << "; expected it to name: " << words;
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace shardmlp
