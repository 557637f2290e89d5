// One training step of one layer: example_train_step HOST:PORT
#include <cstdio>
#include <string>
#include <vector>

#include "client/cpp/client.h"

namespace {

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  using shardmlp::DType, shardmlp::MatrixView;
  const auto client = shardmlp::Client::Connect(argc > 1 ? argv[1] : "127.0.0.1:50051");
  if (!client.ok()) return Fail(client.status());
  const shardmlp::ServedModel& model = (*client)->model();
  const shardmlp::ClientLayer& layer = model.layers[0];
  const auto session = (*client)->OpenSession({.run_id = "example"});
  if (!session.ok()) return Fail(session.status());

  // Your own memory, any of the four dtypes: views of it are sent, nothing is copied.
  const int64_t tokens = 512;
  std::vector<float> x_values(tokens * layer.hidden_size, 0.5f);
  std::vector<float> dy_values(tokens * layer.output_size, 0.01f);
  std::vector<float> y_values(tokens * layer.output_size);
  std::vector<float> dx_values(tokens * layer.hidden_size);
  const MatrixView x(x_values.data(), tokens, layer.hidden_size, DType::kF32);
  const MatrixView dy(dy_values.data(), tokens, layer.output_size, DType::kF32);
  const MatrixView y(y_values.data(), tokens, layer.output_size, DType::kF32);
  const MatrixView dx(dx_values.data(), tokens, layer.hidden_size, DType::kF32);

  const auto forwarded = (*session)->Forward(layer.layer, x, y);
  if (!forwarded.ok()) return Fail(forwarded.status());
  const absl::Status backward = (*session)->Backward(layer.layer, forwarded->weights_version, x, dy, dx);
  if (!backward.ok()) return Fail(backward);
  const auto sealed = (*session)->SealStep();
  if (!sealed.ok()) return Fail(sealed.status());

  shardmlp::CommitOptions options;
  options.groups = {{{}, shardmlp::AdamW{.learning_rate = 1e-5}}};
  for (const shardmlp::ClientTensor& tensor : model.tensors) options.groups[0].tensors.push_back(tensor.name);
  const auto position = (*session)->CommitStep(options);
  if (!position.ok()) return Fail(position.status());
  std::printf("layer %d: y[0] = %g, dx[0] = %g; the server is at step %lld\n", layer.layer, y_values[0], dx_values[0],
              static_cast<long long>(position->step));
  return 0;
}
