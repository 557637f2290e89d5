#include "tests/bench/wire_echo.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/client_callback.h>

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
  EchoCall(grpc::GenericStub& stub, const std::vector<char>& message, int64_t message_count)
      : message_bytes_(static_cast<int64_t>(message.size())), left_(message_count), expected_(message_count) {
    const grpc::Slice slice(message.data(), message.size(), grpc::Slice::STATIC_SLICE);
    outgoing_ = grpc::ByteBuffer(&slice, 1);
    stub.PrepareBidiStreamingCall(&context_, "/bench.Echo/Echo", {}, this);
    StartRead(&incoming_);
    StartWrite(&outgoing_);
    StartCall();
  }

  bool Await() {
    done_.WaitForNotification();
    return received_ == expected_ && status_.ok();
  }

 private:
  void OnWriteDone(bool ok) override {
    if (!ok) return;
    if (--left_ > 0) {
      StartWrite(&outgoing_);
    } else {
      StartWritesDone();
    }
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    received_ += static_cast<int64_t>(incoming_.Length()) == message_bytes_ ? 1 : 0;
    incoming_.Clear();
    StartRead(&incoming_);
  }
  void OnDone(const grpc::Status& status) override {
    status_ = status;
    done_.Notify();
  }

  const int64_t message_bytes_;
  grpc::ClientContext context_;
  grpc::ByteBuffer outgoing_;
  grpc::ByteBuffer incoming_;
  int64_t left_;
  const int64_t expected_;
  int64_t received_ = 0;
  grpc::Status status_;
  absl::Notification done_;
};

}  // namespace

grpc::ServerGenericBidiReactor* EchoService::CreateReactor(grpc::GenericCallbackServerContext* /*context*/) {
  return std::make_unique<EchoStream>().release();
}

bool RunEcho(const std::shared_ptr<grpc::Channel>& channel, const std::vector<char>& message, int64_t message_count) {
  grpc::GenericStub stub(channel);
  EchoCall call(stub, message, message_count);
  return call.Await();
}

}  // namespace shardmlp
