// What becomes of connections that break between being accepted and their first message.
#include "core/transport/tensorpipe/steady_listeners.h"

#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "core/transport/tensorpipe/socket/error.h"
#include "gtest/gtest.h"
#include "tensorpipe/tensorpipe.h"
#include "tensorpipe/transport/connection.h"
#include "tensorpipe/transport/listener.h"

namespace distgrad {
namespace {

using tensorpipe::AbstractNopHolder;
using tensorpipe::Error;

// Breaks before its first message.
class FakeConnection final : public tensorpipe::transport::Connection {
 public:
  void read(read_callback_fn) override {}
  void read(void*, size_t, read_callback_fn) override {}
  void read(AbstractNopHolder&, read_nop_callback_fn fn) override {
    reads_.push_back(std::move(fn));
  }
  void write(const void*, size_t, write_callback_fn) override {}
  void write(const AbstractNopHolder&, write_callback_fn) override {}
  void setId(std::string) override {}
  void close() override { Break(); }

  void Break() {
    for (const auto& fn : std::exchange(reads_, {})) fn(MakeError("it is gone"));
  }

 private:
  std::deque<read_nop_callback_fn> reads_;
};

class FakeListener final : public tensorpipe::transport::Listener {
 public:
  void accept(accept_callback_fn fn) override { accepts_.push_back(std::move(fn)); }
  std::string addr() const override { return "here"; }
  void setId(std::string) override {}
  void close() override {
    for (const auto& fn : std::exchange(accepts_, {})) fn(MakeError("closed"), nullptr);
  }

  // False if nobody listens.
  bool Offer(std::shared_ptr<tensorpipe::transport::Connection> connection) {
    if (accepts_.empty()) return false;
    const auto accept = std::move(accepts_.front());
    accepts_.pop_front();
    accept(Error(), std::move(connection));
    return true;
  }

 private:
  std::deque<accept_callback_fn> accepts_;
};

class FakeTransport final : public tensorpipe::transport::Context {
 public:
  explicit FakeTransport(std::shared_ptr<FakeListener> listener) : listener_(std::move(listener)) {}

  std::shared_ptr<tensorpipe::transport::Connection> connect(std::string) override {
    return std::make_shared<FakeConnection>();
  }
  std::shared_ptr<tensorpipe::transport::Listener> listen(std::string) override {
    return listener_;
  }
  bool isViable() const override { return true; }
  const std::string& domainDescriptor() const override { return name_; }
  void setId(std::string) override {}
  void close() override { listener_->close(); }
  void join() override {}

 private:
  const std::shared_ptr<FakeListener> listener_;
  const std::string name_ = "fake";
};

// A listener serves on after connections that break early, and keeps nothing of them.
TEST(SteadyListenersTest, WhatBreaksEarlyIsGivenBack) {
  const auto listener = std::make_shared<FakeListener>();
  tensorpipe::Context context;
  context.registerTransport(0, "fake",
                            WithSteadyListeners(std::make_shared<FakeTransport>(listener)));
  context.registerChannel(0, "basic", tensorpipe::channel::basic::create());
  const auto listening = context.listen({"fake://here"});
  for (int i = 0; i < 3; ++i) {
    auto connection = std::make_shared<FakeConnection>();
    ASSERT_TRUE(listener->Offer(connection)) << "number " << i;
    connection->Break();
    const std::weak_ptr<FakeConnection> watch = connection;
    connection = nullptr;
    EXPECT_TRUE(watch.expired()) << "number " << i;
  }
  // One that is still to speak when all is closed.
  const auto last = std::make_shared<FakeConnection>();
  EXPECT_TRUE(listener->Offer(last));
  context.close();
  context.join();
}

}  // namespace
}  // namespace distgrad
