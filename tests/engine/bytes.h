// Matrices as bytes on the wire, and back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/matrix.h"
#include "server/engine/call.h"
#include "tests/kernels/dense.h"

namespace shardmlp::testing {

// Rows of `m`, row-major, rounded to `dtype`.
std::string Encode(const Dense& m, DType dtype);
Dense Decode(const char* data, int64_t rows, int64_t cols, DType dtype);

// Rows [begin, begin + count) of `m`.
Dense RowsOf(const Dense& m, int64_t begin, int64_t count);
// All of `parts`, one below the other. They have equal columns.
Dense Stacked(const std::vector<Dense>& parts);

// A payload that came in pieces of `piece_bytes`. Reading beyond it is a failure of the test.
class PieceSource final : public ByteSource {
 public:
  explicit PieceSource(const std::string& bytes, int64_t piece_bytes = 7);
  int64_t size() const override { return size_; }
  void CopyTo(int64_t offset, int64_t count, void* to) const override;

 private:
  int64_t size_ = 0;
  int64_t piece_bytes_ = 0;
  std::vector<std::string> pieces_;
};

}  // namespace shardmlp::testing
