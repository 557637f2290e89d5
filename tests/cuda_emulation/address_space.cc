#include "tests/cuda_emulation/address_space.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace shardmlp::emulation {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlignment = 256;
constexpr size_t kPoisonedBytes = 4 << 20;

size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

void Require(bool condition, const char* what) {
  if (condition) return;
  std::perror(what);
  std::abort();
}

// Address space without memory.
char* Reserve(void* at, size_t bytes) {
  const int fixed = at == nullptr ? 0 : MAP_FIXED;
  void* const got = mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
  Require(got != MAP_FAILED, "reserve address space");
  return static_cast<char*>(got);
}

}  // namespace

AddressSpace::AddressSpace(std::string name)
    : name_(std::move(name)), begin_(Reserve(nullptr, kBytes)), next_(begin_ + kPage) {}

AddressSpace::~AddressSpace() { munmap(begin_, kBytes); }

void* AddressSpace::Allocate(size_t bytes, int device) {
  const size_t size = RoundUp(std::max<size_t>(bytes, 1), kAlignment);
  const size_t page_bytes = RoundUp(size, kPage);
  if (allocations_.empty() && next_ > begin_ + kBytes / 2) next_ = begin_ + kPage;  // a test that is repeated for long
  Require(next_ + page_bytes + kPage < begin_ + kBytes, "emulated address space is used up");
  Allocation allocation{next_ + page_bytes - size, bytes, device, next_, page_bytes};
  next_ += page_bytes + kPage;
  Protect(allocation, true);
  std::memset(allocation.data, 0xff, std::min(size, kPoisonedBytes));
  if (locked_) Protect(allocation, false);
  allocations_[allocation.data] = allocation;
  opened_.reserve(allocations_.size());  // a signal handler, which Open is called in, may not allocate
  return allocation.data;
}

bool AddressSpace::Free(void* data) {
  const auto found = allocations_.find(static_cast<const char*>(data));
  if (found == allocations_.end()) return false;
  Reserve(found->second.pages, found->second.page_bytes);
  allocations_.erase(found);
  return true;
}

const AddressSpace::Allocation* AddressSpace::Find(const void* data, size_t bytes) const {
  const auto* const begin = static_cast<const char*>(data);
  auto found = allocations_.upper_bound(begin);
  if (found == allocations_.begin()) return nullptr;
  const Allocation& allocation = (--found)->second;
  return begin + bytes <= allocation.data + allocation.bytes ? &allocation : nullptr;
}

void AddressSpace::SetLocked(bool locked) {
  for (const auto& [data, allocation] : allocations_) Protect(allocation, !locked);
  locked_ = locked;
}

bool AddressSpace::Open(const void* address) {
  const Allocation* const allocation = unlocked_ && locked_ ? Find(address, 1) : nullptr;
  if (allocation == nullptr) return false;
  Protect(*allocation, true);
  opened_.push_back(allocation);
  return true;
}

void AddressSpace::Lock() {
  for (const Allocation* allocation : opened_) Protect(*allocation, false);
  opened_.clear();
  unlocked_ = false;
}

void AddressSpace::Protect(const Allocation& allocation, bool open) {
  const int access = open ? PROT_READ | PROT_WRITE : PROT_NONE;
  Require(mprotect(allocation.pages, allocation.page_bytes, access) == 0, "protect emulated memory");
}

}  // namespace shardmlp::emulation
