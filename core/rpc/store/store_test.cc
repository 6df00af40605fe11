// What every store must do, for each of the three; and two processes for those that span them.
#include "core/rpc/store.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/rpc/store/file_store.h"
#include "core/rpc/store/in_process_store.h"
#include "core/rpc/store/socket.h"
#include "core/rpc/store/store_errors.h"
#include "core/rpc/store/tcp_store.h"
#include "gtest/gtest.h"
#include "tests/testing/child_process.h"

namespace distgrad {
namespace {

absl::Time Soon() { return absl::Now() + absl::Milliseconds(30); }
absl::Time Later() { return absl::Now() + absl::Minutes(2); }

std::string NewPath() {
  static std::atomic<int> counter{0};
  return absl::StrCat(testing::TempDir(), "/store_", getpid(), "_", ++counter);
}

std::unique_ptr<TcpStore> Serve() {
  TcpStoreOptions options;
  options.is_server = true;
  options.deadline = Later();
  auto store = NewTcpStore(options);
  EXPECT_TRUE(store.ok()) << store.status();
  return store.ok() ? *std::move(store) : nullptr;
}

std::unique_ptr<TcpStore> Join(uint16_t port) {
  TcpStoreOptions options;
  options.port = port;
  options.deadline = Later();
  auto store = NewTcpStore(options);
  EXPECT_TRUE(store.ok()) << store.status();
  return store.ok() ? *std::move(store) : nullptr;
}

// The child's half of the two-process tests: answers "ping" with "pong", counts to 1000.
int RunChild(const std::string& kind, const std::string& where) {
  std::unique_ptr<Store> store;
  if (kind == "serve") {
    auto server = Serve();
    std::printf("%d\n", server->port());
    std::fflush(stdout);
    pause();
  }
  if (kind == "file") store = NewFileStore(where).value();
  if (kind == "tcp") store = Join(static_cast<uint16_t>(std::atoi(where.c_str())));
  const std::string ping = store->Get("ping", Later()).value();
  for (int i = 0; i < 200; ++i) store->Add("count", 1).value();
  return store->Set("pong", "answer to " + ping).ok() ? 0 : 1;
}

class Implementation {
 public:
  virtual ~Implementation() = default;
  virtual std::shared_ptr<Store> NewHandle() = 0;                   // all see one store
  virtual std::vector<std::string> ChildArguments() { return {}; }  // none: no second process
};

class InProcess : public Implementation {
  std::shared_ptr<Store> NewHandle() override { return store_; }
  const std::shared_ptr<Store> store_ = NewInProcessStore();
};

class File : public Implementation {
  std::shared_ptr<Store> NewHandle() override { return NewFileStore(path_).value(); }
  std::vector<std::string> ChildArguments() override { return {"--child", "file", path_}; }
  const std::string path_ = NewPath();
};

class Tcp : public Implementation {
  std::shared_ptr<Store> NewHandle() override {
    return std::exchange(first_, false) ? server_ : std::shared_ptr<Store>(Join(server_->port()));
  }
  std::vector<std::string> ChildArguments() override {
    return {"--child", "tcp", absl::StrCat(server_->port())};
  }
  const std::shared_ptr<TcpStore> server_ = Serve();
  bool first_ = true;
};

struct Parameter {
  std::string name;
  std::function<std::unique_ptr<Implementation>()> make;
};
std::ostream& operator<<(std::ostream& out, const Parameter& p) { return out << p.name; }

class StoreTest : public testing::TestWithParam<Parameter> {
 protected:
  const std::unique_ptr<Implementation> implementation_ = GetParam().make();
  const std::shared_ptr<Store> store_ = implementation_->NewHandle();
  const std::shared_ptr<Store> other_ = implementation_->NewHandle();
};

INSTANTIATE_TEST_SUITE_P(Stores, StoreTest,
                         testing::Values(Parameter{"in_process",
                                                   [] { return std::make_unique<InProcess>(); }},
                                         Parameter{"file", [] { return std::make_unique<File>(); }},
                                         Parameter{"tcp", [] { return std::make_unique<Tcp>(); }}),
                         [](const auto& info) { return info.param.name; });

TEST_P(StoreTest, WhatOneSetsTheOtherGets) {
  const std::string binary("\0\n\xff text", 8);
  for (const std::string& value :
       {std::string("value"), std::string(), binary, std::string(kMaxStoreValue, 'x')}) {
    ASSERT_TRUE(store_->Set("key", value).ok());
    const auto got = other_->Get("key", absl::InfinitePast());
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_TRUE(*got == value) << got->size() << " bytes instead of " << value.size();
  }
  ASSERT_TRUE(other_->Set("a/b c\"", "odd key").ok());
  EXPECT_EQ(store_->Get("a/b c\"", Later()).value(), "odd key");
}

TEST_P(StoreTest, GetWaits) {
  std::thread setter([&] {
    // Not before the other waits, mostly; right in any order.
    while (store_->Add("started", 0).value() == 0) std::this_thread::yield();
    EXPECT_TRUE(store_->Set("key", "late").ok());
  });
  EXPECT_TRUE(other_->Add("started", 1).ok());
  EXPECT_EQ(other_->Get("key", Later()).value(), "late");
  setter.join();
}

// One handle, many threads: a waiting Get holds nobody up.
TEST_P(StoreTest, OneHandleForAll) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      if (i > 0) {
        EXPECT_EQ(store_->Get(absl::StrCat("key", i - 1), Later()).value(), "x");
      }
      EXPECT_TRUE(store_->Set(absl::StrCat("key", i), "x").ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(StoreTest, DeadlineNamesTheKey) {
  for (const absl::Time deadline : {absl::InfinitePast(), absl::Now(), Soon()}) {
    const auto got = store_->Get("no\nsuch", deadline);
    EXPECT_EQ(got.status().code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_TRUE(absl::StrContains(got.status().message(), "\"no\\nsuch\"")) << got.status();
    EXPECT_GE(absl::Now(), deadline);
  }
  EXPECT_TRUE(store_->Set("no\nsuch", "now").ok());  // and all is well
  EXPECT_TRUE(store_->Get("no\nsuch", absl::InfinitePast()).ok());
}

TEST_P(StoreTest, Counters) {
  EXPECT_EQ(store_->Add("n", 0).value(), 0);
  EXPECT_EQ(store_->Add("n", 5).value(), 5);
  EXPECT_EQ(other_->Add("n", -7).value(), -2);
  EXPECT_EQ(other_->Get("n", absl::InfinitePast()).value(), "-2");
  EXPECT_EQ(store_->Add("big", int64_t{1} << 60).value(), int64_t{1} << 60);
  ASSERT_TRUE(store_->Set("text", "x1").ok());
  EXPECT_EQ(other_->Add("text", 1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(other_->Get("text", absl::InfinitePast()).value(), "x1");
}

TEST_P(StoreTest, CountersAreAtomic) {
  std::vector<std::thread> threads;
  std::vector<std::set<int64_t>> seen(4);
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const auto store = i < 2 ? store_ : other_;
      for (int k = 0; k < 50; ++k) seen[i].insert(store->Add("n", 1).value());
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<int64_t> all;
  for (auto& values : seen) all.merge(values);
  EXPECT_EQ(all.size(), 200u);
  EXPECT_EQ(*all.rbegin(), 200);
}

TEST_P(StoreTest, BadEntries) {
  const std::string long_key(kMaxStoreKey + 1, 'k');
  for (const std::string& key : {std::string(), long_key}) {
    EXPECT_EQ(store_->Set(key, "x").code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(store_->Get(key, Later()).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(store_->Add(key, 1).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(store_->Set("k", std::string(kMaxStoreValue + 1, 'x')).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(store_->Set("k", "x").ok());
}

TEST_P(StoreTest, Prefix) {
  PrefixStore one("1/", store_.get()), two("2/", other_.get()), also_one("1/", other_.get());
  ASSERT_TRUE(one.Set("key", "a").ok());
  EXPECT_FALSE(two.Get("key", absl::InfinitePast()).ok());
  EXPECT_EQ(also_one.Get("key", absl::InfinitePast()).value(), "a");
  EXPECT_EQ(store_->Get("1/key", absl::InfinitePast()).value(), "a");
  EXPECT_EQ(two.Add("n", 2).value(), 2);
  EXPECT_EQ(one.Add("n", 1).value(), 1);
}

TEST_P(StoreTest, TwoProcesses) {
  const std::vector<std::string> arguments = implementation_->ChildArguments();
  if (arguments.empty()) GTEST_SKIP() << "this store is of one process";
  ChildProcess child(arguments);
  ASSERT_TRUE(store_->Set("ping", "us").ok());
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(store_->Add("count", 1).ok());
  EXPECT_EQ(store_->Get("pong", Later()).value(), "answer to us");
  EXPECT_EQ(child.Wait(), 0);
  EXPECT_EQ(store_->Get("count", Later()).value(), "400");
}

// --- the file store

TEST(FileStoreTest, BadPaths) {
  for (const std::string& path :
       {std::string(), testing::TempDir(), std::string("/no/such/folder/file")}) {
    const auto store = NewFileStore(path);
    EXPECT_EQ(store.status().code(), absl::StatusCode::kInvalidArgument) << path;
    EXPECT_TRUE(absl::StrContains(store.status().message(), absl::StrCat("\"", path, "\"")));
  }
}

// --- the TCP store

TEST(TcpStoreTest, TakenPort) {
  const auto first = Serve();
  TcpStoreOptions options;
  options.is_server = true;
  options.port = first->port();
  const auto second = NewTcpStore(options);
  EXPECT_EQ(second.status(), absl::AlreadyExistsError(absl::StrCat(
                                 "cannot listen on port ", first->port(), ": already in use")));
}

TEST(TcpStoreTest, PortIsFreeAgain) {
  const uint16_t port = Serve()->port();
  TcpStoreOptions options;
  options.is_server = true;
  options.port = port;
  const auto again = NewTcpStore(options);
  EXPECT_TRUE(again.ok()) << again.status();
}

TEST(TcpStoreTest, BadHostsToServeOn) {
  for (const char* host : {"203.0.113.7", "no-such-host.invalid"}) {
    TcpStoreOptions options;
    options.is_server = true;
    options.host = host;
    const auto store = NewTcpStore(options);
    EXPECT_EQ(store.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(store.status().message(), host)) << store.status();
  }
}

TEST(TcpStoreTest, ServesOnEveryAddress) {
  TcpStoreOptions options;
  options.is_server = true;
  options.bind_host = "0.0.0.0";
  const auto server = NewTcpStore(options);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_TRUE(Join((*server)->port())->Set("key", "x").ok());
}

// A client may be there before the server, and before its name is.
TEST(TcpStoreTest, NobodyAnswers) {
  // A listener that never accepts, a port that refuses, a name that is not known.
  Socket silent = Socket::Listen("127.0.0.1", 0).value();
  const uint16_t free_port = Socket::Listen("127.0.0.1", 0).value().LocalPort().value();
  const std::pair<std::string, uint16_t> cases[] = {
      {"127.0.0.1", silent.LocalPort().value()},
      {"127.0.0.1", free_port},
      {"no-such-host.invalid", 4711},
  };
  for (const auto& [host, port] : cases) {
    TcpStoreOptions options;
    options.host = host;
    options.port = port;
    options.deadline = absl::Now() + absl::Milliseconds(50);
    const auto store = NewTcpStore(options);
    EXPECT_EQ(store.status().code(), absl::StatusCode::kDeadlineExceeded) << store.status();
    EXPECT_TRUE(absl::StrContains(store.status().message(), absl::StrCat(host, ":", port)))
        << store.status();
    EXPECT_GE(absl::Now(), options.deadline);
  }
  TcpStoreOptions no_port;
  EXPECT_EQ(NewTcpStore(no_port).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(TcpStoreTest, ServerIsKilled) {
  ChildProcess server({"--child", "serve", ""});
  const auto store = Join(static_cast<uint16_t>(std::stoi(server.ReadLine())));
  ASSERT_TRUE(store->Set("key", "x").ok());
  std::thread waiter([&] {
    const auto got = store->Get("never", Later());
    EXPECT_EQ(got.status().code(), absl::StatusCode::kUnavailable) << got.status();
  });
  server.Signal(SIGKILL);
  server.Wait();
  waiter.join();
  EXPECT_EQ(store->Set("key", "y").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(store->Get("key", Later()).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(store->Add("n", 1).status().code(), absl::StatusCode::kUnavailable);
}

// A server that is there but does nothing any more.
TEST(TcpStoreTest, ServerHangs) {
  ChildProcess server({"--child", "serve", ""});
  const auto store = Join(static_cast<uint16_t>(std::stoi(server.ReadLine())));
  server.Signal(SIGSTOP);
  EXPECT_EQ(store->Get("key", Soon()).status().code(), absl::StatusCode::kDeadlineExceeded);
  server.Signal(SIGCONT);
  EXPECT_EQ(store->Get("key", Soon()).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc == 4 && std::string(argv[1]) == "--child") return distgrad::RunChild(argv[2], argv[3]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
