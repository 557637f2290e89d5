// The emulated devices: their memory, their streams, and what went wrong on them. runtime.cc and cublas.cc are the
// libraries over it.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda_runtime_api.h"
#include "tests/cuda_emulation/address_space.h"

namespace shardmlp::emulation {

// The device that is current on the calling thread.
int CurrentDevice();

// A point in a stream.
struct Mark {
  cudaStream_t stream;  // null: what other threads' work brings about
  bool done = false;
  std::chrono::steady_clock::time_point time = {};  // when it was reached
};

// The next thing that a stream does: one of the three.
struct Work {
  std::function<void(bool backwards)> run = {};
  std::shared_ptr<Mark> reaches = {};
  std::shared_ptr<Mark> awaits = {};
};

}  // namespace shardmlp::emulation

struct CUstream_st {
  int device;
  int64_t number;  // in the order in which streams were made
  std::deque<shardmlp::emulation::Work> work = {};
};

struct CUevent_st {
  int device;
  std::shared_ptr<shardmlp::emulation::Mark> mark;  // where it was recorded last; null: nowhere
};

namespace shardmlp::emulation {

// For the holder of `mutex`.
class Machine {
 public:
  // The one there is.
  static Machine& Get();

  std::mutex mutex;

  void SetSeed(uint64_t seed);
  void Reset();
  AddressSpace& device_memory() { return device_memory_; }
  AddressSpace& pinned_memory() { return pinned_memory_; }
  int64_t& used_bytes(int device) { return used_bytes_[device]; }
  int64_t& object_count() { return object_count_; }
  const std::vector<cudaStream_t>& streams() const { return streams_; }
  cudaStream_t AddStream(int device);
  // Runs what the stream has left.
  void RemoveStream(cudaStream_t stream);

  // What an earlier fault of the device left, or success. Calls of the runtime begin with it; it may run work.
  cudaError_t Enter();
  cudaError_t sticky_error() const { return sticky_error_; }

  // Whether work of `stream` may use [data, data + bytes): live memory of its device, or pinned. Otherwise says so.
  bool Usable(cudaStream_t stream, const void* data, size_t bytes, const std::string& what);
  // The same for rows of `row_bytes`, `pitch` apart.
  bool Usable(cudaStream_t stream, const void* data, size_t pitch, size_t row_bytes, size_t rows,
              const std::string& what);

  void Enqueue(cudaStream_t stream, Work work);
  // Runs some work, on any stream; whether the mark is reached now.
  bool Poll(const Mark& mark);
  // Runs work, on any stream, until the mark is reached.
  void RunUntil(const Mark& mark);
  // Until the stream has no work.
  void RunAll(cudaStream_t stream);

  // Something is wrong that the caller is told at once.
  void Report(const std::string& fault);
  // The device failed, for good.
  void Break(cudaError_t error, const std::string& fault);
  std::vector<std::string> TakeFaults() { return std::exchange(faults_, {}); }

 private:
  Machine();

  static bool Ready(cudaStream_t stream);
  // The stream that is to go on so that `stream` can; null where that is other threads' to bring about.
  cudaStream_t Needed(cudaStream_t stream) const;
  cudaStream_t AnyReady();
  void RunNext(cudaStream_t stream);
  // Runs work until `done`; `stream` has to go on for it.
  void Run(cudaStream_t stream, const std::function<bool()>& done);

  AddressSpace device_memory_{"device memory"};
  AddressSpace pinned_memory_{"pinned memory"};
  std::vector<int64_t> used_bytes_;
  int64_t object_count_ = 0;
  std::vector<cudaStream_t> streams_;
  int64_t streams_made_ = 0;
  bool late_ = false;
  uint64_t calls_a_run_ = 2;  // of the runtime, for each that runs some work
  std::mt19937_64 random_;
  cudaError_t sticky_error_ = cudaSuccess;
  std::vector<std::string> faults_;
};

}  // namespace shardmlp::emulation
