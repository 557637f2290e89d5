#include "proto/wire.h"

#include <google/protobuf/message_lite.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/status.h"

namespace shardmlp {
namespace {

// protobuf's encoding: a tag is (field << 3 | type), and a varint holds seven bits a byte, lowest first.
enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kGroup = 3, kGroupEnd = 4, kFixed32 = 5 };

constexpr int kRowOffsetField = 1;
constexpr int kRowCountField = 2;
constexpr int kFirstPayloadField = 3;
constexpr int kMaxVarintBytes = 10;
constexpr size_t kMaxGroupDepth = 100;
constexpr uint64_t kMaxBytes = std::numeric_limits<int32_t>::max();

absl::Status Malformed(int64_t position, absl::string_view what) {
  return Error(absl::StatusCode::kInvalidArgument, Reason::kMalformedMessage,
               absl::StrCat("malformed message at byte ", position, ": ", what));
}

struct Tag {
  int field = 0;
  uint32_t type = kVarint;
};

// Walks over a message that lies in slices.
class Reader {
 public:
  explicit Reader(std::vector<grpc::Slice> slices) : slices_(std::move(slices)) {
    for (const grpc::Slice& slice : slices_) size_ += static_cast<int64_t>(slice.size());
  }

  int64_t size() const { return size_; }
  int64_t position() const { return position_; }

  // The readers below stop at `end`, and fail where what they read does not end by then.
  absl::StatusOr<uint64_t> ReadVarint(int64_t end) {
    uint64_t value = 0;
    for (int i = 0; i < kMaxVarintBytes; ++i) {
      if (position_ == end) return Malformed(position_, "it ends in the middle of a varint");
      const uint8_t byte = NextByte();
      value |= static_cast<uint64_t>(byte & 0x7f) << (7 * i);
      if (byte < 0x80) return value;
    }
    return Malformed(position_, absl::StrCat("a varint of more than ", kMaxVarintBytes, " bytes"));
  }

  absl::StatusOr<Tag> ReadTag(int64_t end) {
    SHARDMLP_ASSIGN_OR_RETURN(const uint64_t tag, ReadVarint(end));
    if (tag > std::numeric_limits<uint32_t>::max() || (tag >> 3) == 0) {
      return Malformed(position_, absl::StrCat("field number ", tag >> 3, " is outside [1, 536870911]"));
    }
    return Tag{static_cast<int>(tag >> 3), static_cast<uint32_t>(tag & 7)};
  }

  // Reads a length and returns where the bytes that follow it end.
  absl::StatusOr<int64_t> ReadLength(int64_t end) {
    SHARDMLP_ASSIGN_OR_RETURN(const uint64_t length, ReadVarint(end));
    if (length > kMaxBytes || static_cast<int64_t>(length) > end - position_) {
      return Malformed(position_, absl::StrCat("a length of ", length, " where ", end - position_, " bytes are left"));
    }
    return position_ + static_cast<int64_t>(length);
  }

  // References the bytes up to `to`, which exist.
  std::vector<grpc::Slice> Take(int64_t to) {
    std::vector<grpc::Slice> pieces;
    while (position_ < to) {
      const auto count = std::min<int64_t>(to - position_, Current().size() - offset_);
      const bool whole = offset_ == 0 && count == static_cast<int64_t>(Current().size());
      pieces.push_back(whole ? Current() : Current().sub(offset_, offset_ + count));
      Advance(count);
    }
    return pieces;
  }

  absl::Status Skip(Tag tag, int64_t end) {
    std::vector<int> groups;
    do {
      SHARDMLP_RETURN_IF_ERROR(SkipOne(tag, end, groups));
      if (groups.empty()) return absl::OkStatus();
      SHARDMLP_ASSIGN_OR_RETURN(tag, ReadTag(end));
    } while (true);
  }

 private:
  absl::Status SkipOne(Tag tag, int64_t end, std::vector<int>& groups) {
    switch (tag.type) {
      case kVarint: return ReadVarint(end).status();
      case kFixed64: return SkipBytes(8, end);
      case kFixed32: return SkipBytes(4, end);
      case kBytes: {
        SHARDMLP_ASSIGN_OR_RETURN(const int64_t bytes_end, ReadLength(end));
        return SkipBytes(bytes_end - position_, end);
      }
      case kGroup:
        if (groups.size() == kMaxGroupDepth) return Malformed(position_, "groups are nested too deeply");
        groups.push_back(tag.field);
        return absl::OkStatus();
      case kGroupEnd:
        if (groups.empty() || groups.back() != tag.field) return Malformed(position_, "a group ends that was not open");
        groups.pop_back();
        return absl::OkStatus();
      default: return Malformed(position_, absl::StrCat("unknown wire type ", tag.type));
    }
  }

  absl::Status SkipBytes(int64_t count, int64_t end) {
    if (count > end - position_) {
      return Malformed(position_, absl::StrCat("a field of ", count, " bytes where ", end - position_, " are left"));
    }
    while (count > 0) {
      const auto step = std::min<int64_t>(count, Current().size() - offset_);
      Advance(step);
      count -= step;
    }
    return absl::OkStatus();
  }

  // The slice that the next byte lies in; there is one.
  const grpc::Slice& Current() {
    while (offset_ == static_cast<int64_t>(slices_[index_].size())) {
      ++index_;
      offset_ = 0;
    }
    return slices_[index_];
  }

  uint8_t NextByte() {
    const uint8_t byte = Current().begin()[offset_];
    Advance(1);
    return byte;
  }

  void Advance(int64_t count) {
    offset_ += count;
    position_ += count;
  }

  std::vector<grpc::Slice> slices_;
  size_t index_ = 0;
  int64_t offset_ = 0;  // in slices_[index_]
  int64_t position_ = 0;
  int64_t size_ = 0;
};

absl::Status ReadShard(Reader& reader, int64_t end, WireShard& shard) {
  while (reader.position() < end) {
    SHARDMLP_ASSIGN_OR_RETURN(const Tag tag, reader.ReadTag(end));
    const int payload = tag.field - kFirstPayloadField;
    if (tag.type == kVarint && (tag.field == kRowOffsetField || tag.field == kRowCountField)) {
      SHARDMLP_ASSIGN_OR_RETURN(const uint64_t value, reader.ReadVarint(end));
      (tag.field == kRowOffsetField ? shard.row_offset : shard.row_count) = static_cast<int64_t>(value);
    } else if (tag.type == kBytes && payload >= 0 && payload < static_cast<int>(shard.payloads.size())) {
      SHARDMLP_ASSIGN_OR_RETURN(const int64_t bytes_end, reader.ReadLength(end));
      shard.payloads[payload] = WirePayload(reader.Take(bytes_end));
    } else {
      SHARDMLP_RETURN_IF_ERROR(reader.Skip(tag, end));
    }
  }
  return absl::OkStatus();
}

void AppendVarint(uint64_t value, std::string& to) {
  for (; value >= 0x80; value >>= 7) to.push_back(static_cast<char>(value | 0x80));
  to.push_back(static_cast<char>(value));
}

void AppendTag(int field, WireType type, std::string& to) {
  AppendVarint(static_cast<uint64_t>(field) << 3 | type, to);
}

int64_t SizeOf(const std::vector<grpc::Slice>& pieces) {
  int64_t size = 0;
  for (const grpc::Slice& piece : pieces) size += static_cast<int64_t>(piece.size());
  return size;
}

}  // namespace

WirePayload::WirePayload(std::vector<grpc::Slice> pieces) : pieces_(std::move(pieces)), present_(true) {
  ends_.reserve(pieces_.size());
  int64_t end = 0;
  for (const grpc::Slice& piece : pieces_) ends_.push_back(end += static_cast<int64_t>(piece.size()));
}

void WirePayload::CopyTo(int64_t offset, int64_t count, void* to) const {
  auto index = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), offset) - ends_.begin());
  auto* out = static_cast<char*>(to);
  while (count > 0) {
    const int64_t step = std::min(count, ends_[index] - offset);
    std::memcpy(out, pieces_[index].end() - (ends_[index] - offset), step);
    out += step;
    offset += step;
    count -= step;
    ++index;
  }
}

absl::StatusOr<WireMessage> ReadWireMessage(const grpc::ByteBuffer& buffer, int shard_field) {
  std::vector<grpc::Slice> slices;
  if (buffer.Valid() && !buffer.Dump(&slices).ok()) return Malformed(0, "its bytes can't be read");
  Reader reader(std::move(slices));
  WireMessage message;
  while (reader.position() < reader.size()) {
    SHARDMLP_ASSIGN_OR_RETURN(const Tag tag, reader.ReadTag(reader.size()));
    if (tag.type != kBytes || tag.field > shard_field + 1) {
      SHARDMLP_RETURN_IF_ERROR(reader.Skip(tag, reader.size()));
      continue;
    }
    SHARDMLP_ASSIGN_OR_RETURN(const int64_t end, reader.ReadLength(reader.size()));
    if (message.field != tag.field) message = WireMessage{.field = tag.field, .shard = {}, .body = {}};
    if (tag.field == shard_field) {
      SHARDMLP_RETURN_IF_ERROR(ReadShard(reader, end, message.shard));
    } else {
      for (const grpc::Slice& piece : reader.Take(end)) {
        message.body.append(reinterpret_cast<const char*>(piece.begin()), piece.size());
      }
    }
  }
  return message;
}

grpc::ByteBuffer MakeWireShard(int shard_field, int64_t row_offset, int64_t row_count,
                               absl::Span<const std::vector<grpc::Slice>> payloads) {
  std::string rows;
  AppendTag(kRowOffsetField, kVarint, rows);
  AppendVarint(static_cast<uint64_t>(row_offset), rows);
  AppendTag(kRowCountField, kVarint, rows);
  AppendVarint(static_cast<uint64_t>(row_count), rows);

  // What comes ahead of each payload.
  std::vector<std::string> prefixes;
  int64_t size = 0;
  for (size_t i = 0; i < payloads.size(); ++i) {
    std::string& prefix = prefixes.emplace_back(i == 0 ? rows : "");
    const int64_t payload_size = SizeOf(payloads[i]);
    AppendTag(kFirstPayloadField + static_cast<int>(i), kBytes, prefix);
    AppendVarint(static_cast<uint64_t>(payload_size), prefix);
    size += static_cast<int64_t>(prefix.size()) + payload_size;
  }

  std::string start;
  AppendTag(shard_field, kBytes, start);
  AppendVarint(static_cast<uint64_t>(size), start);
  prefixes.front().insert(0, start);
  std::vector<grpc::Slice> slices;
  for (size_t i = 0; i < payloads.size(); ++i) {
    slices.emplace_back(prefixes[i]);
    slices.insert(slices.end(), payloads[i].begin(), payloads[i].end());
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

grpc::ByteBuffer MakeWireMessage(const google::protobuf::MessageLite& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace shardmlp
