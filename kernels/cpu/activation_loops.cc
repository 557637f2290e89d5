#include "kernels/activation.h"
#include "kernels/cpu/loops.h"
#include "kernels/number.h"

namespace shardmlp {
namespace {

// a = act(g) * u
struct GatedForward {
  template <ActivationKind kind, typename T>
  static void Row(KindTag<kind>, const T* g, const T* u, T* a, int64_t count, Arithmetic<T> limit) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) Store(ActivateGated<kind>(Load(g[i]), Load(u[i]), limit).a, a[i]);
  }
};

// g = da * dA/dg, u = da * dA/du, da = a
struct GatedBackward {
  template <ActivationKind kind, typename T>
  static void Row(KindTag<kind>, T* g, T* u, T* da, int64_t count, Arithmetic<T> limit) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const auto values = ActivateGated<kind>(Load(g[i]), Load(u[i]), limit);
      const auto gradient = Load(da[i]);
      Store(gradient * values.da_dg, g[i]);
      Store(gradient * values.da_du, u[i]);
      Store(values.a, da[i]);
    }
  }
};

// a = act(u)
struct UngatedForward {
  template <ActivationKind kind, typename T>
  static void Row(KindTag<kind>, const T* u, T* a, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) Store(Activate<kind>(Load(u[i])).value, a[i]);
  }
};

// u = da * act'(u), da = a
struct UngatedBackward {
  template <ActivationKind kind, typename T>
  static void Row(KindTag<kind>, T* u, T* da, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const auto act = Activate<kind>(Load(u[i]));
      Store(Load(da[i]) * act.slope, u[i]);
      Store(act.value, da[i]);
    }
  }
};

// Runs Gated::Row or Ungated::Row on each row of `gate_up` and `inner`.
template <typename Gated, typename Ungated, typename View>
void ForEachRow(const Team& team, const Activation& activation, View gate_up, MatrixView inner) {
  const int64_t cols = inner.cols;
  team.Split(inner.rows, gate_up.cols, [&](int64_t begin, int64_t end) {
    WithComputedDType(inner.dtype, [&](auto type) {
      using T = typename decltype(type)::Type;
      const auto limit = static_cast<Arithmetic<T>>(activation.limit);
      const auto gated = [&](auto kind) {
        for (int64_t row = begin; row < end; ++row) {
          auto* g = gate_up.Rows(row, 1).template as<T>();
          Gated::Row(kind, g, g + cols, inner.Rows(row, 1).template as<T>(), cols, limit);
        }
      };
      const auto ungated = [&](auto kind) {
        for (int64_t row = begin; row < end; ++row) {
          Ungated::Row(kind, gate_up.Rows(row, 1).template as<T>(), inner.Rows(row, 1).template as<T>(), cols);
        }
      };
      activation.gated ? WithGatedKind(activation.kind, gated) : WithKind(activation.kind, ungated);
    });
  });
}

}  // namespace

void ActivationForward(const Team& team, const Activation& activation, ConstMatrixView gate_up, MatrixView a) {
  ForEachRow<GatedForward, UngatedForward>(team, activation, gate_up, a);
}

void ActivationBackward(const Team& team, const Activation& activation, MatrixView gate_up, MatrixView da) {
  ForEachRow<GatedBackward, UngatedBackward>(team, activation, gate_up, da);
}

}  // namespace shardmlp
