// The terminal that a live view is drawn on, and the signals that end it.
#pragma once

#include <string>
#include <vector>

#include "absl/time/time.h"

namespace shardmlp {

// While there is one, SIGINT and SIGTERM are only noted. At most one at a time; main thread.
class EndSignals {
 public:
  EndSignals();
  ~EndSignals();
  EndSignals(const EndSignals&) = delete;
  EndSignals& operator=(const EndSignals&) = delete;

  // Whether one came. Any thread.
  static bool Came();
  // Until then; false where one came first.
  static bool WaitUntil(absl::Time time);
};

// The alternate screen of the terminal at standard output: what stood there before is back when it is destroyed, and
// while the process is suspended. Output goes around std::cout.
class Screen {
 public:
  Screen();
  ~Screen();
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  // As many lines as there is room for, each as wide as there is.
  void Draw(const std::vector<std::string>& lines);
};

}  // namespace shardmlp
