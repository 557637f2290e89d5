#include <dnnl.hpp>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/matmul.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

constexpr size_t kMaxPrepared = 512;

dnnl::memory::data_type TypeOf(DType dtype) {
  return dtype == DType::kBF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

// Of a [rows, cols] matrix that is stored so, or as its transpose.
dnnl::memory::desc Describe(int64_t rows, int64_t cols, int64_t stride, DType dtype, bool transposed) {
  const dnnl::memory::dims strides = transposed ? dnnl::memory::dims{1, stride} : dnnl::memory::dims{stride, 1};
  return {{rows, cols}, TypeOf(dtype), strides};
}

// A single row may say any stride; one shape is to have one key.
int64_t StrideOf(const ConstMatrixView& m) { return m.rows > 1 ? m.row_stride : m.cols; }

}  // namespace

class OneDnnMatMul::Library {
 public:
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
};

struct OneDnnMatMul::Prepared {
  dnnl::matmul primitive;
  std::unordered_map<int, dnnl::memory> arguments;
};

OneDnnMatMul::OneDnnMatMul() : library_(std::make_unique<Library>()) {}
OneDnnMatMul::~OneDnnMatMul() = default;

bool OneDnnMatMul::Supports(DType dtype) const {
  if (dtype == DType::kF32) return true;
  if (dtype != DType::kBF16) return false;
  const dnnl::memory::desc square = Describe(16, 16, 16, dtype, false);
  dnnl_matmul_desc_t matmul;
  dnnl_primitive_desc_t primitive = nullptr;
  if (dnnl_matmul_desc_init(&matmul, &square.data, &square.data, nullptr, &square.data) != dnnl_success) return false;
  const dnnl_status_t status =
      dnnl_primitive_desc_create(&primitive, &matmul, nullptr, library_->engine.get(), nullptr);
  if (status == dnnl_success) dnnl_primitive_desc_destroy(primitive);
  return status == dnnl_success;
}

OneDnnMatMul::Shape OneDnnMatMul::ShapeOf(const Gemm& gemm) {
  const bool bias = !gemm.bias.empty();
  return {.m = gemm.c.rows,
          .n = gemm.c.cols,
          .k = gemm.transpose_a ? gemm.a.rows : gemm.a.cols,
          .a_stride = StrideOf(gemm.a),
          .b_stride = StrideOf(gemm.b),
          .c_stride = StrideOf(gemm.c),
          .a_dtype = gemm.a.dtype,
          .c_dtype = gemm.c.dtype,
          .bias_dtype = bias ? gemm.bias.dtype : gemm.c.dtype,
          .transpose_a = gemm.transpose_a,
          .transpose_b = gemm.transpose_b,
          .accumulate = gemm.accumulate,
          .bias = bias};
}

OneDnnMatMul::Prepared& OneDnnMatMul::Prepare(const Shape& shape) {
  if (const auto found = prepared_.find(shape); found != prepared_.end()) return *found->second;
  if (prepared_.size() >= kMaxPrepared) prepared_.clear();
  const auto a = Describe(shape.m, shape.k, shape.a_stride, shape.a_dtype, shape.transpose_a);
  const auto b = Describe(shape.k, shape.n, shape.b_stride, shape.a_dtype, shape.transpose_b);
  const auto c = Describe(shape.m, shape.n, shape.c_stride, shape.c_dtype, false);
  const auto bias = Describe(1, shape.n, shape.n, shape.bias_dtype, false);
  dnnl::primitive_attr attributes;
  if (shape.accumulate) {
    dnnl::post_ops post_ops;
    post_ops.append_sum(1.0f);
    attributes.set_post_ops(post_ops);
  }
  const auto matmul = shape.bias ? dnnl::matmul::desc(a, b, bias, c) : dnnl::matmul::desc(a, b, c);
  const dnnl::engine& engine = library_->engine;
  auto prepared = std::make_unique<Prepared>();
  prepared->primitive = dnnl::matmul(dnnl::matmul::primitive_desc(matmul, attributes, engine));
  prepared->arguments = {{DNNL_ARG_SRC, {a, engine, nullptr}},
                         {DNNL_ARG_WEIGHTS, {b, engine, nullptr}},
                         {DNNL_ARG_DST, {c, engine, nullptr}}};
  if (shape.bias) prepared->arguments.emplace(DNNL_ARG_BIAS, dnnl::memory(bias, engine, nullptr));
  return *prepared_.emplace(shape, std::move(prepared)).first->second;
}

absl::Status OneDnnMatMul::Run(const Gemm& gemm) {
  // dnnl.hpp reports failure by exceptions; they end here.
  try {
    Prepared& prepared = Prepare(ShapeOf(gemm));
    const auto set = [&](int argument, const void* data) {
      prepared.arguments.at(argument).set_data_handle(const_cast<void*>(data));  // oneDNN's memory is never const
    };
    set(DNNL_ARG_SRC, gemm.a.data);
    set(DNNL_ARG_WEIGHTS, gemm.b.data);
    set(DNNL_ARG_DST, gemm.c.data);
    if (!gemm.bias.empty()) set(DNNL_ARG_BIAS, gemm.bias.data);
    prepared.primitive.execute(library_->stream, prepared.arguments);
    library_->stream.wait();
  } catch (const dnnl::error& error) {
    return Error(
        absl::StatusCode::kInternal, Reason::kDeviceFailed,
        absl::StrCat("oneDNN failed on ", gemm.a.ToString(), " times ", gemm.b.ToString(), ": ", error.what()));
  }
  return absl::OkStatus();
}

}  // namespace shardmlp
