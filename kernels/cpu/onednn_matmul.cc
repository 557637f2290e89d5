#include <dnnl.hpp>
#include <map>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/matmul.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr size_t kMaxPrimitives = 512;
// From this many times as many summands as result columns on, the blocked GEMM's f32 copy of a bf16 result costs less
// than the other kernels' repacking of b.
constexpr int64_t kDeepSum = 4;

bool PrefersAnySize(const Gemm& gemm) {
  if (gemm.c.dtype == DType::kF32) return true;
  const int64_t summands = gemm.transpose_a ? gemm.a.rows : gemm.a.cols;
  return !gemm.transpose_b && summands >= kDeepSum * gemm.c.cols;
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

OneDnnMatMul::Product OneDnnMatMul::AnySize(Product product) {
  const auto forget = [](Operand& operand) { operand.rows = operand.cols = operand.stride = DNNL_RUNTIME_DIM_VAL; };
  forget(product.a);
  forget(product.b);
  forget(product.c);
  if (product.bias) product.bias->cols = product.bias->stride = DNNL_RUNTIME_DIM_VAL;
  return product;
}

absl::Status OneDnnMatMul::Run(const Gemm& gemm) {
  const Product product = Describe(gemm);
  // dnnl.hpp reports failure by exceptions; they end here.
  try {
    const dnnl::matmul& primitive = library_->Primitive(PrefersAnySize(gemm) ? AnySize(product) : product);
    std::unordered_map<int, dnnl::memory> arguments = {{DNNL_ARG_SRC, library_->Argument(product.a, gemm.a.data)},
                                                       {DNNL_ARG_WEIGHTS, library_->Argument(product.b, gemm.b.data)},
                                                       {DNNL_ARG_DST, library_->Argument(product.c, gemm.c.data)}};
    if (product.bias) arguments.emplace(DNNL_ARG_BIAS, library_->Argument(*product.bias, gemm.bias.data));
    library_->Execute(primitive, arguments);
  } catch (const dnnl::error& error) {
    return Error(
        absl::StatusCode::kInternal, Reason::kDeviceFailed,
        absl::StrCat("oneDNN failed on ", gemm.a.ToString(), " times ", gemm.b.ToString(), ": ", error.what()));
  }
  return absl::OkStatus();
}

}  // namespace shardmlp
