// shardmlpctl as a process, of which SHARDMLPCTL is the path.
#pragma once

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/client/fake_server.h"

namespace shardmlp {

struct Outcome {
  int exit_code = -1;
  std::string output;  // both streams
};

inline Outcome RunCtl(const std::string& arguments) {
  FILE* const pipe = popen(absl::StrCat(SHARDMLPCTL, " ", arguments, " 2>&1").c_str(), "r");
  Outcome outcome;
  std::array<char, 4096> buffer;
  while (const size_t count = fread(buffer.data(), 1, buffer.size(), pipe)) outcome.output.append(buffer.data(), count);
  outcome.exit_code = WEXITSTATUS(pclose(pipe));
  return outcome;
}

inline Outcome RunAgainst(const fake::FakeServer& server, const std::string& arguments) {
  return RunCtl(absl::StrCat("--target=", server.target(), " ", arguments));
}

}  // namespace shardmlp
