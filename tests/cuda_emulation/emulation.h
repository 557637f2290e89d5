// A stand-in for the CUDA runtime, cuBLAS and NCCL on the CPU, linked in place of the real libraries, so that the CUDA
// backend's own code runs where there is no GPU. It is strict where hardware forgives, and deterministic:
//
// - Device memory is address space of its own. Each allocation has addresses that don't come back, and ends at unmapped
//   ones; it begins as NaN (the first 4 MiB). With seed 0 nobody may touch it but while the device works: a host that
//   reads or writes it dies of it, by name. (With others it lies open, since locking takes time.)
// - Work is put off. It runs when the host waits for it, or at any call of the runtime before; which stream goes on,
// and
//   how far, is drawn from the seed, and only an event or one stream's order rules anything out. Seed 0 runs all work
//   as late as it may. Nothing waits that hardware does not promise to wait, such as cudaFree.
// - A kernel that touches what is not memory, or 16 bytes that are not aligned, and work on memory that was freed, fail
//   as on hardware: that call or a later one, and every one after it, until Reset. Pageable host memory, a leading
//   dimension that is too small and handles of another device are refused at once.
// - Every fault is told in words by TakeFaults. There are four devices: one can tell which was meant.
//
// Thread-safe, as the runtime is; the work itself runs on the calling thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardmlp::emulation {

inline constexpr int kDeviceCount = 4;
inline constexpr int64_t kDeviceBytes = int64_t{24} << 30;

// From here on the order of work is drawn from `seed`.
void SetSeed(uint64_t seed);

// As a new process finds the devices: no fault, no work. What was made before may only be destroyed.
void Reset();

// What went wrong since the last call of this, the first fault first.
std::vector<std::string> TakeFaults();

// Allocations, streams, events and handles that were made and not destroyed.
int64_t live_object_count();

}  // namespace shardmlp::emulation
