// The CUDA runtime over the emulated devices.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "launch.h"
#include "tests/cuda_emulation/emulation.h"
#include "tests/cuda_emulation/guard.h"
#include "tests/cuda_emulation/machine.h"

using shardmlp::emulation::AddressSpace;
using shardmlp::emulation::kDeviceBytes;
using shardmlp::emulation::kDeviceCount;
using shardmlp::emulation::Machine;
using shardmlp::emulation::Mark;

namespace {

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t Remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// Runs f(machine) for a call of the runtime, unless the device has failed.
template <typename F>
cudaError_t Call(const F& f) {
  Machine& machine = Machine::Get();
  const std::lock_guard lock(machine.mutex);
  const cudaError_t error = machine.Enter();
  return Remember(error == cudaSuccess ? f(machine) : error);
}

// The same for what undoes things, on a device that has failed too; it runs no work.
template <typename F>
cudaError_t Undo(const F& f) {
  Machine& machine = Machine::Get();
  const std::lock_guard lock(machine.mutex);
  const cudaError_t error = f(machine);
  return Remember(error == cudaSuccess ? machine.sticky_error() : error);
}

cudaError_t Refuse(Machine& machine, cudaError_t error, const std::string& fault) {
  machine.Report(fault);
  return error;
}

// Whether a stream is one, of the current device.
bool Current(Machine& machine, cudaStream_t stream) {
  const auto& streams = machine.streams();
  return std::find(streams.begin(), streams.end(), stream) != streams.end() && stream->device == current_device;
}

cudaError_t BadStream(Machine& machine, const std::string& call) {
  return Refuse(machine, cudaErrorInvalidResourceHandle, call + ": not a stream of the current device");
}

// A row of a copy or fill: where it is, and how long.
struct Rows {
  char* data;
  size_t pitch;
  size_t row_bytes;
  size_t rows;

  bool Usable(Machine& machine, cudaStream_t stream, const char* what) const {
    return machine.Usable(stream, data, pitch, row_bytes, rows, what);
  }
};

// Enqueues f(row of `to`, row of `from`) for each row. Memory is looked at now and when the stream gets there.
template <typename F>
cudaError_t EnqueueRows(const char* call, const Rows& to, const Rows& from, cudaStream_t stream, const F& f) {
  return Call([&](Machine& machine) {
    if (!Current(machine, stream)) return BadStream(machine, call);
    const auto usable = [&machine, call, to, from, stream] {
      return to.Usable(machine, stream, call) && from.Usable(machine, stream, call);
    };
    if (!usable()) return cudaErrorInvalidValue;
    machine.Enqueue(stream, {[=, &machine](bool /*backwards*/) {
                      if (!usable()) return machine.Break(cudaErrorIllegalAddress, std::string(call) + " failed");
                      for (size_t row = 0; row < to.rows; ++row)
                        f(to.data + row * to.pitch, from.data + row * from.pitch);
                    }});
    return cudaSuccess;
  });
}

Rows RowsOf(const void* data, size_t pitch, size_t row_bytes, size_t rows) {
  return {static_cast<char*>(const_cast<void*>(data)), pitch, row_bytes, rows};
}

}  // namespace

namespace shardmlp::emulation {

int CurrentDevice() { return current_device; }

cudaError_t EnqueueKernel(cudaStream_t stream, std::function<void(bool backwards)> run) {
  return Call([&](Machine& machine) {
    if (!Current(machine, stream)) return BadStream(machine, "kernel launch");
    machine.Enqueue(stream, {std::move(run)});
    return std::exchange(last_error, cudaSuccess);  // a launch is asked how it went by cudaGetLastError
  });
}

void CheckDeviceAddress(const void* data) {
  if (data == nullptr) return;
  Call([&](Machine& machine) {
    CUstream_st stream{current_device, 0};
    if (!machine.Usable(&stream, data, 1, "kernel operand")) {
      machine.Break(cudaErrorIllegalAddress, "kernel operand that the device can't reach");
    }
    return cudaSuccess;
  });
}

void CheckAligned(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) EndWork({cudaErrorMisalignedAddress, address});
}

}  // namespace shardmlp::emulation

cudaError_t cudaGetLastError() {
  Machine& machine = Machine::Get();
  const std::lock_guard lock(machine.mutex);
  const cudaError_t last = std::exchange(last_error, cudaSuccess);
  return machine.sticky_error() == cudaSuccess ? last : machine.sticky_error();
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorUnknown: return "cudaErrorUnknown";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorMisalignedAddress: return "cudaErrorMisalignedAddress";
  }
  return "?";
}

const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDeviceCount;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return Call([&](Machine& machine) {
    if (device < 0 || device >= kDeviceCount) return Refuse(machine, cudaErrorInvalidDevice, "no such device");
    std::snprintf(properties->name, sizeof(properties->name), "emulated");
    properties->major = 9;
    properties->minor = 0;
    return cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return Undo([&](Machine& machine) {
    if (device < 0 || device >= kDeviceCount) return Refuse(machine, cudaErrorInvalidDevice, "no such device");
    current_device = device;
    return cudaSuccess;
  });
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  return Call([&](Machine& machine) {
    *free_bytes = static_cast<size_t>(kDeviceBytes - machine.used_bytes(current_device));
    *total_bytes = static_cast<size_t>(kDeviceBytes);
    return cudaSuccess;
  });
}

cudaError_t cudaMalloc(void** data, size_t bytes) {
  return Call([&](Machine& machine) {
    int64_t& used = machine.used_bytes(current_device);
    if (static_cast<int64_t>(bytes) > kDeviceBytes - used) return cudaErrorMemoryAllocation;
    used += static_cast<int64_t>(bytes);
    *data = machine.device_memory().Allocate(bytes, current_device);
    return cudaSuccess;
  });
}

cudaError_t cudaFree(void* data) {
  return Undo([&](Machine& machine) {
    if (data == nullptr) return cudaSuccess;
    const AddressSpace::Allocation* const allocation = machine.device_memory().Find(data, 1);
    const int device = allocation == nullptr ? 0 : allocation->device;
    const size_t bytes = allocation == nullptr ? 0 : allocation->bytes;
    if (!machine.device_memory().Free(data)) return Refuse(machine, cudaErrorInvalidValue, "cudaFree: no allocation");
    machine.used_bytes(device) -= static_cast<int64_t>(bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned /*flags*/) {
  return Call([&](Machine& machine) {
    *data = machine.pinned_memory().Allocate(bytes, current_device);
    return cudaSuccess;
  });
}

cudaError_t cudaFreeHost(void* data) {
  return Undo([&](Machine& machine) {
    if (data == nullptr || machine.pinned_memory().Free(data)) return cudaSuccess;
    return Refuse(machine, cudaErrorInvalidValue, "cudaFreeHost: no allocation");
  });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  return Call([&](Machine& machine) {
    *stream = machine.AddStream(current_device);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return Undo([&](Machine& machine) {
    machine.RemoveStream(stream);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return Call([&](Machine& machine) {
    machine.RunAll(stream);
    return machine.sticky_error();
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  return Call([&](Machine& machine) {
    if (!Current(machine, stream)) return BadStream(machine, "cudaStreamWaitEvent");
    if (event->mark != nullptr) machine.Enqueue(stream, {.awaits = event->mark});
    return cudaSuccess;
  });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  return Call([&](Machine& machine) {
    *event = new CUevent_st{current_device, nullptr};
    ++machine.object_count();
    return cudaSuccess;
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return Undo([&](Machine& machine) {
    delete event;
    --machine.object_count();
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return Call([&](Machine& machine) {
    if (!Current(machine, stream)) return BadStream(machine, "cudaEventRecord");
    if (event->device != stream->device) {
      return Refuse(machine, cudaErrorInvalidResourceHandle, "cudaEventRecord: an event of another device");
    }
    event->mark = std::make_shared<Mark>(Mark{stream});
    machine.Enqueue(stream, {.reaches = event->mark});
    return cudaSuccess;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return Call([&](Machine& machine) {
    if (event->mark != nullptr) machine.RunUntil(*event->mark);
    return machine.sticky_error();
  });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return Call([&](Machine& machine) {
    const bool reached = event->mark == nullptr || machine.Poll(*event->mark);
    return machine.sticky_error() == cudaSuccess && !reached ? cudaErrorNotReady : machine.sticky_error();
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return Call([&](Machine& machine) {
    if (start->mark == nullptr || end->mark == nullptr || !start->mark->done || !end->mark->done) {
      return Refuse(machine, cudaErrorInvalidResourceHandle, "cudaEventElapsedTime: an event that was not reached");
    }
    *milliseconds = std::chrono::duration<float, std::milli>(end->mark->time - start->mark->time).count();
    return cudaSuccess;
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t row_bytes,
                              size_t rows, cudaMemcpyKind /*kind*/, cudaStream_t stream) {
  return EnqueueRows("cudaMemcpyAsync", RowsOf(to, to_pitch, row_bytes, rows),
                     RowsOf(from, from_pitch, row_bytes, rows), stream,
                     [row_bytes](char* to, const char* from) { std::memcpy(to, from, row_bytes); });
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return cudaMemset2DAsync(to, bytes, value, bytes, 1, stream);
}

cudaError_t cudaMemset2DAsync(void* to, size_t pitch, int value, size_t row_bytes, size_t rows, cudaStream_t stream) {
  const Rows target = RowsOf(to, pitch, row_bytes, rows);
  return EnqueueRows("cudaMemsetAsync", target, target, stream,
                     [=](char* to, const char* /*from*/) { std::memset(to, value, row_bytes); });
}
