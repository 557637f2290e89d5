// Makes what waits in Gloo's collectives give up when it is told to.
#pragma once

#include <gloo/transport/context.h>

#include <memory>
#include <set>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace shardmlp {

// A transport whose buffers' waits all end. Gloo itself, when a connection breaks, tells those buffers of which nothing
// has been sent or received yet; a wait for one that is half through would last until its own time-out. Thread-safe.
class AbortableTransport final : public gloo::transport::Context {
 public:
  explicit AbortableTransport(std::shared_ptr<gloo::transport::Context> inner);
  ~AbortableTransport() override;

  std::unique_ptr<gloo::transport::Pair>& getPair(int rank) override { return inner_->getPair(rank); }
  std::unique_ptr<gloo::transport::Pair>& createPair(int rank) override { return inner_->createPair(rank); }
  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* data, size_t size) override;

  // Closes the connections, so that the other ranks fail as well, and makes waits throw, these and all later ones.
  void Abort();

 private:
  class Waits;
  class Buffer;

  const std::shared_ptr<gloo::transport::Context> inner_;
  const std::shared_ptr<Waits> waits_;
  char byte_ = 0;
  // A wait on it, for what nobody sends, times out, whereupon Gloo closes all connections.
  const std::unique_ptr<gloo::transport::UnboundBuffer> breaker_;
};

}  // namespace shardmlp
