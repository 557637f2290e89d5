#include "kernels/activation.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/operand.h"

namespace shardmlp {
namespace {

// a = act(g) * u
template <typename T>
struct GatedForward {
  __device__ void operator()(int64_t row, int64_t pack) const {
    const Pack<T> gs = g.Load(row, pack);
    const Pack<T> us = u.Load(row, pack);
    Pack<T> as;
    WithGatedKind(kind, [&](auto tag) {
      for (int64_t i = 0; i < kPackSize; ++i) {
        Store(ActivateGated<decltype(tag)::value>(Load(gs.at[i]), Load(us.at[i]), limit).a, as.at[i]);
      }
    });
    a.Store(as, row, pack);
  }

  ActivationKind kind;
  Arithmetic<T> limit;
  Operand<const T> g, u;  // [R, I] each
  Operand<T> a;           // [R, I]
};

// g = da * dA/dg, u = da * dA/du, da = a
template <typename T>
struct GatedBackward {
  __device__ void operator()(int64_t row, int64_t pack) const {
    Pack<T> gs = g.Load(row, pack);
    Pack<T> us = u.Load(row, pack);
    Pack<T> das = da.Load(row, pack);
    WithGatedKind(kind, [&](auto tag) {
      for (int64_t i = 0; i < kPackSize; ++i) {
        const auto values = ActivateGated<decltype(tag)::value>(Load(gs.at[i]), Load(us.at[i]), limit);
        const auto gradient = Load(das.at[i]);
        Store(gradient * values.da_dg, gs.at[i]);
        Store(gradient * values.da_du, us.at[i]);
        Store(values.a, das.at[i]);
      }
    });
    g.Store(gs, row, pack);
    u.Store(us, row, pack);
    da.Store(das, row, pack);
  }

  ActivationKind kind;
  Arithmetic<T> limit;
  Operand<T> g, u;  // [R, I] each
  Operand<T> da;    // [R, I]
};

// a = act(u)
template <typename T>
struct UngatedForward {
  __device__ void operator()(int64_t row, int64_t pack) const {
    const Pack<T> us = u.Load(row, pack);
    Pack<T> as;
    WithKind(kind, [&](auto tag) {
      for (int64_t i = 0; i < kPackSize; ++i) Store(Activate<decltype(tag)::value>(Load(us.at[i])).value, as.at[i]);
    });
    a.Store(as, row, pack);
  }

  ActivationKind kind;
  Operand<const T> u;  // [R, I]
  Operand<T> a;        // [R, I]
};

// u = da * act'(u), da = a
template <typename T>
struct UngatedBackward {
  __device__ void operator()(int64_t row, int64_t pack) const {
    Pack<T> us = u.Load(row, pack);
    Pack<T> das = da.Load(row, pack);
    WithKind(kind, [&](auto tag) {
      for (int64_t i = 0; i < kPackSize; ++i) {
        const auto act = Activate<decltype(tag)::value>(Load(us.at[i]));
        Store(Load(das.at[i]) * act.slope, us.at[i]);
        Store(act.value, das.at[i]);
      }
    });
    u.Store(us, row, pack);
    da.Store(das, row, pack);
  }

  ActivationKind kind;
  Operand<T> u;   // [R, I]
  Operand<T> da;  // [R, I]
};

}  // namespace

cudaError_t LaunchActivationForward(cudaStream_t stream, const Activation& activation, ConstMatrixView gate_up,
                                    MatrixView a) {
  const int64_t cols = a.cols;
  return WithComputedDType(a.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    if (!activation.gated) {
      return Launch(stream, a.rows, PackCount(cols),
                    UngatedForward<T>{activation.kind, Operand<const T>(gate_up), Operand<T>(a)});
    }
    return Launch(stream, a.rows, PackCount(cols),
                  GatedForward<T>{activation.kind, static_cast<Arithmetic<T>>(activation.limit),
                                  Operand<const T>(gate_up.Cols(0, cols)), Operand<const T>(gate_up.Cols(cols, cols)),
                                  Operand<T>(a)});
  });
}

cudaError_t LaunchActivationBackward(cudaStream_t stream, const Activation& activation, MatrixView gate_up,
                                     MatrixView da) {
  const int64_t cols = da.cols;
  return WithComputedDType(da.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    if (!activation.gated) {
      return Launch(stream, da.rows, PackCount(cols),
                    UngatedBackward<T>{activation.kind, Operand<T>(gate_up), Operand<T>(da)});
    }
    return Launch(
        stream, da.rows, PackCount(cols),
        GatedBackward<T>{activation.kind, static_cast<Arithmetic<T>>(activation.limit),
                         Operand<T>(gate_up.Cols(0, cols)), Operand<T>(gate_up.Cols(cols, cols)), Operand<T>(da)});
  });
}

}  // namespace shardmlp
