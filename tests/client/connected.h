// A client and a session of it, for tests that are not about opening them.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "client/cpp/client.h"

namespace shardmlp::fake {

struct Connected {
  explicit Connected(const std::string& target, const ClientOptions& options = {},
                     const SessionOptions& session_options = {}) {
    auto connected = Client::Connect(target, options);
    EXPECT_TRUE(connected.ok()) << connected.status();
    client = *std::move(connected);
    auto opened = client->OpenSession(session_options);
    EXPECT_TRUE(opened.ok()) << opened.status();
    session = *std::move(opened);
  }

  std::unique_ptr<Client> client;
  std::unique_ptr<Session> session;
};

}  // namespace shardmlp::fake
