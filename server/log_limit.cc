#include "server/log_limit.h"

#include <algorithm>
#include <utility>

namespace shardmlp {

std::optional<int64_t> LogLimit::Admit(absl::string_view event, absl::string_view kind, absl::Time now) {
  absl::MutexLock lock(&mutex_);
  Allowance& allowance = events_.try_emplace({event, kind}, Allowance{burst_, now}).first->second;
  const double earned = std::max(0.0, absl::ToDoubleSeconds(now - allowance.at) * lines_a_second_);
  allowance.lines = std::min(burst_, allowance.lines + earned);
  allowance.at = now;
  if (allowance.lines < 1) {
    ++allowance.suppressed;
    return std::nullopt;
  }
  --allowance.lines;
  return std::exchange(allowance.suppressed, 0);
}

}  // namespace shardmlp
