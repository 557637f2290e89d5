#include "server/sync/gloo_abort.h"

#include <gloo/common/error.h>

#include <chrono>
#include <utility>

namespace shardmlp {

using gloo::transport::UnboundBuffer;

// The buffers that there are.
class AbortableTransport::Waits {
 public:
  void Add(UnboundBuffer* buffer) {
    absl::MutexLock lock(&mutex_);
    buffers_.insert(buffer);
  }
  void Remove(UnboundBuffer* buffer) {
    absl::MutexLock lock(&mutex_);
    buffers_.erase(buffer);
  }
  void Abort() {
    absl::MutexLock lock(&mutex_);
    aborted_ = true;
    for (UnboundBuffer* const buffer : buffers_) {
      buffer->abortWaitRecv();
      buffer->abortWaitSend();
    }
  }
  // Throws where `completed` is not so, or all is aborted.
  void Check(bool completed) {
    absl::MutexLock lock(&mutex_);
    if (aborted_ || !completed) throw gloo::IoException("aborted");
  }

 private:
  absl::Mutex mutex_;
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<UnboundBuffer*> buffers_ ABSL_GUARDED_BY(mutex_);
};

class AbortableTransport::Buffer final : public UnboundBuffer {
 public:
  Buffer(std::unique_ptr<UnboundBuffer> inner, std::shared_ptr<Waits> waits)
      : UnboundBuffer(inner->ptr, inner->size), inner_(std::move(inner)), waits_(std::move(waits)) {
    waits_->Add(inner_.get());
  }
  ~Buffer() override { waits_->Remove(inner_.get()); }

  bool waitRecv(int* rank, std::chrono::milliseconds timeout) override {
    waits_->Check(true);
    waits_->Check(inner_->waitRecv(rank, timeout));
    return true;
  }
  bool waitSend(int* rank, std::chrono::milliseconds timeout) override {
    waits_->Check(true);
    waits_->Check(inner_->waitSend(rank, timeout));
    return true;
  }
  void abortWaitRecv() override { inner_->abortWaitRecv(); }
  void abortWaitSend() override { inner_->abortWaitSend(); }
  void send(int rank, uint64_t slot, size_t offset, size_t size) override { inner_->send(rank, slot, offset, size); }
  void recv(int rank, uint64_t slot, size_t offset, size_t size) override { inner_->recv(rank, slot, offset, size); }
  void recv(std::vector<int> ranks, uint64_t slot, size_t offset, size_t size) override {
    inner_->recv(std::move(ranks), slot, offset, size);
  }

 private:
  const std::unique_ptr<UnboundBuffer> inner_;
  const std::shared_ptr<Waits> waits_;
};

AbortableTransport::AbortableTransport(std::shared_ptr<gloo::transport::Context> inner)
    : gloo::transport::Context(inner->rank, inner->size),
      inner_(std::move(inner)),
      waits_(std::make_shared<Waits>()),
      breaker_(inner_->createUnboundBuffer(&byte_, sizeof(byte_))) {}

AbortableTransport::~AbortableTransport() = default;

std::unique_ptr<UnboundBuffer> AbortableTransport::createUnboundBuffer(void* data, size_t size) {
  return std::make_unique<Buffer>(inner_->createUnboundBuffer(data, size), waits_);
}

void AbortableTransport::Abort() {
  try {
    breaker_->waitRecv(nullptr, std::chrono::milliseconds(1));
  } catch (const std::exception&) {
    // As it should.
  }
  waits_->Abort();
}

}  // namespace shardmlp
