// shardmlp._native: the C++ client as it is, for the Python package alone. Matrices come as addresses; whoever passes
// one keeps its memory alive until the call returns. Everything that waits does so without the GIL, and ends
// where a signal's handler raises.
#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <xxhash.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "client/python/native/fork_safe.h"
#include "client/python/native/status.h"
#include "kernels/status.h"

namespace shardmlp::python {
namespace {

namespace py = pybind11;

MatrixView MakeMatrix(uintptr_t data, int64_t rows, int64_t cols, int64_t row_stride, DType dtype) {
  return {reinterpret_cast<void*>(data), rows, cols, row_stride, dtype};
}

void DefineMatrix(py::module_& module) {
  py::enum_<DType>(module, "DType")
      .value("f32", DType::kF32)
      .value("bf16", DType::kBF16)
      .value("f16", DType::kF16)
      .value("f64", DType::kF64);
  py::class_<MatrixView>(module, "Matrix")
      .def(py::init())
      .def(py::init(&MakeMatrix), py::arg("data"), py::arg("rows"), py::arg("cols"), py::arg("row_stride"),
           py::arg("dtype"));
}

void DefineModel(py::module_& module) {
  py::class_<ClientPosition>(module, "Position")
      .def_readonly("step", &ClientPosition::step)
      .def_readonly("attempt", &ClientPosition::attempt)
      .def_readonly("weights_version", &ClientPosition::weights_version);
  py::class_<ClientLayer>(module, "Layer")
      .def_readonly("layer", &ClientLayer::layer)
      .def_readonly("module", &ClientLayer::module)
      .def_readonly("hidden_size", &ClientLayer::hidden_size)
      .def_readonly("intermediate_size", &ClientLayer::intermediate_size)
      .def_readonly("output_size", &ClientLayer::output_size)
      .def_readonly("activation", &ClientLayer::activation)
      .def_readonly("gated", &ClientLayer::gated);
  py::class_<ClientTensor>(module, "Tensor")
      .def_readonly("name", &ClientTensor::name)
      .def_readonly("layer", &ClientTensor::layer)
      .def_readonly("shape", &ClientTensor::shape)
      .def_readonly("dtype", &ClientTensor::dtype);
  py::class_<ClientMemoryPlan>(module, "MemoryPlan")
      .def_readonly("weights_bytes", &ClientMemoryPlan::weights_bytes)
      .def_readonly("gradients_bytes", &ClientMemoryPlan::gradients_bytes)
      .def_readonly("master_weights_bytes", &ClientMemoryPlan::master_weights_bytes)
      .def_readonly("optimizer_bytes", &ClientMemoryPlan::optimizer_bytes)
      .def_readonly("workspace_bytes", &ClientMemoryPlan::workspace_bytes)
      .def_readonly("staging_bytes", &ClientMemoryPlan::staging_bytes)
      .def_readonly("ledger_bytes", &ClientMemoryPlan::ledger_bytes)
      .def_readonly("stash_bytes", &ClientMemoryPlan::stash_bytes);
  py::class_<ClientReplica>(module, "Replica")
      .def_readonly("rank", &ClientReplica::rank)
      .def_readonly("replica_count", &ClientReplica::replica_count)
      .def_readonly("member_count", &ClientReplica::member_count)
      .def_readonly("generation", &ClientReplica::generation)
      .def_readonly("member_ranks", &ClientReplica::member_ranks);
  py::class_<ServedModel>(module, "ServedModel")
      .def_readonly("model_type", &ServedModel::model_type)
      .def_readonly("compute_dtype", &ServedModel::compute_dtype)
      .def_readonly("frozen", &ServedModel::frozen)
      .def_readonly("layers", &ServedModel::layers)
      .def_readonly("tensors", &ServedModel::tensors)
      .def_readonly("position", &ServedModel::position)
      .def_readonly("memory", &ServedModel::memory)
      .def_readonly("replica", &ServedModel::replica);
  py::class_<ClientCheckpoint>(module, "Checkpoint")
      .def_readonly("name", &ClientCheckpoint::name)
      .def_readonly("step", &ClientCheckpoint::step)
      .def_readonly("byte_count", &ClientCheckpoint::byte_count);
}

void DefineStep(py::module_& module) {
  py::class_<AdamW>(module, "AdamW")
      .def(py::init([](double learning_rate, double beta1, double beta2, double epsilon, double weight_decay) {
             return AdamW{learning_rate, beta1, beta2, epsilon, weight_decay};
           }),
           py::kw_only(), py::arg("learning_rate"), py::arg("beta1"), py::arg("beta2"), py::arg("epsilon"),
           py::arg("weight_decay"));
  py::class_<Sgd>(module, "Sgd")
      .def(py::init([](double learning_rate, double momentum, double dampening, double weight_decay, bool nesterov) {
             return Sgd{learning_rate, momentum, dampening, weight_decay, nesterov};
           }),
           py::kw_only(), py::arg("learning_rate"), py::arg("momentum"), py::arg("dampening"), py::arg("weight_decay"),
           py::arg("nesterov"));
  py::class_<KeepFrozen>(module, "KeepFrozen").def(py::init());
  py::class_<ClientParameterGroup>(module, "ParameterGroup")
      .def(py::init([](std::vector<std::string> tensors, Hyperparameters hyperparameters) {
             return ClientParameterGroup{std::move(tensors), hyperparameters};
           }),
           py::arg("tensors"), py::arg("hyperparameters"))
      .def(py::self == py::self);
  py::class_<SealedStep>(module, "SealedStep")
      .def_readonly("tensor_sums_of_squares", &SealedStep::tensor_sums_of_squares)
      .def_readonly("finite", &SealedStep::finite)
      .def_readonly("non_finite_origin", &SealedStep::non_finite_origin);
}

// `callback` (a row's index -> None), or nothing for None. What it raises is left to the thread's WithoutGil. Refers to
// `callback`, which must outlive it.
std::function<absl::Status(int64_t)> Hook(const py::object& callback) {
  if (callback.is_none()) return {};
  return [&callback](int64_t row_end) -> absl::Status {
    const py::gil_scoped_acquire acquire;
    try {
      callback(row_end);
    } catch (py::error_already_set& error) {
      error.restore();
      return Error(absl::StatusCode::kCancelled, Reason::kCancelled, "a copy of rows failed");
    }
    return absl::OkStatus();
  };
}

void DefineSession(py::module_& module) {
  py::enum_<ClientKeepInput>(module, "KeepInput")
      .value("if_room", ClientKeepInput::kIfRoom)
      .value("pinned", ClientKeepInput::kPinned);
  py::class_<Session, ForkSafePtr<Session>>(module, "Session")
      .def_property_readonly("position", &Session::position)
      .def_property_readonly("run_under_way", &Session::run_under_way)
      .def_property_readonly("pending_row_count", &Session::pending_row_count)
      .def(
          "forward",
          [](Session& session, int layer, const MatrixView& x, const MatrixView& y,
             std::optional<ClientKeepInput> keep_input, const py::object& await_inputs,
             const py::object& output_arrived) {
            const ForwardOptions options{keep_input, {Hook(await_inputs), Hook(output_arrived)}};
            const Forwarded forwarded = WithoutGil([&] { return session.Forward(layer, x, y, options); });
            return std::pair(forwarded.weights_version, forwarded.ticket);
          },
          py::arg("layer"), py::arg("x"), py::arg("y"), py::arg("keep_input"), py::arg("await_inputs"),
          py::arg("output_arrived"))
      .def(
          "backward",
          [](Session& session, int layer, int64_t weights_version, const MatrixView& x, const MatrixView& dy,
             const MatrixView& dx, bool weight_gradient, int64_t ticket, const py::object& await_inputs,
             const py::object& output_arrived) {
            const BackwardOptions options{weight_gradient, ticket, {Hook(await_inputs), Hook(output_arrived)}};
            WithoutGil([&] { return session.Backward(layer, weights_version, x, dy, dx, options); });
          },
          py::arg("layer"), py::arg("weights_version"), py::arg("x"), py::arg("dy"), py::arg("dx"),
          py::arg("weight_gradient"), py::arg("ticket"), py::arg("await_inputs"), py::arg("output_arrived"))
      .def("release", &Session::Release, py::arg("ticket"))
      .def("seal_step", [](Session& session) { return WithoutGil([&] { return session.SealStep(); }); })
      .def(
          "commit_step",
          [](Session& session, std::vector<ClientParameterGroup> groups, double gradient_scale, bool fresh_optimizer) {
            const CommitOptions options{std::move(groups), gradient_scale, fresh_optimizer};
            return WithoutGil([&] { return session.CommitStep(options); });
          },
          py::arg("groups"), py::arg("gradient_scale"), py::arg("fresh_optimizer"))
      .def(
          "discard_step",
          [](Session& session, const std::string& reason, double within_seconds) {
            return WithoutGil([&] { return session.DiscardStep(reason, absl::Seconds(within_seconds)); });
          },
          py::arg("reason"), py::arg("within_seconds"))
      .def("resync", [](Session& session) { return WithoutGil([&] { return session.Resync(); }); })
      .def("take_up", &Session::TakeUp, py::arg("lost"))
      .def("close", [](Session& session) { WithoutGil([&] { return session.Close(); }); });
}

// `callback` (-> bool). What it raises is left to the thread's WithoutGil, and means yes.
std::function<bool()> Question(const py::object& callback) {
  const auto kept = std::shared_ptr<py::object>(new py::object(callback), [](py::object* object) {
    const py::gil_scoped_acquire acquire;
    delete object;
  });
  return [kept] {
    const py::gil_scoped_acquire acquire;
    try {
      return (*kept)().cast<bool>();
    } catch (py::error_already_set& error) {
      error.restore();
      return true;
    }
  };
}

ForkSafePtr<Client> Connect(const std::string& target, int connections, double connect_timeout_seconds,
                            double stall_timeout_seconds, double seal_timeout_seconds, double retry_budget_seconds,
                            const ClientCredentials& credentials, const py::object& interrupted,
                            const py::object& abandoned) {
  ClientOptions options;
  if (!abandoned.is_none()) options.abandoned = Question(abandoned);
  options.credentials = credentials;
  options.connections = connections;
  options.connect_timeout = absl::Seconds(connect_timeout_seconds);
  options.stall_timeout = absl::Seconds(stall_timeout_seconds);
  options.seal_timeout = absl::Seconds(seal_timeout_seconds);
  options.retry.budget = absl::Seconds(retry_budget_seconds);
  options.interrupted = [asked = Question(interrupted)] { return RaisedBySignal() || asked(); };
  return MakeForkSafe(WithoutGil([&] { return Client::Connect(target, options); }));
}

ForkSafePtr<Session> OpenSession(Client& client, const std::string& run_id, bool train, int trainer_count,
                                 int trainer_rank) {
  const SessionOptions options{run_id, train ? ClientRole::kTrain : ClientRole::kRead, trainer_count, trainer_rank};
  return MakeForkSafe(WithoutGil([&] { return client.OpenSession(options); }));
}

void DefineClient(py::module_& module) {
  py::class_<ClientCredentials>(module, "Credentials")
      .def(py::init([](std::string ca, std::string cert, std::string key, std::string server_name, std::string token) {
             return ClientCredentials{std::move(ca), std::move(cert), std::move(key), std::move(server_name),
                                      std::move(token)};
           }),
           py::kw_only(), py::arg("ca_file"), py::arg("cert_file"), py::arg("key_file"), py::arg("server_name"),
           py::arg("token_file"));
  py::class_<Client, ForkSafePtr<Client>>(module, "Client")
      .def_static("connect", &Connect, py::arg("target"), py::kw_only(), py::arg("connections"),
                  py::arg("connect_timeout_seconds"), py::arg("stall_timeout_seconds"), py::arg("seal_timeout_seconds"),
                  py::arg("retry_budget_seconds"), py::arg("credentials"), py::arg("interrupted"), py::arg("abandoned"))
      .def_property_readonly("model", [](const Client& client) { return client.model(); })
      .def("open_session", &OpenSession, py::keep_alive<0, 1>(), py::kw_only(), py::arg("run_id"), py::arg("train"),
           py::arg("trainer_count"), py::arg("trainer_rank"))
      .def(
          "read_tensor",
          [](Client& client, const std::string& name, uintptr_t data, int64_t byte_count) {
            const absl::Span<char> to(reinterpret_cast<char*>(data), byte_count);
            return WithoutGil([&] { return client.ReadTensor(name, to); });
          },
          py::arg("name"), py::arg("data"), py::arg("byte_count"))
      .def("checksums",
           [](Client& client) {
             const ServedModel model = WithoutGil([&] { return client.GetModel(/*checksums=*/true); });
             std::map<std::string, uint64_t> checksums;
             for (const ClientTensor& tensor : model.tensors) checksums[tensor.name] = tensor.checksum;
             return checksums;
           })
      .def(
          "save_checkpoint",
          [](Client& client, const std::string& name) {
            return WithoutGil([&] { return client.SaveCheckpoint(name); });
          },
          py::arg("name"))
      .def(
          "restore_checkpoint",
          [](Client& client, const std::string& name) {
            return WithoutGil([&] { return client.RestoreCheckpoint(name); });
          },
          py::arg("name"))
      .def(
          "delete_checkpoint",
          [](Client& client, const std::string& name) {
            return WithoutGil([&] { return client.DeleteCheckpoint(name); });
          },
          py::arg("name"))
      .def("list_checkpoints", [](Client& client) { return WithoutGil([&] { return client.ListCheckpoints(); }); });
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  DefineMatrix(module);
  DefineModel(module);
  DefineStep(module);
  DefineSession(module);
  DefineClient(module);
  module.def(
      "xxh3_64",
      [](uintptr_t data, int64_t byte_count) {
        const py::gil_scoped_release without_gil;
        return XXH3_64bits(reinterpret_cast<const void*>(data), byte_count);
      },
      py::arg("data"), py::arg("byte_count"));
}

}  // namespace shardmlp::python
