// Memory at addresses of its own, of which the emulation knows who may touch them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace shardmlp::emulation {

// For one thread at a time. A locked space can be touched between Unlock and Lock alone, by whose failure Open opens
// it.
class AddressSpace {
 public:
  struct Allocation {
    char* data;
    size_t bytes;
    int device;
    char* pages;  // whole pages around data, which ends with them but for alignment
    size_t page_bytes;
  };

  // `name` is for messages: "device memory". Not locked.
  explicit AddressSpace(std::string name);
  ~AddressSpace();
  AddressSpace(const AddressSpace&) = delete;
  AddressSpace& operator=(const AddressSpace&) = delete;

  // Aligned to 256 bytes and filled with 0xff, in the first 4 MiB.
  void* Allocate(size_t bytes, int device);
  // False where `data` is not the begin of an allocation.
  bool Free(void* data);
  // The allocation that has all of [data, data + bytes); null where none has.
  const Allocation* Find(const void* data, size_t bytes) const;
  // Any address of this space, allocated, freed or neither. Safe in a signal handler.
  bool Contains(const void* address) const { return address >= begin_ && address < begin_ + kBytes; }
  int64_t live_count() const { return static_cast<int64_t>(allocations_.size()); }
  const std::string& name() const { return name_; }

  void SetLocked(bool locked);
  // Between Unlock and Lock, in a signal handler, opens the allocation that has `address`, for whoever just failed to
  // touch it. False where none has.
  bool Open(const void* address);
  void Unlock() { unlocked_ = true; }
  void Lock();

 private:
  static constexpr size_t kBytes = size_t{1} << 37;

  void Protect(const Allocation& allocation, bool open);

  const std::string name_;
  bool locked_ = false;
  bool unlocked_ = false;
  std::vector<const Allocation*> opened_;
  char* begin_;
  char* next_;
  std::map<const char*, Allocation> allocations_;  // by data
};

}  // namespace shardmlp::emulation
