#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/client/fake_server.h"

namespace shardmlp::fake {
namespace {

int64_t BytesOf(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_F32: return 4;
    case v1::DTYPE_F64: return 8;
    default: return 2;
  }
}

grpc::Status Invalid(const std::string& what) {
  return Refuse(absl::StatusCode::kInvalidArgument, Reason::kInvalidArgument, what);
}

struct ForwardKind {
  using Request = v1::ForwardRequest;
  using Response = v1::ForwardResponse;
  using Stream = grpc::ServerReaderWriter<Response, Request>;
  static constexpr char kMethod[] = "Forward";

  static v1::ForwardHeader& Header(SeenCall& call) { return call.forward; }
  static bool HasSize(const v1::ForwardShard& shard, const v1::LayerInfo& layer, int64_t element) {
    return static_cast<int64_t>(shard.x().size()) == shard.row_count() * layer.hidden_size() * element;
  }
  // [row_count, output_size]: y[r, o] = ~x[r, o % H].
  static std::string Result(const v1::ForwardShard& shard, const v1::LayerInfo& layer, int64_t element) {
    const int64_t row = layer.output_size() * element;
    std::string y(shard.row_count() * row, 0);
    for (int64_t i = 0; i < static_cast<int64_t>(y.size()); ++i) {
      const int64_t x_row = layer.hidden_size() * element;
      y[i] = static_cast<char>(~shard.x()[i / row * x_row + i % row % x_row]);
    }
    return y;
  }
  static void SetResult(std::string bytes, Response& response) { response.mutable_result()->set_y(std::move(bytes)); }
  static bool WantsResult(const v1::ForwardHeader&) { return true; }
  static int64_t ResultSize(const v1::LayerInfo& layer) { return layer.output_size(); }
};

struct BackwardKind {
  using Request = v1::BackwardRequest;
  using Response = v1::BackwardResponse;
  using Stream = grpc::ServerReaderWriter<Response, Request>;
  static constexpr char kMethod[] = "Backward";

  static v1::BackwardHeader& Header(SeenCall& call) { return call.backward; }
  static bool HasSize(const v1::BackwardShard& shard, const v1::LayerInfo& layer, int64_t element) {
    return static_cast<int64_t>(shard.x().size()) == shard.row_count() * layer.hidden_size() * element &&
           static_cast<int64_t>(shard.dy().size()) == shard.row_count() * layer.output_size() * element;
  }
  // [row_count, hidden_size]: dx[r, h] = x[r, h] ^ dy[r, h % O].
  static std::string Result(const v1::BackwardShard& shard, const v1::LayerInfo& layer, int64_t element) {
    const int64_t row = layer.hidden_size() * element;
    const int64_t dy_row = layer.output_size() * element;
    std::string dx = shard.x();
    for (int64_t i = 0; i < static_cast<int64_t>(dx.size()); ++i) {
      dx[i] = static_cast<char>(dx[i] ^ shard.dy()[i / row * dy_row + i % row % dy_row]);
    }
    return dx;
  }
  static void SetResult(std::string bytes, Response& response) { response.mutable_result()->set_dx(std::move(bytes)); }
  static bool WantsResult(const v1::BackwardHeader& header) { return header.input_gradient(); }
  static int64_t ResultSize(const v1::LayerInfo& layer) { return layer.hidden_size(); }
};

}  // namespace

template <typename Kind>
grpc::Status FakeServer::Run(grpc::ServerContext* context, typename Kind::Stream* stream) {
  Moment reading = Begin(Kind::kMethod, context);
  Moment writing = reading;
  writing.method += "Answer";
  SeenCall call{.method = Kind::kMethod, .peer = context->peer()};
  typename Kind::Request request;
  if (!stream->Read(&request) || !request.has_header()) return Invalid("no header");
  Kind::Header(call) = request.header();
  Record(call);
  if (const auto ended = StepIn(reading)) return *ended;
  const v1::LayerInfo* const layer = FindLayer(request.header().layer());
  if (layer == nullptr) return Refuse(absl::StatusCode::kNotFound, Reason::kUnknownLayer, "no such layer");
  const int64_t element = BytesOf(request.header().dtype());
  const int64_t row_count = request.header().row_count();

  int64_t rows = 0;
  const auto answer = [&](int64_t offset, int64_t count, const std::string& bytes) -> std::optional<grpc::Status> {
    typename Kind::Response response;
    response.mutable_result()->set_row_offset(offset);
    response.mutable_result()->set_row_count(count);
    Kind::SetResult(bytes, response);
    ChangeAnswer(response);
    if (const auto ended = StepIn(writing)) return ended;
    ++writing.message;
    stream->Write(response);
    return std::nullopt;
  };
  while (stream->Read(&request) && request.has_shard()) {
    const auto& shard = request.shard();
    if (shard.row_offset() != rows || shard.row_count() < 1 || rows + shard.row_count() > row_count) {
      return Invalid("rows out of order");
    }
    if (!Kind::HasSize(shard, *layer, element)) return Invalid("a payload's size");
    rows += shard.row_count();
    call.shard_rows.push_back(shard.row_count());
    ++reading.message;
    if (const auto ended = StepIn(reading)) return *ended;
    const std::string result = Kind::Result(shard, *layer, element);
    const int64_t row_bytes = Kind::ResultSize(*layer) * element;
    for (int64_t row = 0; Kind::WantsResult(Kind::Header(call)) && row < shard.row_count();
         row += options_.result_rows) {
      const int64_t count = std::min(options_.result_rows, shard.row_count() - row);
      const auto ended = answer(shard.row_offset() + row, count, result.substr(row * row_bytes, count * row_bytes));
      if (ended) return *ended;
    }
    if constexpr (std::is_same_v<Kind, BackwardKind>) CountRows(call.backward, rows);
  }
  if (!request.has_end() || request.end().row_count() != row_count || rows != row_count) return Invalid("the end");
  ++reading.message;
  if (const auto ended = StepIn(reading)) return *ended;
  if (stream->Read(&request)) return Invalid("a message after the end");

  typename Kind::Response end;
  end.mutable_end()->set_row_count(row_count);
  if constexpr (std::is_same_v<Kind, ForwardKind>) end.mutable_end()->set_weights_version(position().weights_version());
  ChangeAnswer(end);
  if (const auto ended = StepIn(writing)) return *ended;
  stream->Write(end);
  call.complete = true;
  Record(call);
  return grpc::Status::OK;
}

grpc::Status FakeServer::Forward(grpc::ServerContext* context,
                                 grpc::ServerReaderWriter<v1::ForwardResponse, v1::ForwardRequest>* stream) {
  return Run<ForwardKind>(context, stream);
}

grpc::Status FakeServer::Backward(grpc::ServerContext* context,
                                  grpc::ServerReaderWriter<v1::BackwardResponse, v1::BackwardRequest>* stream) {
  return Run<BackwardKind>(context, stream);
}

}  // namespace shardmlp::fake
