// NCCL's functions, each of which opens the library when it is called and is then the library's own.
#include <nccl.h>

#include <string>

#include "kernels/cuda/run_time_library.h"

namespace {

const shardmlp::RunTimeLibrary& Library() {
  static const shardmlp::RunTimeLibrary library("libnccl.so." + std::to_string(NCCL_MAJOR));
  return library;
}

// Function: the type of the library's function `name`.
template <typename Function, typename... Args>
ncclResult_t Call(const char* name, Args... args) {
  return Library().Call<Function>(name, ncclSystemError, args...);
}

}  // namespace

const char* ncclGetErrorString(ncclResult_t result) {
  if (const char* const missing = Library().missing()) return missing;
  return Library().Call<decltype(ncclGetErrorString)>("ncclGetErrorString", "an unknown error", result);
}

ncclResult_t ncclGetVersion(int* version) { return Call<decltype(ncclGetVersion)>("ncclGetVersion", version); }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { return Call<decltype(ncclGetUniqueId)>("ncclGetUniqueId", id); }

ncclResult_t ncclCommInitRankConfig(ncclComm_t* communicator, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return Call<decltype(ncclCommInitRankConfig)>("ncclCommInitRankConfig", communicator, size, id, rank, config);
}

ncclResult_t ncclCommFinalize(ncclComm_t communicator) {
  return Call<decltype(ncclCommFinalize)>("ncclCommFinalize", communicator);
}

ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  return Call<decltype(ncclCommDestroy)>("ncclCommDestroy", communicator);
}

ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  return Call<decltype(ncclCommAbort)>("ncclCommAbort", communicator);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* state) {
  return Call<decltype(ncclCommGetAsyncError)>("ncclCommGetAsyncError", communicator, state);
}

ncclResult_t ncclGroupStart() { return Call<decltype(ncclGroupStart)>("ncclGroupStart"); }

ncclResult_t ncclGroupEnd() { return Call<decltype(ncclGroupEnd)>("ncclGroupEnd"); }

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                           ncclComm_t communicator, cudaStream_t stream) {
  return Call<decltype(ncclAllReduce)>("ncclAllReduce", from, to, count, type, operation, communicator, stream);
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t communicator, cudaStream_t stream) {
  return Call<decltype(ncclBroadcast)>("ncclBroadcast", from, to, count, type, root, communicator, stream);
}
