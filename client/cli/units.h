// Numbers as people read them: three digits and a unit; "-" for NaN.
#pragma once

#include <string>

namespace shardmlp {

std::string Bytes(double bytes);      // "1.50 GiB"
std::string Count(double count);      // "12.3k"
std::string Flops(double flops);      // "1.50 GFLOP/s", of so many a second
std::string Seconds(double seconds);  // "1.50 ms"
std::string Percent(double ratio);    // "12.3 %"

}  // namespace shardmlp
