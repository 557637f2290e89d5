"""Each rule sees what it is there for. A tree with a violation is planted, and the rule names it."""

import pytest
from files import conditionals, long_files
from includes import wrong_includes
from pages import dead_links, missing_paths
from proto_comments import uncommented_proto_elements


@pytest.fixture
def plant(tmp_path):
    """plant(path, text) -> the root of the tree that now has the file."""

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    "path, include",
    [
        ("kernels/mlp.cc", '"server/engine/engine.h"'),
        ("kernels/mlp.cc", '"server/metrics.h"'),
        ("server/sync/local_group.cc", '"server/model/model_spec.h"'),
        ("server/sync/local_group.cc", '"server/metrics.h"'),
        ("server/sync/local_group.cc", '"server/log.h"'),
        ("server/sync/gloo_group.cc", '"shardmlp/v1/rendezvous.pb.h"'),
        ("server/sync/rendezvous/member.cc", '"server/log.h"'),
        ("server/model/checkpoint.cc", '"server/engine/engine.h"'),
        ("server/engine/step.cc", '"server/rpc/convert.h"'),
        ("server/engine/step.cc", '"proto/wire.h"'),
        ("server/engine/step.cc", '"shardmlp/v1/compute.pb.h"'),
        ("server/engine/step.cc", '"other/v1/other.pb.h"'),
        ("server/engine/step.cc", "<google/protobuf/message.h>"),
        ("server/engine/step.cc", "<grpcpp/grpcpp.h>"),
        ("server/metrics.cc", '"kernels/status.h"'),
        ("server/log.cc", '"server/metrics.h"'),
        ("server/log.cc", "<grpc/support/log.h>"),
        ("server/rpc/service.cc", '"server/options.h"'),
        ("server/rpc/service.cc", '"client/cpp/client.h"'),
        ("server/main.cc", '"shardmlp/v1/compute.pb.h"'),
        ("proto/wire.cc", '"server/rpc/convert.h"'),
        ("client/cpp/session.cc", '"kernels/mlp.h"'),
        ("client/cpp/session.cc", '"server/rpc/convert.h"'),
        ("client/python/module.cc", '"proto/wire.h"'),
        ("client/cli/main.cc", '"server/engine/engine.h"'),
        ("client/cli/main.cc", '"server/model/checkpoint.h"'),
        ("client/cli/main.cc", '"server/engine/memory_plan.h"'),
        ("client/cli/units.cc", '"client/cli/commands.h"'),
        ("client/cli/flags.cc", '"client/cli/bench/bench_flags.h"'),
        ("client/cli/bench/bench.cc", '"client/cli/plan/plan.h"'),
        ("client/cli/bench/bench.cc", '"client/cli/command_line.h"'),
        ("client/cli/bench/bench.cc", '"server/engine/memory_plan.h"'),
        ("client/cli/plan/plan.cc", '"client/cli/top/window.h"'),
        ("client/cli/plan/plan.cc", '"server/engine/engine.h"'),
        ("client/cli/top/top.cc", '"client/cli/commands.h"'),
        ("client/cli/verify/verify.cc", '"client/cli/bench/load.h"'),
    ],
)
def test_an_include_against_the_direction(plant, path, include):
    root = plant(path, f"// A comment.\n#include {include}\n")
    assert [violation.split(" ")[0] for violation in wrong_includes(root)] == [f"{path}:2:"]


@pytest.mark.parametrize(
    "path, include",
    [
        ("kernels/cpu/copy.cc", '"kernels/matrix.h"'),
        ("server/sync/rendezvous/member.cc", '"shardmlp/v1/rendezvous.grpc.pb.h"'),
        ("server/engine/step.cc", '"server/model/model_spec.h"'),
        ("server/engine/step.cc", '"absl/status/status.h"'),
        ("server/engine/step.cc", '"server/metrics.h"'),
        ("server/engine/step.cc", '"server/log.h"'),
        ("server/rpc/service.cc", '"shardmlp/v1/compute.grpc.pb.h"'),
        ("server/main.cc", '"server/rpc/service.h"'),
        ("client/cpp/session.cc", '"kernels/matrix.h"'),
        ("client/cli/main.cc", '"kernels/mlp.h"'),
        ("client/cli/main.cc", '"client/cli/plan/plan_report.h"'),
        ("client/cli/drain.cc", '"client/cli/top/window.h"'),
        ("client/cli/plan/planned_model.cc", '"server/engine/memory_plan.h"'),
        ("client/cli/plan/measured_plan.cc", '"client/cli/bench/bench.h"'),
        ("client/cli/verify/verify.cc", '"client/cli/layers.h"'),
        ("tests/engine/step_test.cc", '"shardmlp/v1/compute.pb.h"'),
    ],
)
def test_an_include_along_the_direction(plant, path, include):
    assert wrong_includes(plant(path, f"#include {include}\n")) == []


@pytest.mark.parametrize("line", ["#if 1", "#ifdef NDEBUG", "  # ifndef X", "#if defined(__linux__)"])
def test_a_conditional(plant, line):
    root = plant("kernels/mlp.cc", f"#include <vector>\n{line}\nint x;\n#endif\n")
    assert conditionals(root) == [f"kernels/mlp.cc:2: {line.strip()}"]


def test_an_include_guard_is_no_conditional(plant):
    assert conditionals(plant("kernels/mlp.h", "#ifndef MLP_H_\n#define MLP_H_\n#endif\n")) == []


def test_a_long_file(plant):
    plant("server/engine/whole.cc", "int x;\n" * 500)
    root = plant("server/engine/long.cc", "int x;\n" * 501)
    assert long_files(root) == ["server/engine/long.cc: 501 lines, at most 500 expected"]


PROTO = """\
// A service.
service Compute {{
  // Computes.
  rpc Forward(ForwardRequest)
      returns (ForwardResponse);
{rpc}}}
message ForwardRequest {{
  oneof message {{
    // First.
    Header header = 1;
  }}
  repeated int64 rows = 2;  // How many.
{field}}}
enum DType {{
  // Refused.
  DTYPE_UNSPECIFIED = 0;
{value}}}
"""


@pytest.mark.parametrize(
    "part, line",
    [
        ("rpc", "rpc Backward(stream BackwardRequest) returns (stream BackwardResponse);"),
        ("field", "bytes x = 3;"),
        ("field", "repeated TensorInfo tensors = 3;"),
        ("field", "map<string, int64> counts = 3;"),
        ("value", "DTYPE_F32 = 1;"),
    ],
)
def test_an_element_of_the_protocol_without_a_comment(plant, part, line):
    lines = {"rpc": "", "field": "", "value": ""}
    name = "proto/shardmlp/v1/compute.proto"
    assert uncommented_proto_elements(plant(name, PROTO.format(**lines))) == []
    lines[part] = f"  {line}\n"
    found = uncommented_proto_elements(plant(name, PROTO.format(**lines)))
    assert [violation.partition("no comment on ")[2] for violation in found] == [line]


def test_a_link_to_a_page_that_is_not_there(plant):
    plant("docs/architecture.md", "[up](../README.md) [site](https://example.org) [here](#words)\n")
    root = plant("README.md", "\n[design](docs/architecture.md#rooms) and [numbers](docs/numbers.md)\n")
    assert dead_links(root) == ["README.md:2: no docs/numbers.md"]


def test_a_named_path_that_is_not_there(plant):
    plant("proto/wire.h", "")
    plant("proto/v1/compute.proto", "")
    page = "`proto/v1/*.proto`, `proto/wire`, proto/wire.h. build/release/server/program\nscripts/quickstart --fast\n"
    assert missing_paths(plant("README.md", page)) == ["README.md:2: no scripts/quickstart"]
