#include "tests/engine/bytes.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"

namespace shardmlp::testing {
namespace {

// Converts between host matrices; the CPU backend has done so when Copy returns.
void Convert(ConstMatrixView from, MatrixView to) {
  static Backend& cpu = *MakeCpuBackend({.threads = 1}).value().release();
  const absl::Status status = cpu.Copy(Stream::kCompute, from, to);
  ASSERT_TRUE(status.ok()) << status;
}

}  // namespace

std::string Encode(const Dense& m, DType dtype) {
  std::string bytes(static_cast<size_t>(m.rows * m.cols * SizeOf(dtype)), '\0');
  Convert({m.values.data(), m.rows, m.cols, DType::kF64}, {bytes.data(), m.rows, m.cols, dtype});
  return bytes;
}

Dense Decode(const char* data, int64_t rows, int64_t cols, DType dtype) {
  Dense m(rows, cols);
  Convert({data, rows, cols, dtype}, {m.values.data(), rows, cols, DType::kF64});
  return m;
}

Dense RowsOf(const Dense& m, int64_t begin, int64_t count) {
  Dense rows(count, m.cols);
  std::copy_n(m.values.begin() + begin * m.cols, count * m.cols, rows.values.begin());
  return rows;
}

Dense Stacked(const std::vector<Dense>& parts) {
  Dense all(0, parts.front().cols);
  for (const Dense& part : parts) {
    all.rows += part.rows;
    all.values.insert(all.values.end(), part.values.begin(), part.values.end());
  }
  return all;
}

PieceSource::PieceSource(const std::string& bytes, int64_t piece_bytes)
    : size_(static_cast<int64_t>(bytes.size())), piece_bytes_(piece_bytes) {
  for (size_t at = 0; at < bytes.size(); at += piece_bytes) pieces_.push_back(bytes.substr(at, piece_bytes));
}

void PieceSource::CopyTo(int64_t offset, int64_t count, void* to) const {
  ASSERT_GE(offset, 0);
  ASSERT_GE(count, 0);
  ASSERT_LE(count, size_ - offset) << "read beyond the payload";
  for (int64_t done = 0; done < count;) {
    const std::string& piece = pieces_[(offset + done) / piece_bytes_];
    const int64_t within = (offset + done) % piece_bytes_;
    const int64_t bytes = std::min<int64_t>(count - done, piece.size() - within);
    std::memcpy(static_cast<char*>(to) + done, piece.data() + within, bytes);
    done += bytes;
  }
}

}  // namespace shardmlp::testing
