#include "client/cli/verify/verify.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/cli/elements.h"
#include "client/cli/verify/layer_weights.h"
#include "client/cli/verify/reference_mlp.h"
#include "kernels/error_bounds.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

// Multiples of 1/64 in [-2, 2]: every dtype has them, so nothing is rounded on the way.
Values RandomValues(int64_t count, std::mt19937& random) {
  std::uniform_int_distribution<int> sixty_fourths(-128, 128);
  Values values(count);
  for (double& value : values) value = sixty_fourths(random) / 64.0;
  return values;
}

double LargestError(const Values& got, const Values& expected) {
  double difference = 0;
  double reference = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::isnan(got[i])) return got[i];
    difference = std::max(difference, std::abs(got[i] - expected[i]));
    reference = std::max(reference, std::abs(expected[i]));
  }
  return reference == 0 ? difference : difference / reference;
}

struct LayerErrors {
  double forward = 0;
  double backward = 0;
};

absl::StatusOr<LayerErrors> CompareLayer(Client& client, Session& session, const ClientLayer& layer, int64_t rows) {
  SHARDMLP_ASSIGN_OR_RETURN(const ReferenceMlp mlp, ReadLayerWeights(client, layer));
  std::mt19937 random(layer.layer);
  const Values x = RandomValues(rows * layer.hidden_size, random);
  const Values dy = RandomValues(rows * layer.output_size, random);

  const DType dtype = client.model().compute_dtype;
  const std::string x_bytes = EncodeElements(x, dtype);
  const std::string dy_bytes = EncodeElements(dy, dtype);
  std::string y_bytes(dy_bytes.size(), 0);
  std::string dx_bytes(x_bytes.size(), 0);
  const ConstMatrixView x_view(x_bytes.data(), rows, layer.hidden_size, dtype);
  const ConstMatrixView dy_view(dy_bytes.data(), rows, layer.output_size, dtype);
  SHARDMLP_ASSIGN_OR_RETURN(
      const Forwarded forwarded,
      session.Forward(layer.layer, x_view, MatrixView(y_bytes.data(), rows, layer.output_size, dtype)));
  SHARDMLP_RETURN_IF_ERROR(session.Backward(layer.layer, forwarded.weights_version, x_view, dy_view,
                                            MatrixView(dx_bytes.data(), rows, layer.hidden_size, dtype),
                                            {.weight_gradient = false}));
  return LayerErrors{.forward = LargestError(DecodeElements(y_bytes, dtype), ReferenceForward(mlp, x)),
                     .backward = LargestError(DecodeElements(dx_bytes, dtype), ReferenceBackward(mlp, x, dy))};
}

}  // namespace

absl::StatusOr<bool> Verify(Client& client, const std::vector<ClientLayer>& layers, int64_t rows, std::ostream& out) {
  SHARDMLP_ASSIGN_OR_RETURN(const std::unique_ptr<Session> session,
                            client.OpenSession({.run_id = "verify", .role = ClientRole::kRead}));
  const DType dtype = client.model().compute_dtype;
  const ErrorBounds bounds = ErrorBoundsOf(dtype);
  out << absl::StreamFormat(
      "%d rows a layer in %s against f64; largest difference over largest reference, at most %.3g of y and %.3g of "
      "dx\n",
      rows, Name(dtype), bounds.y, bounds.dx);
  out << absl::StreamFormat("%6s  %10s  %10s\n", "layer", "y", "dx");
  bool all_within = true;
  for (const ClientLayer& layer : layers) {
    SHARDMLP_ASSIGN_OR_RETURN(const LayerErrors errors, CompareLayer(client, *session, layer, rows));
    const bool within = errors.forward <= bounds.y && errors.backward <= bounds.dx;
    all_within = all_within && within;
    out << absl::StreamFormat("%6d  %10.3g  %10.3g  %s\n", layer.layer, errors.forward, errors.backward,
                              within ? "ok" : "ABOVE");
    out.flush();
  }
  SHARDMLP_RETURN_IF_ERROR(session->Close());
  return all_within;
}

}  // namespace shardmlp
