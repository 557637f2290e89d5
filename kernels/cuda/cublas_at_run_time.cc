// cuBLAS's functions, each of which opens the library when it is called and is then the library's own. Linked, it would
// also take 92 KiB of thread-local memory of every thread's stack, which is all that other libraries give to a thread.
#include <cublas_v2.h>

#include <string>

#include "kernels/cuda/run_time_library.h"

namespace {

const shardmlp::RunTimeLibrary& Library() {
  static const shardmlp::RunTimeLibrary library("libcublas.so." + std::to_string(CUBLAS_VER_MAJOR));
  return library;
}

// Function: the type of the library's function `name`.
template <typename Function, typename... Args>
cublasStatus_t Call(const char* name, Args... args) {
  return Library().Call<Function>(name, CUBLAS_STATUS_NOT_INITIALIZED, args...);
}

}  // namespace

const char* cublasGetStatusString(cublasStatus_t status) {
  if (const char* const missing = Library().missing()) return missing;
  return Library().Call<decltype(cublasGetStatusString)>("cublasGetStatusString", "an unknown status", status);
}

cublasStatus_t cublasCreate(cublasHandle_t* handle) { return Call<decltype(cublasCreate)>("cublasCreate_v2", handle); }

cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  return Call<decltype(cublasDestroy)>("cublasDestroy_v2", handle);
}

cublasStatus_t cublasGetVersion(cublasHandle_t handle, int* version) {
  return Call<decltype(cublasGetVersion)>("cublasGetVersion_v2", handle, version);
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  return Call<decltype(cublasSetStream)>("cublasSetStream_v2", handle, stream);
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  return Call<decltype(cublasSetMathMode)>("cublasSetMathMode", handle, mode);
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void* workspace, size_t bytes) {
  return Call<decltype(cublasSetWorkspace)>("cublasSetWorkspace_v2", handle, workspace, bytes);
}

cublasStatus_t cublasGemmEx_64(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int64_t m,
                               int64_t n, int64_t k, const void* alpha, const void* a, cudaDataType a_type, int64_t lda,
                               const void* b, cudaDataType b_type, int64_t ldb, const void* beta, void* c,
                               cudaDataType c_type, int64_t ldc, cublasComputeType_t compute,
                               cublasGemmAlgo_t algorithm) {
  return Call<decltype(cublasGemmEx_64)>("cublasGemmEx_64", handle, op_a, op_b, m, n, k, alpha, a, a_type, lda, b,
                                         b_type, ldb, beta, c, c_type, ldc, compute, algorithm);
}
