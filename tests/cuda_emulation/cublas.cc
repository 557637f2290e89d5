// cuBLAS over the emulated devices: products by plain loops.
#include <cublas_v2.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "kernels/number.h"
#include "tests/cuda_emulation/machine.h"

using shardmlp::BFloat16;
using shardmlp::Float16;
using shardmlp::emulation::Machine;

struct cublasContext {
  cudaStream_t stream = nullptr;
};

namespace {

// A column-major matrix as it lies in memory.
struct Operand {
  void* data;
  cudaDataType type;
  int64_t rows, cols, ld;
};

struct Product {
  cublasOperation_t op_a, op_b;
  int64_t k;
  double alpha, beta;
  Operand a, b, c;
  cublasComputeType_t compute;
};

size_t SizeOf(cudaDataType type) { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }

bool Usable(cudaStream_t stream, const Operand& m, const char* name) {
  return Machine::Get().Usable(stream, m.data, static_cast<size_t>(m.ld) * SizeOf(m.type),
                               static_cast<size_t>(m.rows) * SizeOf(m.type), static_cast<size_t>(m.cols),
                               std::string("cublasGemmEx's ") + name);
}

bool AllUsable(cudaStream_t stream, const Product& p) {
  return Usable(stream, p.a, "A") && Usable(stream, p.b, "B") && Usable(stream, p.c, "C");
}

template <typename F>
void WithType(cudaDataType type, const F& f) {
  switch (type) {
    case CUDA_R_32F: return f(shardmlp::TypeTag<float>());
    case CUDA_R_16BF: return f(shardmlp::TypeTag<BFloat16>());
    case CUDA_R_16F: return f(shardmlp::TypeTag<Float16>());
    case CUDA_R_64F: break;
  }
  f(shardmlp::TypeTag<double>());
}

// To the 10 bits of a TF32 mantissa, to nearest.
float ToTf32(float x) { return std::bit_cast<float>((std::bit_cast<uint32_t>(x) + 0x1000u) & 0xffffe000u); }

// op(m), of which element (i, j) is at [j * rows + i].
template <typename Sum>
std::vector<Sum> Read(const Operand& m, cublasOperation_t op, bool tf32) {
  std::vector<Sum> values(static_cast<size_t>(m.rows * m.cols));
  const int64_t op_rows = op == CUBLAS_OP_N ? m.rows : m.cols;
  WithType(m.type, [&](auto tag) {
    const auto* const data = static_cast<const typename decltype(tag)::Type*>(m.data);
    for (int64_t j = 0; j < m.cols; ++j) {
      for (int64_t i = 0; i < m.rows; ++i) {
        Sum value = static_cast<Sum>(shardmlp::Load(data[j * m.ld + i]));
        if (tf32) value = ToTf32(static_cast<float>(value));
        values[static_cast<size_t>(op == CUBLAS_OP_N ? j * op_rows + i : i * op_rows + j)] = value;
      }
    }
  });
  return values;
}

template <typename Sum>
void Multiply(const Product& p) {
  const bool tf32 = p.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  const std::vector<Sum> a = Read<Sum>(p.a, p.op_a, tf32);
  const std::vector<Sum> b = Read<Sum>(p.b, p.op_b, tf32);
  std::vector<Sum> sums(static_cast<size_t>(p.c.rows));
  for (int64_t j = 0; j < p.c.cols; ++j) {
    std::fill(sums.begin(), sums.end(), Sum(0));
    for (int64_t l = 0; l < p.k; ++l) {
      const Sum factor = b[static_cast<size_t>(j * p.k + l)];
      const Sum* const column = a.data() + l * p.c.rows;
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += column[i] * factor;
    }
    WithType(p.c.type, [&](auto tag) {
      auto* const c = static_cast<typename decltype(tag)::Type*>(p.c.data) + j * p.c.ld;
      for (size_t i = 0; i < sums.size(); ++i) {
        const Sum before = p.beta == 0 ? Sum(0) : static_cast<Sum>(p.beta) * static_cast<Sum>(shardmlp::Load(c[i]));
        shardmlp::Store(static_cast<Sum>(p.alpha) * sums[i] + before, c[i]);
      }
    });
  }
}

// The combinations that shardmlp may ask for, as cuBLAS's table has them.
bool Supported(const Product& p) {
  if (p.a.type != p.b.type) return false;
  if (p.compute == CUBLAS_COMPUTE_64F) return p.a.type == CUDA_R_64F && p.c.type == CUDA_R_64F;
  if (p.a.type == CUDA_R_64F) return false;
  return p.c.type == p.a.type || p.c.type == CUDA_R_32F;
}

bool Refuse(Machine& machine, const std::string& fault) {
  machine.Report(fault);
  return false;
}

bool LeadingDimensionsFit(Machine& machine, const Product& p) {
  for (const Operand* m : {&p.a, &p.b, &p.c}) {
    if (m->rows < 0 || m->cols < 0) return Refuse(machine, "cublasGemmEx: a negative size");
    if (m->ld < std::max<int64_t>(m->rows, 1)) {
      return Refuse(machine, "cublasGemmEx: a leading dimension of " + std::to_string(m->ld) + " for a matrix of " +
                                 std::to_string(m->rows) + " rows");
    }
  }
  return true;
}

double Scalar(const void* value, cublasComputeType_t compute) {
  return compute == CUBLAS_COMPUTE_64F ? *static_cast<const double*>(value) : *static_cast<const float*>(value);
}

}  // namespace

const char* cublasGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
  }
  return "?";
}

cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  Machine& machine = Machine::Get();
  const std::lock_guard lock(machine.mutex);
  if (machine.Enter() != cudaSuccess) return CUBLAS_STATUS_NOT_INITIALIZED;
  *handle = new cublasContext();
  ++machine.object_count();
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  Machine& machine = Machine::Get();
  const std::lock_guard lock(machine.mutex);
  delete handle;
  --machine.object_count();
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetVersion(cublasHandle_t /*handle*/, int* version) {
  *version = 0;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t /*handle*/, cublasMath_t /*mode*/) { return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void* workspace, size_t bytes) {
  Machine& machine = Machine::Get();
  const std::lock_guard lock(machine.mutex);
  return machine.Usable(handle->stream, workspace, bytes, "cublasSetWorkspace") ? CUBLAS_STATUS_SUCCESS
                                                                                : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasGemmEx_64(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int64_t m,
                               int64_t n, int64_t k, const void* alpha, const void* a, cudaDataType a_type, int64_t lda,
                               const void* b, cudaDataType b_type, int64_t ldb, const void* beta, void* c,
                               cudaDataType c_type, int64_t ldc, cublasComputeType_t compute,
                               cublasGemmAlgo_t /*algorithm*/) {
  Machine& machine = Machine::Get();
  const std::lock_guard lock(machine.mutex);
  if (machine.Enter() != cudaSuccess) return CUBLAS_STATUS_EXECUTION_FAILED;
  const auto operand = [](const void* data, cudaDataType type, cublasOperation_t op, int64_t rows, int64_t cols,
                          int64_t ld) {
    if (op == CUBLAS_OP_T) std::swap(rows, cols);
    return Operand{const_cast<void*>(data), type, rows, cols, ld};
  };
  const Product p{op_a,
                  op_b,
                  k,
                  Scalar(alpha, compute),
                  Scalar(beta, compute),
                  operand(a, a_type, op_a, m, k, lda),
                  operand(b, b_type, op_b, k, n, ldb),
                  operand(c, c_type, CUBLAS_OP_N, m, n, ldc),
                  compute};
  if (!Supported(p)) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (!LeadingDimensionsFit(machine, p)) return CUBLAS_STATUS_INVALID_VALUE;
  cudaStream_t const stream = handle->stream;
  if (!AllUsable(stream, p)) machine.Break(cudaErrorIllegalAddress, "cublasGemmEx failed");
  machine.Enqueue(stream, {[p, stream](bool /*backwards*/) {
                    if (!AllUsable(stream, p)) {
                      return Machine::Get().Break(cudaErrorIllegalAddress, "cublasGemmEx failed");
                    }
                    p.compute == CUBLAS_COMPUTE_64F ? Multiply<double>(p) : Multiply<float>(p);
                  }});
  return CUBLAS_STATUS_SUCCESS;
}
