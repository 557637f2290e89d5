#include "tests/rpc/raw_call.h"

#include <grpcpp/generic/generic_stub.h>

#include "proto/status_bridge.h"

namespace shardmlp {
namespace {

std::string BytesOf(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  buffer.Dump(&slices).ok();
  std::string bytes;
  for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return bytes;
}

}  // namespace

bool Await(grpc::CompletionQueue& queue) {
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  return ok;
}

RawAnswer RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                  const std::vector<std::string>& messages, const std::string& token) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
  grpc::CompletionQueue queue;
  const auto stream = stub.PrepareCall(&context, method, &queue);
  stream->StartCall(nullptr);
  Await(queue);
  for (const std::string& message : messages) {
    const grpc::Slice slice(message);
    stream->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    Await(queue);
  }
  stream->WritesDone(nullptr);
  Await(queue);
  RawAnswer answer;
  for (bool more = true; more;) {
    grpc::ByteBuffer buffer;
    stream->Read(&buffer, nullptr);
    more = Await(queue);
    if (more) answer.messages.push_back(BytesOf(buffer));
  }
  grpc::Status status;
  stream->Finish(&status, nullptr);
  Await(queue);
  answer.status = FromGrpcStatus(status);
  return answer;
}

}  // namespace shardmlp
