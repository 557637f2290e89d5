#include "tests/sync/hub_group.h"

#include <cstring>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

namespace shardmlp::testing {
namespace {

using Matrices = absl::Span<const MatrixView>;

template <typename T>
void SumInto(const std::vector<Matrices>& parts, size_t m) {
  const MatrixView& first = parts[0][m];
  for (int64_t row = 0; row < first.rows; ++row) {
    for (int64_t col = 0; col < first.cols; ++col) {
      T sum = 0;
      for (const Matrices& part : parts) sum += part[m].as<T>()[row * part[m].row_stride + col];
      for (const Matrices& part : parts) part[m].as<T>()[row * part[m].row_stride + col] = sum;
    }
  }
}

absl::Status Sum(const std::vector<Matrices>& parts) {
  for (size_t m = 0; m < parts[0].size(); ++m) {
    switch (parts[0][m].dtype) {
      case DType::kF32: SumInto<float>(parts, m); break;
      case DType::kF64: SumInto<double>(parts, m); break;
      default: return absl::InvalidArgumentError(absl::StrCat("no sum of ", Name(parts[0][m].dtype)));
    }
  }
  return absl::OkStatus();
}

absl::Status CopyFrom(int root, const std::vector<Matrices>& parts) {
  for (const Matrices& part : parts) {
    for (size_t m = 0; m < part.size(); ++m) {
      for (int64_t row = 0; row < part[m].rows; ++row) {
        const MatrixView from = parts[root][m].Rows(row, 1);
        std::memmove(part[m].Rows(row, 1).data, from.data, from.byte_count());
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckEqual(const std::vector<Matrices>& parts) {
  const auto shapes = [](Matrices part) {
    std::string text;
    for (const MatrixView& matrix : part) absl::StrAppend(&text, matrix.ToString(), " ");
    return text;
  };
  for (size_t rank = 1; rank < parts.size(); ++rank) {
    if (shapes(parts[rank]) == shapes(parts[0])) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rank 0 has ", shapes(parts[0]), "and rank ", rank, " has ", shapes(parts[rank])));
  }
  return absl::OkStatus();
}

// Where the ranks meet: the last to come does the work, while the others wait.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size), parts_(size) {}

  int size() const { return size_; }

  template <typename Work>
  absl::Status Meet(int rank, Matrices matrices, Work work) {
    absl::MutexLock lock(&mutex_);
    if (!failure_.ok()) return failure_;
    parts_[rank] = matrices;
    const int64_t round = round_;
    if (++arrived_ == size()) {
      result_ = CheckEqual(parts_);
      if (result_.ok()) result_ = work(parts_);
      arrived_ = 0;
      ++round_;
      return result_;
    }
    const auto over = [this, round] {
      mutex_.AssertReaderHeld();
      return round_ != round || !failure_.ok();
    };
    mutex_.Await(absl::Condition(&over));
    return round_ != round ? result_ : failure_;
  }

  void Abort(const absl::Status& reason) {
    absl::MutexLock lock(&mutex_);
    failure_.Update(reason);
  }

 private:
  const int size_;
  absl::Mutex mutex_;
  int64_t round_ ABSL_GUARDED_BY(mutex_) = 0;
  int arrived_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status result_ ABSL_GUARDED_BY(mutex_);  // of the last round
  std::vector<Matrices> parts_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

class HubGroup final : public ReplicaGroup {
 public:
  HubGroup(std::shared_ptr<Meeting> meeting, int rank) : meeting_(std::move(meeting)), rank_(rank) {}
  ~HubGroup() override { meeting_->Abort(absl::CancelledError("the group was destroyed")); }

  int rank() const override { return rank_; }
  int size() const override { return meeting_->size(); }
  bool device_memory() const override { return false; }

  absl::Status AllReduceSum(Matrices matrices) override { return meeting_->Meet(rank_, matrices, Sum); }
  absl::Status Broadcast(int root, Matrices matrices) override {
    return meeting_->Meet(rank_, matrices, [root](const auto& parts) { return CopyFrom(root, parts); });
  }
  void Abort(absl::Status reason) override { meeting_->Abort(reason); }

 private:
  const std::shared_ptr<Meeting> meeting_;
  const int rank_;
};

}  // namespace

std::vector<std::shared_ptr<ReplicaGroup>> MakeHubGroup(int size) {
  const auto meeting = std::make_shared<Meeting>(size);
  std::vector<std::shared_ptr<ReplicaGroup>> groups;
  for (int rank = 0; rank < size; ++rank) groups.push_back(std::make_shared<HubGroup>(meeting, rank));
  return groups;
}

}  // namespace shardmlp::testing
