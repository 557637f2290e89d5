#include "server/rpc/shard_stream.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/status.h"
#include "proto/wire.h"
#include "server/rpc/convert.h"

namespace shardmlp {
namespace {

// The result's alternative in ForwardResponse and BackwardResponse.
constexpr int kResultField = 1;

// Keeps result memory for as long as gRPC holds a slice of it.
struct Loan {
  std::shared_ptr<void> result;
  std::shared_ptr<void> count;
  static void Return(void* loan) { std::unique_ptr<Loan>(static_cast<Loan*>(loan)).reset(); }
};

// `data` itself, not a copy.
grpc::Slice Lend(const char* data, int64_t size, std::unique_ptr<Loan> loan) {
  return grpc::Slice(const_cast<char*>(data), static_cast<size_t>(size), &Loan::Return, loan.release());
}

}  // namespace

ShardStream* ShardStream::Start(const ShardStreamContext& context, Pass pass, RpcMetrics& method,
                                grpc::CallbackServerContext* call) {
  const absl::StatusOr<Engine*> engine = context.engine.Get(*call);
  auto stream = std::make_shared<ShardStream>(context, engine, pass, method, call);
  stream->Read();
  stream->UpdateWaiting(/*progress=*/true);
  context.streams.Add(stream);
  if (!engine.ok()) stream->Stop(engine.status());
  return stream.get();
}

ShardStream::ShardStream(const ShardStreamContext& context, const absl::StatusOr<Engine*>& engine, Pass pass,
                         RpcMetrics& method, grpc::CallbackServerContext* call)
    : context_(context),
      pass_(pass),
      record_(context.metrics, method, *call),
      receiver_(engine, pass, context.limits.max_message_bytes, *this),
      call_(call) {}

void ShardStream::OnReadDone(bool ok) {
  NoteAndDrive([&](Facts& facts) { facts.read = ok; });
}

void ShardStream::OnWriteDone(bool ok) {
  NoteAndDrive([&](Facts& facts) { facts.written = ok; });
}

void ShardStream::OnCancel() { Stop(ClientGone()); }

void ShardStream::OnDone() {
  {
    absl::MutexLock lock(&mutex_);
    call_ = nullptr;
  }
  context_.streams.Remove(shared_from_this());
}

void ShardStream::OnRoom() {
  NoteAndWake([](Facts& facts) { facts.room = true; });
}

void ShardStream::OnResult(CallResult result) {
  NoteAndWake([&](Facts& facts) { facts.results.push_back(std::move(result)); });
}

void ShardStream::OnFinished(absl::StatusOr<CallSummary> summary) {
  NoteAndWake([&](Facts& facts) { facts.outcome = std::move(summary); });
}

void ShardStream::Stop(const absl::Status& status) {
  NoteAndDrive([&](Facts& facts) {
    if (!facts.stop.has_value()) facts.stop = status;
  });
}

void ShardStream::CheckStall(absl::Time now) {
  const absl::Duration timeout = context_.streams.stall_timeout();
  {
    absl::MutexLock lock(&mutex_);
    if (!waiting_since_.has_value() || now - *waiting_since_ < timeout) return;
    // The client has not even taken the status; what gRPC still holds for it is dropped.
    if (ending_ && call_ != nullptr) call_->TryCancel();
    if (ending_) return;
  }
  Stop(Error(absl::StatusCode::kUnavailable, Reason::kStalled,
             absl::StrCat("the client neither sent nor took a message for ", absl::FormatDuration(timeout))));
}

void ShardStream::NoteAndDrive(absl::FunctionRef<void(Facts&)> note) {
  {
    absl::MutexLock lock(&mutex_);
    note(facts_);
  }
  Drive();
}

void ShardStream::NoteAndWake(absl::FunctionRef<void(Facts&)> note) {
  // The stream may end, and everyone else let go of it, as soon as the fact is noted.
  auto self = shared_from_this();
  {
    absl::MutexLock lock(&mutex_);
    note(facts_);
    if (driving_) return;  // the driver looks again before it leaves
  }
  context_.streams.Wake(std::move(self));
}

void ShardStream::Drive() {
  mutex_.Lock();
  if (driving_) {
    mutex_.Unlock();
    return;
  }
  driving_ = true;
  while (facts_.any()) {
    Facts facts = std::exchange(facts_, {});
    mutex_.Unlock();
    Act(std::move(facts));
    mutex_.Lock();
  }
  driving_ = false;
  mutex_.Unlock();
}

void ShardStream::Act(Facts facts) {
  if (facts.written.has_value()) {
    writing_ = false;
    sending_.Clear();
    context_.metrics.ObserveStage(pass_, Stage::kSend, absl::Now() - write_started_);
  }
  if (facts.read.has_value()) {
    reading_ = false;
    closed_ = !*facts.read;
    context_.metrics.ObserveStage(pass_, Stage::kReceive, absl::Now() - read_started_);
  }
  if (finished_) return;
  if (facts.stop.has_value()) Fail(*facts.stop);
  if (facts.written == false) Fail(ClientGone());
  if (!status_.has_value()) {
    for (const CallResult& result : facts.results) QueueResult(result);
    if (facts.outcome.has_value()) ActOnOutcome(*facts.outcome);
  }
  Send();  // ahead of the input, so that gRPC sends while the engine copies what was received
  ActOnInput(facts);
  Send();
  UpdateWaiting(facts.read.has_value() || facts.written.has_value());
}

void ShardStream::ActOnOutcome(const absl::StatusOr<CallSummary>& summary) {
  status_ = summary.status();
  if (summary.ok()) {
    outgoing_.push_back(MakeWireMessage(*MakeCallEnd(pass_, *summary)));
  } else {
    outgoing_.clear();
  }
}

void ShardStream::ActOnInput(const Facts& facts) {
  if (finished_ || failed() || !(facts.read.has_value() || facts.room)) return;
  absl::Status status;
  if (facts.read == true) {
    status = receiver_.Receive(incoming_);
    incoming_.Clear();
  } else if (facts.read == false) {
    status = receiver_.Close();
    if (!status.ok() && CancelledByClient()) status = ClientGone();
  } else {
    status = receiver_.Resume();
  }
  if (!status.ok()) {
    Fail(status);
  } else if (!reading_ && !closed_ && !receiver_.blocked()) {
    Read();
  }
}

void ShardStream::QueueResult(const CallResult& result) {
  const int64_t row_bytes = result.byte_count / result.row_count;
  const int64_t max_rows = std::max<int64_t>(context_.limits.preferred_shard_bytes / row_bytes, 1);
  for (int64_t begin = 0; begin < result.row_count; begin += max_rows) {
    const int64_t rows = std::min(max_rows, result.row_count - begin);
    auto loan = std::make_unique<Loan>(Loan{result.hold, context_.streams.loan()});
    const std::vector<grpc::Slice> payload = {Lend(result.data + begin * row_bytes, rows * row_bytes, std::move(loan))};
    outgoing_.push_back(MakeWireShard(kResultField, result.row_offset + begin, rows, {payload}));
  }
}

void ShardStream::Send() {
  if (finished_ || writing_) return;
  if (!outgoing_.empty()) {
    sending_ = std::move(outgoing_.front());
    outgoing_.pop_front();
    writing_ = true;
    write_started_ = absl::Now();
    StartWrite(&sending_);
  } else if (status_.has_value()) {
    finished_ = true;
    Finish(record_.End(*status_, receiver_.ids()));
  }
}

void ShardStream::Read() {
  reading_ = true;
  read_started_ = absl::Now();
  StartRead(&incoming_);
}

void ShardStream::Fail(const absl::Status& status) {
  if (failed()) return;
  status_ = status;
  receiver_.Cancel();
  outgoing_.clear();
}

void ShardStream::UpdateWaiting(bool progress) {
  const bool waiting = finished_ || writing_ || (reading_ && !receiver_.ended());
  absl::MutexLock lock(&mutex_);
  if (!waiting) {
    waiting_since_.reset();
  } else if (progress || !waiting_since_.has_value()) {
    waiting_since_ = absl::Now();
  }
  ending_ = finished_ || failed();
}

bool ShardStream::CancelledByClient() {
  absl::MutexLock lock(&mutex_);
  return call_ != nullptr && call_->IsCancelled();
}

}  // namespace shardmlp
