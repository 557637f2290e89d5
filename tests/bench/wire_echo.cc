#include "tests/bench/wire_echo.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/client_callback.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

namespace shardmlp {
namespace {

constexpr size_t kReadAhead = 4;  // messages that wait to be sent back

class EchoStream final : public grpc::ServerGenericBidiReactor {
 public:
  EchoStream() { StartRead(&incoming_); }

  void OnReadDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    closed_ = !ok;
    if (ok) waiting_.push_back(std::exchange(incoming_, {}));
    GoOn();
  }
  void OnWriteDone(bool /*ok*/) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    GoOn();
  }
  void OnDone() override { std::unique_ptr<EchoStream>(this).reset(); }

 private:
  void GoOn() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!writing_ && !waiting_.empty()) {
      outgoing_ = std::move(waiting_.front());
      waiting_.pop_front();
      writing_ = true;
      StartWrite(&outgoing_);
    }
    if (!reading_ && !closed_ && waiting_.size() < kReadAhead) {
      reading_ = true;
      StartRead(&incoming_);
    }
    if (closed_ && !writing_ && waiting_.empty()) Finish(grpc::Status::OK);
  }

  absl::Mutex mutex_;
  grpc::ByteBuffer incoming_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer outgoing_ ABSL_GUARDED_BY(mutex_);
  std::deque<grpc::ByteBuffer> waiting_ ABSL_GUARDED_BY(mutex_);
  bool reading_ ABSL_GUARDED_BY(mutex_) = true;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

class EchoCall final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  EchoCall(grpc::GenericStub& stub, const std::vector<char>& data, int64_t message_bytes)
      : data_(data), message_bytes_(static_cast<size_t>(message_bytes)) {
    stub.PrepareBidiStreamingCall(&context_, "/bench.Echo/Echo", {}, this);
    StartRead(&incoming_);
    WriteNext();
    StartCall();
  }

  absl::Status Await() {
    done_.WaitForNotification();
    if (!status_.ok()) return absl::UnavailableError(status_.error_message());
    return received_ == data_.size() ? absl::OkStatus() : absl::DataLossError("the echo is not whole");
  }

 private:
  void WriteNext() {
    const size_t size = std::min(message_bytes_, data_.size() - sent_);
    const grpc::Slice slice(data_.data() + sent_, size, grpc::Slice::STATIC_SLICE);
    sent_ += size;
    outgoing_ = grpc::ByteBuffer(&slice, 1);
    StartWrite(&outgoing_);
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return;
    if (sent_ < data_.size()) {
      WriteNext();
    } else {
      StartWritesDone();
    }
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    received_ += incoming_.Length();
    incoming_.Clear();
    StartRead(&incoming_);
  }
  void OnDone(const grpc::Status& status) override {
    status_ = status;
    done_.Notify();
  }

  const std::vector<char>& data_;
  const size_t message_bytes_;
  grpc::ClientContext context_;
  grpc::ByteBuffer outgoing_;
  grpc::ByteBuffer incoming_;
  size_t sent_ = 0;
  size_t received_ = 0;
  grpc::Status status_;
  absl::Notification done_;
};

}  // namespace

grpc::ServerGenericBidiReactor* EchoService::CreateReactor(grpc::GenericCallbackServerContext* /*context*/) {
  return std::make_unique<EchoStream>().release();
}

absl::Status RunEcho(const std::shared_ptr<grpc::Channel>& channel, const std::vector<char>& data,
                     int64_t message_bytes) {
  grpc::GenericStub stub(channel);
  EchoCall call(stub, data, message_bytes);
  return call.Await();
}

}  // namespace shardmlp
