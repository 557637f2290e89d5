#include <algorithm>
#include <dnnl.hpp>
#include <map>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/matmul.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr size_t kMaxPrimitives = 512;
// The f32 copy of a bf16 result that is computed at once takes about this much, so that it stays in cache ...
constexpr int64_t kSlabBytes = int64_t{16} << 20;
// ... unless that is fewer columns than these: a is packed anew for each slab.
constexpr int64_t kMinSlabColumns = 1024;

// How many columns of `c` are computed at once. All slabs but the last are of that width.
int64_t SlabColumns(const MatrixView& c) {
  if (c.dtype == DType::kF32) return c.cols;
  const int64_t most = std::max(kMinSlabColumns, kSlabBytes / (c.rows * SizeOf(DType::kF32)));
  constexpr int64_t kMultiple = 64;
  const int64_t slabs = (c.cols + most - 1) / most;
  return (c.cols + slabs * kMultiple - 1) / (slabs * kMultiple) * kMultiple;
}

Gemm Columns(const Gemm& gemm, int64_t begin, int64_t count) {
  Gemm slab = gemm;
  slab.b = gemm.transpose_b ? gemm.b.Rows(begin, count) : gemm.b.Cols(begin, count);
  slab.c = gemm.c.Cols(begin, count);
  if (!gemm.bias.empty()) slab.bias = gemm.bias.Cols(begin, count);
  return slab;
}

}  // namespace

class OneDnnMatMul::Library {
 public:
  // The primitive of `product`, made where it is not there yet.
  const dnnl::matmul& Primitive(const Product& product) {
    if (const auto found = primitives_.find(product); found != primitives_.end()) return found->second;
    if (primitives_.size() >= kMaxPrimitives) primitives_.clear();
    dnnl::primitive_attr attributes;
    if (product.accumulate) {
      dnnl::post_ops post_ops;
      post_ops.append_sum(1.0f);
      attributes.set_post_ops(post_ops);
    }
    const auto a = Descriptor(product.a), b = Descriptor(product.b), c = Descriptor(product.c);
    const auto matmul =
        product.bias ? dnnl::matmul::desc(a, b, Descriptor(*product.bias), c) : dnnl::matmul::desc(a, b, c);
    const dnnl::matmul::primitive_desc descriptor(matmul, attributes, engine_);
    return primitives_.emplace(product, dnnl::matmul(descriptor)).first->second;
  }

  dnnl::memory Argument(const Operand& operand, const void* data) const {
    return {Descriptor(operand), engine_, const_cast<void*>(data)};  // oneDNN's memory is never const
  }

  void Execute(const dnnl::matmul& primitive, const std::unordered_map<int, dnnl::memory>& arguments) {
    primitive.execute(stream_, arguments);
    stream_.wait();
  }

 private:
  static dnnl::memory::desc Descriptor(const Operand& operand) {
    const auto type = operand.dtype == DType::kBF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
    const dnnl::memory::dims strides =
        operand.transposed ? dnnl::memory::dims{1, operand.stride} : dnnl::memory::dims{operand.stride, 1};
    return {{operand.rows, operand.cols}, type, strides};
  }

  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::map<Product, dnnl::matmul> primitives_;  // at most kMaxPrimitives
};

OneDnnMatMul::OneDnnMatMul() : library_(std::make_unique<Library>()) {}
OneDnnMatMul::~OneDnnMatMul() = default;

bool OneDnnMatMul::Supports(DType dtype) const {
  if (dtype != DType::kF32 && dtype != DType::kBF16) return false;
  const Operand square = {.rows = 16, .cols = 16, .stride = 16, .dtype = dtype, .transposed = false};
  try {
    library_->Primitive({.a = square, .b = square, .c = square, .bias = std::nullopt, .accumulate = false});
  } catch (const dnnl::error&) {
    return false;
  }
  return true;
}

OneDnnMatMul::Operand OneDnnMatMul::Describe(const ConstMatrixView& m, bool transposed) {
  const int64_t stride = m.rows > 1 ? m.row_stride : m.cols;  // a single row's means nothing
  return {.rows = transposed ? m.cols : m.rows,
          .cols = transposed ? m.rows : m.cols,
          .stride = stride,
          .dtype = m.dtype,
          .transposed = transposed};
}

OneDnnMatMul::Product OneDnnMatMul::Describe(const Gemm& gemm) {
  Product product = {.a = Describe(gemm.a, gemm.transpose_a),
                     .b = Describe(gemm.b, gemm.transpose_b),
                     .c = Describe(gemm.c, false),
                     .bias = std::nullopt,
                     .accumulate = gemm.accumulate};
  if (!gemm.bias.empty()) product.bias = Describe(gemm.bias, false);
  return product;
}

OneDnnMatMul::Product OneDnnMatMul::AnySummands(Product product) {
  product.a.cols = product.a.stride = product.b.rows = product.b.stride = DNNL_RUNTIME_DIM_VAL;
  return product;
}

absl::Status OneDnnMatMul::Run(const Gemm& gemm) {
  const int64_t columns = SlabColumns(gemm.c);
  // dnnl.hpp reports failure by exceptions; they end here.
  try {
    for (int64_t begin = 0; begin < gemm.c.cols; begin += columns) {
      RunSlab(Columns(gemm, begin, std::min(columns, gemm.c.cols - begin)));
    }
  } catch (const dnnl::error& error) {
    return Error(
        absl::StatusCode::kInternal, Reason::kDeviceFailed,
        absl::StrCat("oneDNN failed on ", gemm.a.ToString(), " times ", gemm.b.ToString(), ": ", error.what()));
  }
  return absl::OkStatus();
}

void OneDnnMatMul::RunSlab(const Gemm& gemm) {
  const Product product = Describe(gemm);
  std::unordered_map<int, dnnl::memory> arguments = {{DNNL_ARG_SRC, library_->Argument(product.a, gemm.a.data)},
                                                     {DNNL_ARG_WEIGHTS, library_->Argument(product.b, gemm.b.data)},
                                                     {DNNL_ARG_DST, library_->Argument(product.c, gemm.c.data)}};
  if (product.bias) arguments.emplace(DNNL_ARG_BIAS, library_->Argument(*product.bias, gemm.bias.data));
  library_->Execute(library_->Primitive(AnySummands(product)), arguments);
}

}  // namespace shardmlp
