#include "server/engine/replica_sync.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/status.h"
#include "server/engine/memory_plan.h"

namespace shardmlp {
namespace {

constexpr size_t kFacts = 5;  // ahead of the checksums in a row

// Numbers that a double holds whole.
double Low(uint64_t value) { return static_cast<double>(value & 0xffffffff); }
double High(uint64_t value) { return static_cast<double>(value >> 32); }

void Append(uint64_t checksum, std::vector<double>& row) {
  row.push_back(High(checksum));
  row.push_back(Low(checksum));
}

}  // namespace

ReplicaSync::ReplicaSync(Backend& backend, const ModelSpec& model, Parameters& parameters, const Generation& generation,
                         OnDevice on_device)
    : backend_(backend),
      model_(model),
      parameters_(parameters),
      generation_(generation),
      on_device_(std::move(on_device)) {}

bool ReplicaSync::sums_in_place() const {
  return backend_.device().unified_memory || generation_.group->device_memory();
}

absl::Status ReplicaSync::CopyOnDevice(ConstMatrixView from, MatrixView to) {
  SHARDMLP_RETURN_IF_ERROR(backend_.Copy(Stream::kCompute, from, to));
  SHARDMLP_ASSIGN_OR_RETURN(const std::unique_ptr<Event> event, backend_.Record(Stream::kCompute));
  return backend_.Synchronize(*event);
}

absl::Status ReplicaSync::Run(const std::vector<MatrixView>& matrices, Memory memory, const Collective& collective,
                              const std::function<bool()>& wanted) {
  const Memory takes = generation_.group->device_memory() ? Memory::kDevice : Memory::kStaging;
  if (backend_.device().unified_memory || takes == memory) return collective(matrices);
  if (bounce_.data() == nullptr) {
    SHARDMLP_ASSIGN_OR_RETURN(bounce_, backend_.Allocate(takes, kBounceBytes));
  }
  for (const MatrixView& matrix : matrices) {
    const MatrixView whole(matrix.data, 1, matrix.element_count(), matrix.dtype);
    const int64_t most = kBounceBytes / SizeOf(matrix.dtype);
    for (int64_t begin = 0; begin < whole.cols; begin += most) {
      const MatrixView part = whole.Cols(begin, std::min(most, whole.cols - begin));
      const MatrixView bounce = bounce_.View(1, part.cols, part.dtype);
      SHARDMLP_RETURN_IF_ERROR(on_device_([&] { return CopyOnDevice(part, bounce); }));
      SHARDMLP_RETURN_IF_ERROR(collective({bounce}));
      SHARDMLP_RETURN_IF_ERROR(on_device_([&] { return wanted() ? CopyOnDevice(bounce, part) : absl::OkStatus(); }));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::vector<double>>> ReplicaSync::Exchange(const std::vector<double>& row) {
  const int64_t cols = static_cast<int64_t>(row.size());
  SHARDMLP_ASSIGN_OR_RETURN(const Buffer buffer,
                            backend_.Allocate(Memory::kStaging, size() * cols * SizeOf(DType::kF64)));
  const MatrixView table = buffer.View(size(), cols, DType::kF64);  // [replicas, cols], 0 but for one's own row
  double* const values = table.as<double>();
  std::fill_n(values, table.element_count(), 0);
  std::copy(row.begin(), row.end(), values + generation_.group->rank() * cols);
  SHARDMLP_RETURN_IF_ERROR(Run({table}, Memory::kStaging, [&](absl::Span<const MatrixView> matrices) {
    return generation_.group->AllReduceSum(matrices);
  }));
  std::vector<std::vector<double>> rows;
  for (int64_t r = 0; r < table.rows; ++r) rows.emplace_back(values + r * cols, values + (r + 1) * cols);
  return rows;
}

absl::Status ReplicaSync::AppendChecksums(std::vector<double>& row, bool with_optimizer) {
  for (size_t layer = 0; layer < model_.layers.size(); ++layer) {
    const auto append = [&]() -> absl::Status {
      SHARDMLP_ASSIGN_OR_RETURN(const uint64_t checksum, parameters_.LayerChecksum(layer, with_optimizer));
      Append(checksum, row);
      return absl::OkStatus();
    };
    SHARDMLP_RETURN_IF_ERROR(backend_.device().unified_memory ? append() : on_device_(append));
  }
  return absl::OkStatus();
}

std::string ReplicaSync::Differences(const std::vector<std::vector<double>>& rows, size_t column,
                                     size_t columns) const {
  std::map<std::vector<double>, std::vector<int>> ranks;
  for (size_t r = 0; r < rows.size(); ++r) {
    const auto begin = rows[r].begin() + column;
    ranks[std::vector<double>(begin, begin + columns)].push_back(generation_.members[r].rank);
  }
  if (ranks.size() == 1) return "";
  const auto name = [](std::string* out, const auto& alike) {
    absl::StrAppend(out, alike.second.size() == 1 ? "rank " : "ranks ", absl::StrJoin(alike.second, " and "));
  };
  return absl::StrJoin(ranks, " against ", name);
}

absl::StatusOr<bool> ReplicaSync::CheckAlike(const StepPosition& position, bool wanted) {
  std::vector<double> row = {static_cast<double>(generation_.number), static_cast<double>(position.step),
                             static_cast<double>(position.attempt), static_cast<double>(position.weights_version),
                             wanted ? 1.0 : 0.0};
  SHARDMLP_RETURN_IF_ERROR(AppendChecksums(row, /*with_optimizer=*/false));
  SHARDMLP_ASSIGN_OR_RETURN(const auto rows, Exchange(row));
  std::vector<std::string> differences;
  const auto compare = [&](absl::string_view what, size_t column, size_t columns) {
    const std::string ranks = Differences(rows, column, columns);
    if (!ranks.empty()) differences.push_back(absl::StrCat(what, ": ", ranks));
  };
  compare("generation", 0, 1);
  compare("step", 1, 1);
  compare("attempt", 2, 1);
  compare("weights version", 3, 1);
  for (size_t n = 0; n < model_.layers.size(); ++n) {
    compare(absl::StrCat("the weights of layer ", model_.layers[n].layer), kFacts + 2 * n, 2);
  }
  if (!differences.empty()) {
    return Error(absl::StatusCode::kDataLoss, Reason::kReplicaDrift,
                 absl::StrCat("the replicas differ at step ", position.step, " (", absl::StrJoin(differences, "; "),
                              "); restore a checkpoint on all of them"));
  }
  return std::all_of(rows.begin(), rows.end(), [](const auto& facts) { return facts[kFacts - 1] == 1; });
}

absl::StatusOr<bool> ReplicaSync::StartedAlike(int64_t step) {
  std::string updates;
  for (const UpdateHistory& history : parameters_.updates()) {
    absl::StrAppend(&updates, history.count, " ", history.optimizer, ";");
  }
  std::vector<double> row = {static_cast<double>(step)};
  Append(XXH3_64bits(updates.data(), updates.size()), row);
  SHARDMLP_RETURN_IF_ERROR(AppendChecksums(row, /*with_optimizer=*/true));
  SHARDMLP_ASSIGN_OR_RETURN(const auto rows, Exchange(row));
  return Differences(rows, 0, row.size()).empty();
}

absl::Status ReplicaSync::SumGradients(const std::function<bool()>& wanted) {
  return Run(
      parameters_.all_gradients(), Memory::kDevice,
      [this](absl::Span<const MatrixView> matrices) { return generation_.group->AllReduceSum(matrices); }, wanted);
}

absl::StatusOr<StateHeader> ReplicaSync::ShareHeader(int root, const StateHeader& header) {
  const auto broadcast = [&](MatrixView matrix) {
    return Run({matrix}, Memory::kStaging,
               [&](absl::Span<const MatrixView> matrices) { return generation_.group->Broadcast(root, matrices); });
  };
  std::string text = Serialize(header);
  SHARDMLP_ASSIGN_OR_RETURN(const Buffer length, backend_.Allocate(Memory::kStaging, SizeOf(DType::kF64)));
  double& bytes = *static_cast<double*>(length.data());
  bytes = static_cast<double>(text.size());
  SHARDMLP_RETURN_IF_ERROR(broadcast(length.View(1, 1, DType::kF64)));
  text.resize(static_cast<size_t>(bytes));
  const int64_t words = static_cast<int64_t>(text.size()) / SizeOf(DType::kF32) + 1;
  SHARDMLP_ASSIGN_OR_RETURN(const Buffer buffer, backend_.Allocate(Memory::kStaging, words * SizeOf(DType::kF32)));
  std::memset(buffer.data(), 0, buffer.bytes());
  std::memcpy(buffer.data(), text.data(), text.size());
  SHARDMLP_RETURN_IF_ERROR(broadcast(buffer.View(1, words, DType::kF32)));
  std::memcpy(text.data(), buffer.data(), text.size());
  return ParseStateHeader(text);
}

absl::Status ReplicaSync::ShareTensors(int root) {
  return Run(parameters_.state(), Memory::kDevice,
             [&](absl::Span<const MatrixView> matrices) { return generation_.group->Broadcast(root, matrices); });
}

}  // namespace shardmlp
