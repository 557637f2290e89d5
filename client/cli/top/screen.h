// The terminal that a live view is drawn on.
#pragma once

#include <string>
#include <vector>

namespace shardmlp {

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
