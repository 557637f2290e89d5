// What a server counts and measures, as plain values. docs/operations.md lists the series.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace shardmlp {

// A histogram's: how many were observed up to the bound, those of the buckets before included.
struct ClientBucket {
  double upper_bound = 0;
  int64_t cumulative_count = 0;
};

// A series at one time, as Prometheus has it.
struct ClientSeries {
  std::string name;
  std::map<std::string, std::string> labels;
  double value = 0;                   // of a counter or gauge
  std::vector<ClientBucket> buckets;  // of a histogram, ascending; the last has no bound
  double sum = 0;                     // of a histogram
};

}  // namespace shardmlp
