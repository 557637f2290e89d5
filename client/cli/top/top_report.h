// What shardmlpctl top shows of one look at a server, in three ways.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cli/top/activity.h"
#include "client/cpp/served_model.h"

namespace shardmlp {

struct TopReport {
  std::string target;
  absl::Time time;
  absl::Status reached;  // why it could not be looked at
  absl::Duration away;   // how long it could not be; where it just came back, how long it had been
  // Of the last look at it.
  Activity activity;
  ServedModel model;
};

// An object in one line: names have their units, a second is `_per_second`, and what there is none of is null.
std::string TopJson(const TopReport& report);
// A line, and what stands above its columns.
std::string TopLine(const TopReport& report);
std::string TopLineHeading();
// A screen's lines.
std::vector<std::string> TopScreen(const TopReport& report);

}  // namespace shardmlp
