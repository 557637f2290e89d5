// A coordinator without network or time, and what replicas say to it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "server/sync/rendezvous/coordinator.h"

namespace shardmlp::testing {

// Connections that write down what they are sent.
class Wire final : public Coordinator::Carrier {
 public:
  void Send(int64_t connection, const v1::MeetResponse& response) override {
    if (!response.has_waiting()) sent[connection].push_back(Describe(response));
  }
  void End(int64_t connection, const absl::Status& why) override { ended[connection] = why; }

  // What was sent there since the last call.
  std::vector<std::string> Take(int64_t connection) { return std::exchange(sent[connection], {}); }

  std::map<int64_t, std::vector<std::string>> sent;
  std::map<int64_t, absl::Status> ended;

 private:
  static std::string Describe(const v1::MeetResponse& response) {
    if (response.has_gather()) {
      const v1::Gather& gather = response.gather();
      return absl::StrCat("gather ", gather.generation(), ": ", gather.index(), " of ", gather.member_count());
    }
    if (response.has_connect()) return absl::StrCat("connect: ", absl::StrJoin(response.connect().addresses(), " "));
    if (response.has_formed()) {
      std::string text = absl::StrCat("formed ", response.formed().generation(), ":");
      for (const v1::Member& member : response.formed().members()) absl::StrAppend(&text, " ", member.rank());
      return text;
    }
    if (response.has_agreed()) {
      const v1::Agreed& agreed = response.agreed();
      return absl::StrCat(agreed.index(), ": ", agreed.message(), " from ", agreed.rank());
    }
    if (response.has_stable()) return absl::StrCat("stable ", response.stable().index());
    if (response.has_lost()) {
      return absl::StrCat("lost ", response.lost().generation(), ": ", response.lost().reason());
    }
    return response.ShortDebugString();
  }
};

inline constexpr absl::Duration kMeetTimeout = absl::Seconds(25);

inline v1::Hello CoordinatorHello(int rank, int size) {
  v1::Hello hello;
  hello.set_rank(rank);
  hello.set_size(size);
  hello.set_model("tiny");
  hello.set_layers("0-3");
  hello.set_dtype("f32");
  return hello;
}

// A coordinator, and what replicas say to it. A connection is named by its number; here rank r's first is r + 1.
class CoordinatorTest : public ::testing::Test {
 protected:
  void Start(int size, OnLoss on_loss) {
    size_ = size;
    coordinator_.emplace(CoordinatorHello(0, size), on_loss, kMeetTimeout, wire_);
  }

  void Hello(int64_t connection, int rank) {
    v1::MeetRequest request;
    *request.mutable_hello() = CoordinatorHello(rank, size_);
    coordinator_->Receive(connection, request);
  }
  void Join(int64_t connection, const ReplicaState& state = {}, int64_t last_generation = 0) {
    v1::MeetRequest request;
    v1::ReplicaPosition& position = *request.mutable_join()->mutable_position();
    position.set_generation(state.generation);
    position.set_step(state.step);
    position.set_weights_version(state.weights_version);
    request.mutable_join()->set_last_generation(last_generation);
    coordinator_->Receive(connection, request);
  }
  void SendAddresses(int64_t connection, int64_t generation, int count) {
    v1::MeetRequest request;
    request.mutable_addresses()->set_generation(generation);
    for (int i = 0; i < count; ++i) request.mutable_addresses()->add_addresses(absl::StrCat(connection, "for", i));
    coordinator_->Receive(connection, request);
  }
  void SendConnected(int64_t connection, int64_t generation) {
    v1::MeetRequest request;
    request.mutable_connected()->set_generation(generation);
    coordinator_->Receive(connection, request);
  }
  void SendFailed(int64_t connection, int64_t generation, const std::string& error) {
    v1::MeetRequest request;
    request.mutable_failed()->set_generation(generation);
    request.mutable_failed()->set_error(error);
    coordinator_->Receive(connection, request);
  }
  void Propose(int64_t connection, int64_t generation, const std::string& message) {
    v1::MeetRequest request;
    request.mutable_propose()->set_generation(generation);
    request.mutable_propose()->set_message(message);
    coordinator_->Receive(connection, request);
  }
  void Acknowledge(int64_t connection, int64_t generation, int64_t index) {
    v1::MeetRequest request;
    request.mutable_acknowledge()->set_generation(generation);
    request.mutable_acknowledge()->set_index(index);
    coordinator_->Receive(connection, request);
  }
  void Admit(int64_t connection, int64_t generation, bool now) {
    v1::MeetRequest request;
    request.mutable_admit()->set_generation(generation);
    request.mutable_admit()->set_now(now);
    coordinator_->Receive(connection, request);
  }
  void Beat(int64_t connection) {
    v1::MeetRequest request;
    request.mutable_heartbeat();
    coordinator_->Receive(connection, request);
  }
  void Lose(int64_t connection) { coordinator_->Closed(connection, absl::UnavailableError("its connection ended")); }

  // The members' answers to Gather and Connect.
  void Mesh(const std::vector<int64_t>& connections, int64_t generation) {
    for (const int64_t c : connections) SendAddresses(c, generation, static_cast<int>(connections.size()));
    for (const int64_t c : connections) SendConnected(c, generation);
  }
  // All ranks join with equal states and hear Formed.
  void FormAll() {
    std::vector<int64_t> connections;
    for (int rank = 0; rank < size_; ++rank) {
      connections.push_back(rank + 1);
      Hello(rank + 1, rank);
      Join(rank + 1);
    }
    Mesh(connections, 1);
    wire_.sent.clear();
  }

  int size_ = 0;
  Wire wire_;
  std::optional<Coordinator> coordinator_;
};

}  // namespace shardmlp::testing
