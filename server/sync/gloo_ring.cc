#include "server/sync/gloo_ring.h"

#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <array>
#include <cstddef>

namespace shardmlp {
namespace {

// Of a message. More would leave the caches between its arrival and its sum.
constexpr int64_t kMaxSegmentBytes = 1 << 20;
constexpr int64_t kMinSegmentBytes = 16 << 10;
// How many messages a rank is ready for at once.
constexpr size_t kWindow = 4;
// Gloo's own collectives have small numbers here.
constexpr uint64_t kSlot = uint64_t{0x52} << 56;

using gloo::transport::UnboundBuffer;

// A part of a block: what one message holds.
struct Segment {
  UnboundBuffer* block;
  int64_t offset;
  int64_t byte_count;
};

template <typename T>
void AddTo(void* sum, const void* part, int64_t byte_count) {
  T* __restrict to = static_cast<T*>(sum);
  const T* __restrict from = static_cast<const T*>(part);
  const int64_t count = byte_count / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

class Ring {
 public:
  Ring(gloo::Context& context, DType dtype, absl::Span<const MemoryBlock> blocks, uint32_t tag,
       std::chrono::milliseconds timeout)
      : context_(context), dtype_(dtype), slot_(kSlot + tag), timeout_(timeout) {
    int64_t bytes = 0;
    for (const MemoryBlock& block : blocks) bytes += block.byte_count;
    // At least two messages a rank, so that one is summed while the other is on its way. A multiple of any element.
    const int64_t share = bytes / (2 * context.size);
    segment_bytes_ = std::clamp(share, kMinSegmentBytes, kMaxSegmentBytes) / 64 * 64;
    chunks_.resize(context.size);
    int64_t before = 0;
    for (const MemoryBlock& block : blocks) {
      blocks_.push_back(context.createUnboundBuffer(block.data, block.byte_count));
      for (int64_t offset = 0; offset < block.byte_count; offset += segment_bytes_) {
        chunks_[before * context.size / bytes].push_back(
            {blocks_.back().get(), offset, std::min(segment_bytes_, block.byte_count - offset)});
        before += chunks_[before * context.size / bytes].back().byte_count;
      }
    }
    scratch_.resize(kWindow * segment_bytes_);
    for (size_t i = 0; i < kWindow; ++i) {
      arrivals_[i] = context.createUnboundBuffer(scratch_.data() + i * segment_bytes_, segment_bytes_);
    }
  }

  // In step s a rank passes chunk rank - s on to the next rank, and is passed chunk rank - s - 1 by the one before. In
  // the first size - 1 steps it adds that to its own, whereupon each rank has one chunk complete; in the others it
  // takes it as it is. So what arrives in a step is just what leaves in the next.
  void Run() {
    std::vector<Segment> arriving;
    for (int step = 0; step < 2 * context_.size - 2; ++step) {
      const std::vector<Segment>& chunk = Chunk(context_.rank - step - 1);
      arriving.insert(arriving.end(), chunk.begin(), chunk.end());
      if (step < context_.size - 1) added_ = arriving.size();
      if (step < 2 * context_.size - 3) passed_on_ = arriving.size();
    }
    for (const Segment& segment : Chunk(context_.rank)) Send(segment);
    for (size_t i = 0; i < std::min(kWindow, arriving.size()); ++i) Receive(i, arriving[i]);
    for (size_t i = 0; i < arriving.size(); ++i) {
      Arrive(i, arriving[i]);
      if (i < passed_on_) Send(arriving[i]);
      if (i + kWindow < arriving.size()) Receive(i + kWindow, arriving[i + kWindow]);
    }
    for (UnboundBuffer* const block : sent_) block->waitSend(timeout_);
  }

 private:
  const std::vector<Segment>& Chunk(int index) const { return chunks_[(index + 2 * context_.size) % context_.size]; }
  void Send(const Segment& segment) {
    segment.block->send((context_.rank + 1) % context_.size, slot_, segment.offset, segment.byte_count);
    sent_.push_back(segment.block);
  }
  // Gets ready for the i-th segment that arrives.
  void Receive(size_t i, const Segment& segment) {
    const int from = (context_.rank + context_.size - 1) % context_.size;
    if (i < added_) {
      arrivals_[i % kWindow]->recv(from, slot_, 0, segment.byte_count);
    } else {
      segment.block->recv(from, slot_, segment.offset, segment.byte_count);
    }
  }
  void Arrive(size_t i, const Segment& segment) {
    if (i >= added_) {
      segment.block->waitRecv(timeout_);
      return;
    }
    UnboundBuffer& arrival = *arrivals_[i % kWindow];
    arrival.waitRecv(timeout_);
    void* const sum = static_cast<std::byte*>(segment.block->ptr) + segment.offset;
    (dtype_ == DType::kF64 ? AddTo<double> : AddTo<float>)(sum, arrival.ptr, segment.byte_count);
  }

  gloo::Context& context_;
  const DType dtype_;
  const uint64_t slot_;
  const std::chrono::milliseconds timeout_;
  int64_t segment_bytes_ = 0;
  std::vector<std::unique_ptr<UnboundBuffer>> blocks_;
  std::vector<std::vector<Segment>> chunks_;  // by the rank that passes it on first
  std::vector<std::byte> scratch_;
  std::array<std::unique_ptr<UnboundBuffer>, kWindow> arrivals_;
  size_t added_ = 0;      // of the segments that arrive, the first so many are added
  size_t passed_on_ = 0;  // and so many passed on
  std::vector<UnboundBuffer*> sent_;
};

}  // namespace

void RingSum(gloo::Context& context, DType dtype, absl::Span<const MemoryBlock> blocks, uint32_t tag,
             std::chrono::milliseconds timeout) {
  Ring(context, dtype, blocks, tag, timeout).Run();
}

}  // namespace shardmlp
