#include "server/model/convert.h"

#include <cstring>

#include "kernels/cpu/number.h"

namespace shardmlp {
namespace {

template <typename From, typename To>
void Convert(const char* from, char* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    From value;
    To converted;
    std::memcpy(&value, from + i * sizeof(From), sizeof(From));
    Store(Load(value), converted);
    std::memcpy(to + i * sizeof(To), &converted, sizeof(To));
  }
}

}  // namespace

void ConvertElements(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count) {
  const char* source = static_cast<const char*>(from);
  char* target = static_cast<char*>(to);
  if (from_dtype == to_dtype) {
    std::memcpy(target, source, count * SizeOf(to_dtype));
    return;
  }
  WithDType(from_dtype, [&](auto from_tag) {
    WithDType(to_dtype, [&](auto to_tag) {
      Convert<typename decltype(from_tag)::Type, typename decltype(to_tag)::Type>(source, target, count);
    });
  });
}

}  // namespace shardmlp
