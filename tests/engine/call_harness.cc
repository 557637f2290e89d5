#include "tests/engine/call_harness.h"

#include <algorithm>
#include <utility>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/engine/outcome.h"

namespace shardmlp::testing {
namespace {

constexpr int64_t kSession = 42;

class Done final : public Event {};

LayerSpec HarnessLayer() {
  LayerSpec layer;
  layer.layer = 4;
  layer.mlp.hidden_size = kHidden;
  layer.mlp.output_size = kOutput;
  layer.mlp.dtype = DType::kF64;
  return layer;
}

CallSpec SpecOf(Pass pass, int64_t row_count, bool input_gradient, const LayerSpec& layer) {
  CallSpec spec;
  spec.pass = pass;
  spec.header.session_id = kSession;
  spec.header.layer = layer.layer;
  spec.header.row_count = row_count;
  spec.header.dtype = DType::kF64;
  spec.header.call_id = 9;
  spec.header.input_gradient = input_gradient;
  spec.header.weight_gradient = pass == Pass::kBackward;
  spec.x_cols = layer.mlp.hidden_size;
  spec.dy_cols = layer.mlp.output_size;
  return spec;
}

}  // namespace

Dense HostForward(const Dense& x) {
  Dense y(x.rows, kOutput);
  for (int64_t r = 0; r < y.rows; ++r) {
    for (int64_t c = 0; c < y.cols; ++c) y.at(r, c) = 10 * x.at(r, c) + static_cast<double>(c);
  }
  return y;
}

Dense HostBackward(const Dense& x, const Dense& dy) {
  Dense dx(x.rows, kHidden);
  for (int64_t r = 0; r < dx.rows; ++r) {
    for (int64_t c = 0; c < dx.cols; ++c) dx.at(r, c) = x.at(r, c) + 100 * dy.at(r, c % kOutput);
  }
  return dx;
}

absl::StatusOr<CallHost::Admitted> HandHost::StartTile(const CallSpec& spec, const Tile& tile, TileRows rows) {
  if (!admission.ok()) return admission;
  tiles.push_back(tile);
  const auto read = [](ConstMatrixView m) { return Decode(m.as<char>(), m.rows, m.cols, m.dtype); };
  const Dense result =
      spec.pass == Pass::kForward ? HostForward(read(rows.x)) : HostBackward(read(rows.x), read(rows.dy));
  if (!rows.result.empty()) std::copy(result.values.begin(), result.values.end(), rows.result.as<double>());
  return Admitted{std::make_unique<Done>(), version, repeat};
}

absl::Status HandHost::FinishTile(const Event&) {
  ++awaited;
  return device;
}

void HandHost::SubmitTile(int64_t session_id, std::unique_ptr<TileJob> job) {
  EXPECT_EQ(session_id, kSession);
  queue_.push_back(std::move(job));
}

void HandHost::CallFinished(const CallSpec& spec, bool answered) {
  EXPECT_EQ(spec.header.session_id, kSession);
  answered_calls += answered ? 1 : 0;
  ++finished_calls;
}

bool HandHost::Start() {
  if (queue_.empty()) return false;
  started_.push_back(std::move(queue_.front()));
  queue_.pop_front();
  started_.back()->Start();
  return true;
}

bool HandHost::Finish() {
  if (started_.empty()) return false;
  const std::unique_ptr<TileJob> job = std::move(started_.front());
  started_.pop_front();
  job->Finish();
  return true;
}

void HandHost::Run() {
  while (Start() || Finish()) {
  }
}

void NotingSink::OnRoom() {
  ++rooms;
  React();
}

void NotingSink::OnResult(CallResult result) {
  ++results;
  EXPECT_EQ(result.row_offset, rows_.rows) << "rows in order, without gap";
  EXPECT_EQ(result.byte_count, result.row_count * rows_.cols * 8);
  rows_ = Stacked({rows_, Decode(result.data, result.row_count, rows_.cols, DType::kF64)});
  if (keep) held_.push_back(std::move(result.hold));
  React();
}

void NotingSink::OnFinished(absl::StatusOr<CallSummary> given) {
  ++finishes;
  summary = std::move(given);
  React();
}

std::shared_ptr<void> NotingSink::Take() {
  std::shared_ptr<void> oldest = std::move(held_.front());
  held_.pop_front();
  return oldest;
}

void NotingSink::React() {
  if (react && react_after-- == 0) std::exchange(react, nullptr)();
}

CallRig::CallRig(Pass pass, int64_t row_count, int64_t tile_rows, bool input_gradient)
    : layer(HarnessLayer()),
      spec(SpecOf(pass, row_count, input_gradient, layer)),
      x(RandomDense(std::min<int64_t>(row_count, 1000), kHidden, 1)),
      dy(RandomDense(x.rows, kOutput, 2)),
      lanes(LanePool::Create(MakeCpuBackend({.threads = 1}).value(), {layer}, tile_rows, 1, 1).value()),
      sink(spec.result_cols()),
      call(std::make_shared<TileCall>(*host, sink, metrics, spec, lanes->Acquire(SessionRole::kTrain).value(),
                                      tile_rows)) {}

CallRig::~CallRig() {
  if (host != nullptr) call->Cancel();
}

absl::StatusOr<int64_t> CallRig::TryPlace(int64_t row_offset, int64_t row_count, int64_t skip,
                                          const std::string& x_bytes, const std::string& dy_bytes) {
  const PieceSource dy_source(dy_bytes);
  return call->Place(row_offset, row_count, skip, PieceSource(x_bytes),
                     spec.pass == Pass::kBackward ? &dy_source : nullptr);
}

int64_t CallRig::Place(int64_t begin, int64_t count, int64_t skip) {
  const absl::StatusOr<int64_t> placed = TryPlace(begin, count, skip, Encode(RowsOf(x, begin, count), DType::kF64),
                                                  Encode(RowsOf(dy, begin, count), DType::kF64));
  EXPECT_TRUE(Succeeds(placed));
  return placed.value_or(0);
}

void CallRig::Send(int64_t shard_rows) {
  for (int64_t begin = 0; begin < x.rows; begin += shard_rows) {
    const int64_t count = std::min(shard_rows, x.rows - begin);
    for (int64_t placed = 0; placed < count;) {
      placed += Place(begin, count, placed);
      if (placed < count) host->Run();
    }
  }
  EXPECT_TRUE(Succeeds(call->End(x.rows)));
  host->Run();
}

}  // namespace shardmlp::testing
