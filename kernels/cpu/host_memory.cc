#include "kernels/cpu/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
constexpr int64_t kAlignment = 64;
constexpr int64_t kHugePage = 2 << 20;

// Large memory lies on huge pages where the system gives them: matrix products miss the TLB a lot less.
void* AllocateAligned(int64_t bytes) {
  const int64_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
  const auto size = static_cast<size_t>((bytes + alignment - 1) / alignment * alignment);
  void* data = std::aligned_alloc(static_cast<size_t>(alignment), size);
  if (data != nullptr && alignment == kHugePage) madvise(data, size, MADV_HUGEPAGE);
  return data;
}

// The number in a file that holds one; no limit where there is no such file, or it says "max".
int64_t ReadLimit(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  int64_t limit = 0;
  return file >> word && absl::SimpleAtoi(word, &limit) ? limit : kNoLimit;
}

int64_t MachineAvailableBytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string key, line; file >> key && std::getline(file, line);) {
    int64_t kib = 0;
    absl::string_view value = absl::StripSuffix(line, " kB");
    if (key == "MemAvailable:" && absl::SimpleAtoi(value, &kib)) return kib << 10;
  }
  return kNoLimit;
}

// Of this process's memory cgroup, version 1 or 2, by its path in /proc/self/cgroup ("9:memory:/a" or "0::/a") and at
// the root, where a container sees its own.
int64_t CgroupLimitBytes() {
  int64_t limit =
      std::min(ReadLimit("/sys/fs/cgroup/memory.max"), ReadLimit("/sys/fs/cgroup/memory/memory.limit_in_bytes"));
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t name = line.find(':') + 1;
    const size_t path = line.find(':', name) + 1;
    if (name == 0 || path == 0) continue;
    const std::string controller = line.substr(name, path - 1 - name);
    if (controller == "memory") {
      limit = std::min(limit, ReadLimit("/sys/fs/cgroup/memory" + line.substr(path) + "/memory.limit_in_bytes"));
    } else if (controller.empty()) {
      limit = std::min(limit, ReadLimit("/sys/fs/cgroup" + line.substr(path) + "/memory.max"));
    }
  }
  return limit;
}

}  // namespace

int64_t AvailableMemoryBytes() { return std::min(MachineAvailableBytes(), CgroupLimitBytes()); }

absl::StatusOr<Buffer> HostMemory::Allocate(Memory memory, int64_t bytes) {
  if (bytes == 0) return Buffer();
  if (bytes < 0) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument,
                 absl::StrCat("allocation of ", bytes, " bytes"));
  }
  int64_t used = used_bytes_.load();
  do {
    if (bytes > limit_bytes_ - used) {
      return Error(absl::StatusCode::kResourceExhausted, Reason::kOutOfMemory,
                   absl::StrCat("allocation of ", bytes, " bytes: ", used, " of ", limit_bytes_, " bytes are in use"),
                   {{"requested_bytes", absl::StrCat(bytes)},
                    {"used_bytes", absl::StrCat(used)},
                    {"limit_bytes", absl::StrCat(limit_bytes_)}});
    }
  } while (!used_bytes_.compare_exchange_weak(used, used + bytes));
  void* data = AllocateAligned(bytes);
  if (data == nullptr) {
    used_bytes_ -= bytes;
    return Error(absl::StatusCode::kResourceExhausted, Reason::kOutOfMemory,
                 absl::StrCat("allocation of ", bytes, " bytes: the machine has not enough memory"),
                 {{"requested_bytes", absl::StrCat(bytes)}});
  }
  return Buffer(this, data, bytes, memory);
}

void HostMemory::Free(void* data, int64_t bytes, Memory /*memory*/) {
  std::free(data);
  used_bytes_ -= bytes;
}

}  // namespace shardmlp
