#include "tests/cuda_emulation/machine.h"

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <utility>

#include "tests/cuda_emulation/emulation.h"
#include "tests/cuda_emulation/guard.h"

namespace shardmlp::emulation {
namespace {

std::string Describe(const void* data, size_t bytes) {
  std::ostringstream text;
  text << "[" << data << ", + " << bytes << " bytes)";
  return text.str();
}

}  // namespace

Machine& Machine::Get() {
  static auto* const machine = new Machine();  // outlives whatever else there is at exit
  return *machine;
}

Machine::Machine() : used_bytes_(kDeviceCount) { CatchBadAccesses(&device_memory_, &pinned_memory_); }

void Machine::SetSeed(uint64_t seed) {
  late_ = seed == 0;
  calls_a_run_ = uint64_t{2} << (seed % 3 * 2);
  device_memory_.SetLocked(late_);
  random_.seed(seed);
  std::sort(streams_.begin(), streams_.end(), [](cudaStream_t a, cudaStream_t b) { return a->number < b->number; });
}

void Machine::Reset() {
  for (cudaStream_t stream : streams_) stream->work.clear();
  sticky_error_ = cudaSuccess;
  faults_.clear();
}

void Machine::Report(const std::string& fault) {
  std::fprintf(stderr, "emulated device: %s\n", fault.c_str());
  faults_.push_back(fault);
}

void Machine::Break(cudaError_t error, const std::string& fault) {
  if (sticky_error_ == cudaSuccess) sticky_error_ = error;
  Report(fault);
}

bool Machine::Usable(cudaStream_t stream, const void* data, size_t bytes, const std::string& what) {
  if (pinned_memory_.Find(data, bytes) != nullptr) return true;
  const AddressSpace::Allocation* const allocation = device_memory_.Find(data, bytes);
  if (allocation != nullptr && allocation->device == stream->device) return true;
  if (allocation != nullptr) {
    Report(what + ": memory of another device " + Describe(data, bytes));
  } else if (device_memory_.Contains(data) || pinned_memory_.Contains(data)) {
    Report(what + ": freed memory, or beyond an allocation's end " + Describe(data, bytes));
  } else {
    Report(what + ": pageable host memory " + Describe(data, bytes));
  }
  return false;
}

bool Machine::Usable(cudaStream_t stream, const void* data, size_t pitch, size_t row_bytes, size_t rows,
                     const std::string& what) {
  return rows == 0 || row_bytes == 0 || Usable(stream, data, (rows - 1) * pitch + row_bytes, what);
}

cudaError_t Machine::Enter() {
  while (!late_ && random_() % calls_a_run_ == 0) {
    cudaStream_t const stream = AnyReady();
    if (stream == nullptr) break;
    RunNext(stream);
  }
  return sticky_error_;
}

cudaStream_t Machine::AddStream(int device) {
  ++object_count_;
  return streams_.emplace_back(new CUstream_st{device, ++streams_made_});
}

void Machine::RemoveStream(cudaStream_t stream) {
  RunAll(stream);
  std::erase(streams_, stream);
  delete stream;
  --object_count_;
}

void Machine::Enqueue(cudaStream_t stream, Work work) { stream->work.push_back(std::move(work)); }

bool Machine::Ready(cudaStream_t stream) {
  return !stream->work.empty() && (stream->work.front().awaits == nullptr || stream->work.front().awaits->done);
}

cudaStream_t Machine::Needed(cudaStream_t stream) const {
  while (stream != nullptr && !Ready(stream)) stream = stream->work.front().awaits->stream;
  return stream;
}

// One stream runs ahead of the others for a while, and then another: that shows more than taking turns.
cudaStream_t Machine::AnyReady() {
  if (random_() % 8 == 0) std::shuffle(streams_.begin(), streams_.end(), random_);
  const auto found = std::find_if(streams_.begin(), streams_.end(), Ready);
  return found == streams_.end() ? nullptr : *found;
}

void Machine::RunNext(cudaStream_t stream) {
  const Work work = std::move(stream->work.front());
  stream->work.pop_front();
  if (work.run != nullptr && sticky_error_ == cudaSuccess) {
    const bool backwards = random_() % 2 == 0;
    if (const auto access = RunGuarded([&] { work.run(backwards); })) {
      Break(access->error, std::string(access->error == cudaErrorMisalignedAddress
                                           ? "a kernel made a 16-byte access that is not aligned, at "
                                           : "a kernel touched what is no memory of the device, at ") +
                               Describe(access->address, 1));
    }
  }
  if (work.reaches != nullptr) {
    work.reaches->done = true;
    work.reaches->time = std::chrono::steady_clock::now();
  }
}

void Machine::Run(cudaStream_t stream, const std::function<bool()>& done) {
  device_memory_.Unlock();
  while (!done()) {
    cudaStream_t const next = late_ ? Needed(stream) : AnyReady();
    if (next == nullptr) {
      Break(cudaErrorUnknown, "the host waits for what it alone could bring about");
      break;
    }
    RunNext(next);
  }
  device_memory_.Lock();
}

bool Machine::Poll(const Mark& mark) {
  device_memory_.Unlock();
  for (int i = 0; i < 4 && !mark.done; ++i) {
    cudaStream_t const next = late_ ? Needed(mark.stream) : AnyReady();
    if (next == nullptr) break;
    RunNext(next);
  }
  device_memory_.Lock();
  return mark.done;
}

void Machine::RunUntil(const Mark& mark) {
  Run(mark.stream, [&] { return mark.done; });
}

void Machine::RunAll(cudaStream_t stream) {
  Run(stream, [&] { return stream->work.empty(); });
}

void SetSeed(uint64_t seed) {
  Machine& machine = Machine::Get();
  const std::lock_guard lock(machine.mutex);
  machine.SetSeed(seed);
}

void Reset() {
  Machine& machine = Machine::Get();
  const std::lock_guard lock(machine.mutex);
  machine.Reset();
}

std::vector<std::string> TakeFaults() {
  Machine& machine = Machine::Get();
  const std::lock_guard lock(machine.mutex);
  return machine.TakeFaults();
}

int64_t live_object_count() {
  Machine& machine = Machine::Get();
  const std::lock_guard lock(machine.mutex);
  return machine.object_count() + machine.device_memory().live_count() + machine.pinned_memory().live_count();
}

}  // namespace shardmlp::emulation
