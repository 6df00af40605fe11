// What every store must do, for each of the three; and two processes for those that span them.
#include "core/membership/store.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <malloc.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <list>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "core/base/descriptors.h"
#include "core/membership/store/file_store.h"
#include "core/membership/store/in_process_store.h"
#include "core/membership/store/store_errors.h"
#include "core/membership/store/store_server.h"
#include "core/membership/store/tcp_store.h"
#include "core/membership/store/tcp_store_protocol.h"
#include "core/net/certificates.h"
#include "core/net/handshake.h"
#include "core/net/socket.h"
#include "gtest/gtest.h"
#include "tests/testing/certificate_strangers.h"
#include "tests/testing/certificates.h"
#include "tests/testing/child_process.h"
#include "tests/testing/fail_allocation.h"
#include "tests/testing/free_port.h"
#include "tests/testing/no_descriptors.h"
#include "tests/testing/no_tls.h"
#include "tests/testing/tcp_proxy.h"
#include "tests/testing/tls_relay.h"
#include "tests/testing/wall_clock.h"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace {

// Is told when the next call of connect() is over, which reaches its own socket.
std::atomic<absl::Notification*> connects_to_itself{nullptr};

}  // namespace

// Stands before that of libc, and has the kernel choose the port that is connected to, as it does
// now and then where nobody listens.
extern "C" int connect(int fd, const sockaddr* address, socklen_t size) {
  static auto* const real = reinterpret_cast<decltype(connect)*>(dlsym(RTLD_NEXT, "connect"));
  absl::Notification* const connected = connects_to_itself.exchange(nullptr);
  if (connected == nullptr) return real(fd, address, size);
  EXPECT_EQ(bind(fd, address, size), 0);
  const int result = real(fd, address, size), error = errno;
  connected->Notify();
  errno = error;
  return result;
}

namespace distgrad {
namespace {

absl::Time Soon() { return absl::Now() + absl::Milliseconds(30); }
absl::Time Later() { return absl::Now() + absl::Minutes(2); }

std::string NewPath() {
  static std::atomic<int> counter{0};
  return absl::StrCat(testing::TempDir(), "/store_", getpid(), "_", ++counter);
}

// For the files of certificates.
std::string NewFolder() {
  static std::atomic<int> counter{0};
  return absl::StrCat(std::getenv("TEST_TMPDIR"), "/authority", ++counter);
}

std::unique_ptr<TcpStore> Serve(const std::string& cluster_key = "") {
  TcpStoreOptions options;
  options.is_server = true;
  options.cluster_key = cluster_key;
  options.deadline = Later();
  auto store = NewTcpStore(options);
  EXPECT_TRUE(store.ok()) << store.status();
  return store.ok() ? *std::move(store) : nullptr;
}

std::unique_ptr<TcpStore> Join(uint16_t port, const std::string& cluster_key = "") {
  TcpStoreOptions options;
  options.port = port;
  options.cluster_key = cluster_key;
  options.deadline = Later();
  auto store = NewTcpStore(options);
  EXPECT_TRUE(store.ok()) << store.status();
  return store.ok() ? *std::move(store) : nullptr;
}

std::unique_ptr<TcpStore> JoinLauncher(uint16_t port) {
  TcpStoreOptions options;
  options.port = port;
  options.of_launcher = true;
  options.deadline = Later();
  auto store = NewTcpStore(options);
  EXPECT_TRUE(store.ok()) << store.status();
  return store.ok() ? *std::move(store) : nullptr;
}

constexpr char kChildKey[] = "a secret of the whole job";

// The child's half of the two-process tests: answers "ping" with "pong", counts to 1000.
int RunChild(const std::string& kind, const std::string& where) {
  std::unique_ptr<Store> store;
  if (kind == "serve") {
    auto server = Serve();
    std::printf("%d\n", server->port());
    std::fflush(stdout);
    pause();
  }
  // With a key: what comes of its start, of a server as well as of a client.
  if (kind == "serve_with_key" || kind == "join_with_key") {
    TcpStoreOptions options;
    options.is_server = kind == "serve_with_key";
    options.port = static_cast<uint16_t>(std::atoi(where.c_str()));
    options.cluster_key = kChildKey;
    options.deadline = Later();
    const absl::Status status = NewTcpStore(options).status();
    std::printf("%s\n", status.ToString().c_str());
    return status.ok() ? 0 : 1;
  }
  if (kind == "only_serve_with_key") {
    Socket listener = Socket::Listen("127.0.0.1", 0).value();
    const uint16_t port = listener.LocalPort().value();
    const auto server = StoreServer::Start(std::move(listener), {.cluster_key = kChildKey});
    if (!server.ok()) return 1;
    std::printf("%d\n", port);
    std::fflush(stdout);
    pause();
  }
  if (kind == "file") store = NewFileStore(where).value();
  if (kind == "tcp") store = Join(static_cast<uint16_t>(std::atoi(where.c_str())));
  if (kind == "launcher") store = JoinLauncher(static_cast<uint16_t>(std::atoi(where.c_str())));
  const std::string ping = store->Get("ping", Later()).value();
  for (int i = 0; i < 200; ++i) store->Add("count", 1, Later()).value();
  return store->Set("pong", "answer to " + ping, Later()).ok() ? 0 : 1;
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

// c10d's server, as torchrun's agent has it; its child is a client of ours too.
class Launcher : public Implementation {
 public:
  Launcher() {
    c10d::TCPStoreOptions options;
    options.isServer = true;
    options.port = 0;
    options.waitWorkers = false;
    server_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }

 private:
  std::shared_ptr<Store> NewHandle() override { return JoinLauncher(server_->getPort()); }
  std::vector<std::string> ChildArguments() override {
    return {"--child", "launcher", absl::StrCat(server_->getPort())};
  }
  c10::intrusive_ptr<c10d::TCPStore> server_;
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

INSTANTIATE_TEST_SUITE_P(
    Stores, StoreTest,
    testing::Values(Parameter{"in_process", [] { return std::make_unique<InProcess>(); }},
                    Parameter{"file", [] { return std::make_unique<File>(); }},
                    Parameter{"tcp", [] { return std::make_unique<Tcp>(); }},
                    Parameter{"launcher", [] { return std::make_unique<Launcher>(); }}),
    [](const auto& info) { return info.param.name; });

TEST_P(StoreTest, WhatOneSetsTheOtherGets) {
  const std::string binary("\0\n\xff text", 8);
  for (const std::string& value :
       {std::string("value"), std::string(), binary, std::string(kMaxStoreValue, 'x')}) {
    ASSERT_TRUE(store_->Set("key", value, Later()).ok());
    const auto got = other_->Get("key", absl::InfinitePast());
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_TRUE(*got == value) << got->size() << " bytes instead of " << value.size();
  }
  ASSERT_TRUE(other_->Set("a/b c\"", "odd key", Later()).ok());
  EXPECT_EQ(store_->Get("a/b c\"", Later()).value(), "odd key");
}

TEST_P(StoreTest, GetWaits) {
  std::thread setter([&] {
    // Not before the other waits, mostly; right in any order.
    while (store_->Add("started", 0, Later()).value() == 0) std::this_thread::yield();
    EXPECT_TRUE(store_->Set("key", "late", Later()).ok());
  });
  EXPECT_TRUE(other_->Add("started", 1, Later()).ok());
  EXPECT_EQ(other_->Get("key", Later()).value(), "late");
  setter.join();
}

// Once the clock is set back between the deadline and all that is read afterwards; and once the
// kernel's clock is behind the one that the deadline was made by.
TEST_P(StoreTest, AWaitLastsNoLongerThoughTheClockIsSetBack) {
  const Deadline soon = Soon();
  SetWallClockAhead(-absl::Hours(1));
  const auto set_back = store_->Get("nobody sets it", soon);
  SetWallClockAhead(absl::Hours(1));
  const auto ahead = store_->Get("nobody sets it", Soon());
  SetWallClockAhead(absl::ZeroDuration());
  for (const absl::Status& status : {set_back.status(), ahead.status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  }
}

// One handle, many threads: a waiting Get holds nobody up.
TEST_P(StoreTest, OneHandleForAll) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      if (i > 0) {
        EXPECT_EQ(store_->Get(absl::StrCat("key", i - 1), Later()).value(), "x");
      }
      EXPECT_TRUE(store_->Set(absl::StrCat("key", i), "x", Later()).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(StoreTest, DeadlineNamesTheKey) {
  for (const absl::Time deadline : {absl::InfinitePast(), absl::Now(), Soon()}) {
    const auto got = store_->Get("no\nsuch", deadline);
    EXPECT_EQ(got.status().code(), absl::StatusCode::kNotFound);
    EXPECT_TRUE(absl::StrContains(got.status().message(), "\"no\\nsuch\"")) << got.status();
    EXPECT_GE(absl::Now(), deadline);
  }
  EXPECT_TRUE(store_->Set("no\nsuch", "now", Later()).ok());  // and all is well
  EXPECT_TRUE(store_->Get("no\nsuch", absl::InfinitePast()).ok());
}

using Values = std::vector<Store::Value>;
using Keys = std::vector<std::string>;

TEST_P(StoreTest, GetEachTellsWhatIsThere) {
  Keys keys;
  Values expected;
  for (int i = 0; i < 600; ++i) {
    keys.push_back(absl::StrCat("key", i));
    expected.push_back(std::nullopt);
    if (i % 3 != 0) continue;
    expected.back() = absl::StrCat(i);
    ASSERT_TRUE(store_->Set(keys.back(), absl::StrCat(i), Later()).ok());
  }
  const auto values = other_->GetEach(keys, absl::InfinitePast());
  ASSERT_TRUE(values.ok()) << values.status();
  EXPECT_TRUE(*values == expected);
  EXPECT_EQ(other_->GetEach({}, Later()).value(), Values());
}

TEST_P(StoreTest, LongValuesComeInSeveralAnswers) {
  const std::string value(kMaxStoreValue, 'x');
  ASSERT_TRUE(store_->Set("long", value, Later()).ok());
  const auto values = other_->GetEach(Keys(12, "long"), Later());
  ASSERT_TRUE(values.ok()) << values.status();
  EXPECT_TRUE(*values == Values(12, value));
}

TEST_P(StoreTest, WhatIsDeletedIsGone) {
  ASSERT_TRUE(store_->Set("key", "x", Later()).ok());
  ASSERT_TRUE(store_->Add("n", 5, Later()).ok());
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(other_->Delete("key", Later()).ok());
    EXPECT_TRUE(other_->Delete("n", absl::InfinitePast()).ok());
    EXPECT_EQ(store_->GetEach(Keys{"key", "n"}, Later()).value(), Values(2));
  }
  EXPECT_EQ(store_->Add("n", 1, Later()).value(), 1);
  ASSERT_TRUE(store_->Set("key", "y", Later()).ok());
  EXPECT_EQ(other_->Get("key", Later()).value(), "y");
}

TEST_P(StoreTest, AwaitChangeHearsOfEachKindOfChange) {
  const Keys keys = {"a", "n", "gone"};
  ASSERT_TRUE(store_->Set("gone", "x", Later()).ok());
  Values seen = {std::nullopt, std::nullopt, "x"};
  const std::function<void()> changes[] = {
      [&] { EXPECT_TRUE(store_->Set("a", "1", Later()).ok()); },
      [&] { EXPECT_TRUE(store_->Set("a", "", Later()).ok()); },
      [&] { EXPECT_TRUE(store_->Add("n", 3, Later()).ok()); },
      [&] { EXPECT_TRUE(store_->Delete("gone", Later()).ok()); },
  };
  const Values expected[] = {
      {"1", std::nullopt, "x"}, {"", std::nullopt, "x"}, {"", "3", "x"}, {"", "3", std::nullopt}};
  for (int i = 0; i < 4; ++i) {
    std::thread changing(changes[i]);
    const auto values = other_->AwaitChange(keys, seen, Deadline::Never());
    changing.join();
    ASSERT_TRUE(values.ok()) << values.status();
    EXPECT_EQ(*values, expected[i]);
    seen = *values;
  }
  // What has changed already, and what does not change.
  EXPECT_EQ(other_->AwaitChange(keys, Values(3), Deadline::Never()).value(), seen);
  for (const absl::Time deadline : {absl::InfinitePast(), Soon()}) {
    EXPECT_EQ(other_->AwaitChange(keys, seen, deadline).value(), seen);
  }
}

// One handle, on which some wait and others do not.
TEST_P(StoreTest, WhoWaitsForAChangeHoldsNobodyUp) {
  std::vector<std::thread> waiting;
  for (int i = 0; i < 3; ++i) {
    waiting.emplace_back([&, i] {
      EXPECT_TRUE(store_->Add("waiting", 1, Later()).ok());
      const Keys keys = {absl::StrCat("go", i)};
      const auto values = store_->AwaitChange(keys, Values(1), Deadline::Never());
      ASSERT_TRUE(values.ok()) << values.status();
      EXPECT_EQ(*values, Values{"now"});
    });
  }
  while (store_->Add("waiting", 0, Later()).value() < 3) std::this_thread::yield();
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(store_->Set("key", absl::StrCat(i), Later()).ok());
    EXPECT_EQ(store_->Get("key", Later()).value(), absl::StrCat(i));
  }
  for (int i = 2; i >= 0; --i) {
    EXPECT_TRUE(other_->Set(absl::StrCat("go", i), "now", Later()).ok());
    waiting[i].join();
  }
}

TEST_P(StoreTest, Counters) {
  EXPECT_EQ(store_->Add("n", 0, Later()).value(), 0);
  EXPECT_EQ(store_->Add("n", 5, Later()).value(), 5);
  EXPECT_EQ(other_->Add("n", -7, Later()).value(), -2);
  EXPECT_EQ(other_->Get("n", absl::InfinitePast()).value(), "-2");
  EXPECT_EQ(store_->Add("big", int64_t{1} << 60, Later()).value(), int64_t{1} << 60);
  ASSERT_TRUE(store_->Set("text", "x1", Later()).ok());
  EXPECT_EQ(other_->Add("text", 1, Later()).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(other_->Get("text", absl::InfinitePast()).value(), "x1");
}

TEST_P(StoreTest, CountersAreAtomic) {
  std::vector<std::thread> threads;
  std::vector<std::set<int64_t>> seen(4);
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const auto store = i < 2 ? store_ : other_;
      for (int k = 0; k < 50; ++k) seen[i].insert(store->Add("n", 1, Later()).value());
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
    EXPECT_EQ(store_->Set(key, "x", Later()).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(store_->Get(key, Later()).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(store_->Add(key, 1, Later()).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(store_->Delete(key, Later()).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::IsInvalidArgument(store_->GetEach(Keys{"k", key}, Later()).status()));
    EXPECT_TRUE(
        absl::IsInvalidArgument(store_->AwaitChange(Keys{key}, Values(1), Later()).status()));
  }
  EXPECT_EQ(store_->Set("k", std::string(kMaxStoreValue + 1, 'x'), Later()).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(store_->Set("k", "x", Later()).ok());
}

TEST_P(StoreTest, Prefix) {
  PrefixStore one("1/", store_), two("2/", other_), also_one("1/", other_);
  ASSERT_TRUE(one.Set("key", "a", Later()).ok());
  EXPECT_FALSE(two.Get("key", absl::InfinitePast()).ok());
  EXPECT_EQ(also_one.Get("key", absl::InfinitePast()).value(), "a");
  EXPECT_EQ(store_->Get("1/key", absl::InfinitePast()).value(), "a");
  EXPECT_EQ(two.Add("n", 2, Later()).value(), 2);
  EXPECT_EQ(one.Add("n", 1, Later()).value(), 1);
}

// One thread has no memory, and the others go on, as it does itself. What it was about has happened
// or has not, and all see the same. (A std::string keeps short texts without an allocation.)
TEST_P(StoreTest, WithoutMemoryItWorksAgain) {
  int attempts = 0;
  const auto attempt = [&](const Store::Value& before, const Store::Value& after,
                           const auto& operation) {
    bool failed = true;
    for (int nth = 0; failed; ++nth) {
      SCOPED_TRACE(nth);
      const std::string key = absl::StrCat("a key that takes an allocation ", ++attempts);
      const Keys keys = {key};
      if (before.has_value()) {
        ASSERT_EQ(store_->Set(key, *before, Later()), absl::OkStatus());
      }
      FailAllocation(nth);
      try {
        operation(key);
      } catch (
          const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): what comes next is looked at
      }
      failed = FailAllocation(-1);
      const Store::Value there = other_->GetEach(keys, Later()).value()[0];
      const Store::Value here = store_->GetEach(keys, Later()).value()[0];
      ASSERT_TRUE(here == after || (failed && here == before)) << here.value_or("nothing");
      ASSERT_TRUE(there == here || there == before) << there.value_or("nothing");
      ASSERT_EQ(store_->Set(key, "value", Later()), absl::OkStatus());
      ASSERT_EQ(store_->Get(key, Later()).value(), "value");
    }
  };
  const std::string value(100, 'v');
  const Store::Value none;
  const auto set = [&](const std::string& key) { store_->Set(key, value, Later()).IgnoreError(); };
  attempt(none, value, set);
  attempt("short", value, set);
  attempt(value, value, [&](const std::string& key) { store_->Get(key, Later()).IgnoreError(); });
  attempt(value, value, [&](const std::string& key) {
    store_->GetEach(Keys{key, "other"}, Later()).IgnoreError();
  });
  const auto add = [&](const std::string& key) { store_->Add(key, 1, Later()).IgnoreError(); };
  attempt(none, "1", add);
  attempt("999999999999999", "1000000000000000", add);  // which has a digit too many for that
  attempt(value, none, [&](const std::string& key) { store_->Delete(key, Later()).IgnoreError(); });
}

TEST_P(StoreTest, TwoProcesses) {
  const std::vector<std::string> arguments = implementation_->ChildArguments();
  if (arguments.empty()) GTEST_SKIP() << "this store is of one process";
  ChildProcess child(arguments);
  ASSERT_TRUE(store_->Set("ping", "us", Later()).ok());
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(store_->Add("count", 1, Later()).ok());
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

TEST(FileStoreTest, WhatIsNoStoreIsLeftAlone) {
  for (const std::string& text : {std::string("a letter to somebody\n"), std::string(3, '\0')}) {
    const std::string path = NewPath();
    std::ofstream(path) << text;
    const absl::Status status = NewFileStore(path).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), path)) << status;
    std::ifstream file(path);
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), text);
  }
}

// What is in it is for whoever runs the job, though the caller lets others read what it makes.
TEST(FileStoreTest, TheFileIsItsOwnersAlone) {
  const std::string path = NewPath();
  const mode_t before = umask(0);
  const auto store = NewFileStore(path);
  umask(before);
  ASSERT_TRUE(store.ok()) << store.status();
  struct stat file = {};
  ASSERT_EQ(stat(path.c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600u);
}

// Whoever shares the file sees at once that it is gone, and waits for nothing.
TEST(FileStoreTest, DeletedOrReplaced) {
  const std::string path = NewPath();
  const auto store = NewFileStore(path).value();
  ASSERT_TRUE(store->Set("key", "x", Later()).ok());
  std::filesystem::remove(path);
  for (int round = 0; round < 2; ++round) {
    for (const absl::Status& status :
         {store->Set("key", "y", Later()), store->Get("key", absl::InfiniteFuture()).status(),
          store->Add("n", 1, Later()).status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), path)) << status;
    }
    EXPECT_TRUE(NewFileStore(path).ok());  // another file in its place
  }
}

// That is no word of the store's, which others have still.
TEST(FileStoreTest, WhoHasNoDescriptorsLeftSaysSo) {
  const auto store = NewFileStore(NewPath()).value();
  ASSERT_TRUE(store->Set("key", "x", Later()).ok());
  {
    const NoDescriptors none;
    for (const absl::Status& status :
         {store->Set("key", "y", Later()), store->Get("key", absl::InfiniteFuture()).status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "ulimit -n")) << status;
    }
  }
  EXPECT_EQ(store->Get("key", absl::InfinitePast()).value(), "x");
}

// Somebody who has locked the file and is stopped holds nobody up for ever.
TEST(FileStoreTest, LockedByASleeper) {
  const std::string path = NewPath();
  const auto store = NewFileStore(path, absl::Milliseconds(30)).value();
  ASSERT_TRUE(store->Set("key", "x", Later()).ok());
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(flock(fd, LOCK_EX), 0);
  for (const absl::Status& status :
       {store->Set("key", "y", Later()), store->Get("key", Soon()).status(),
        store->Get("key", absl::InfiniteFuture()).status(), store->Add("n", 1, Later()).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "locked")) << status;
  }
  close(fd);
  EXPECT_EQ(store->Get("key", absl::InfinitePast()).value(), "x");
}

// A process that is killed while it writes leaves a piece behind the end, which the next one
// overwrites; and lengths that cannot be are an error.
TEST(FileStoreTest, PiecesAndLies) {
  const std::string path = NewPath();
  ASSERT_TRUE(NewFileStore(path).value()->Set("key", "x", Later()).ok());
  std::ofstream(path, std::ios::app) << std::string(100, '\xff');
  const auto store = NewFileStore(path).value();
  ASSERT_TRUE(store->Set("other", "y", Later()).ok());
  EXPECT_EQ(NewFileStore(path).value()->Get("other", absl::InfinitePast()).value(), "y");
  const auto size = std::filesystem::file_size(path);
  for (size_t at = 8; at < size; ++at) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    char byte = 0;
    file.seekg(at).read(&byte, 1);
    file.seekp(at).put(static_cast<char>(byte ^ 0x80)).flush();
    const auto lying = NewFileStore(path);
    if (lying.ok()) (*lying)->Get("key", absl::InfinitePast()).IgnoreError();
    file.seekp(at).put(byte);
  }
  EXPECT_EQ(NewFileStore(path).value()->Get("key", absl::InfinitePast()).value(), "x");
}

// What does not count any more is dropped. Whoever has not read for long sees what others see.
TEST(FileStoreTest, TheFileStaysShort) {
  const std::string path = NewPath();
  const auto store = NewFileStore(path).value();
  const auto other = NewFileStore(path).value();
  const auto seldom = NewFileStore(path).value();
  ASSERT_EQ(store->Set("first", "1", Later()), absl::OkStatus());
  ASSERT_EQ(store->Set("deleted", "1", Later()), absl::OkStatus());
  ASSERT_EQ(seldom->Get("deleted", Later()).value(), "1");
  ASSERT_EQ(other->Delete("deleted", Later()), absl::OkStatus());
  const Keys keys = {"first", "deleted", "key0", "key1", "count"};
  for (int i = 0; i < 400; ++i) {  // 40 MB
    Store& writer = i % 3 == 0 ? *other : *store;
    const std::string value = absl::StrCat(i, std::string(100000, 'x'));
    ASSERT_EQ(writer.Set(absl::StrCat("key", i % 2), value, Later()), absl::OkStatus());
    ASSERT_EQ(writer.Add("count", 1, Later()).value(), i + 1);
    ASSERT_LT(std::filesystem::file_size(path), 4u << 20) << i;
    if (i == 0) continue;
    const Values values = store->GetEach(keys, Later()).value();
    ASSERT_EQ(values[0], "1");
    ASSERT_EQ(values[1], std::nullopt);
    ASSERT_TRUE(values[2 + i % 2] == value) << i;
    ASSERT_TRUE(absl::StartsWith(*values[3 - i % 2], absl::StrCat(i - 1, "x"))) << i;
    ASSERT_EQ(values[4], absl::StrCat(i + 1));
    ASSERT_TRUE(other->GetEach(keys, Later()).value() == values) << i;
    if (i % 37 != 0) continue;
    ASSERT_TRUE(seldom->GetEach(keys, Later()).value() == values) << i;
    ASSERT_TRUE(NewFileStore(path).value()->GetEach(keys, Later()).value() == values) << i;
  }
}

// While it lives a write of this process ends where a file has so many bytes.
class ShortFiles {
 public:
  explicit ShortFiles(uint64_t bytes) {
    EXPECT_EQ(getrlimit(RLIMIT_FSIZE, &before_), 0);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  }
  ~ShortFiles() {
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &before_), 0);
    signal(SIGXFSZ, signal_);
  }
  ShortFiles(const ShortFiles&) = delete;
  ShortFiles& operator=(const ShortFiles&) = delete;

 private:
  const sighandler_t signal_ = signal(SIGXFSZ, SIG_IGN);
  rlimit before_ = {};
};

// It is what a process leaves that is killed there, also where it copies what counts: to the
// beginning of the file, or to its end.
TEST(FileStoreTest, AWriteThatEndsHalfwayChangesNothing) {
  const std::string path = NewPath();
  const auto store = NewFileStore(path).value();
  Keys keys;
  for (int i = 0; i < 10; ++i) keys.push_back(absl::StrCat("key", i));
  Values values(keys.size());
  for (int i = 0; i < 200; ++i) {
    const size_t at = i % keys.size();
    const std::string value(9000 + i, static_cast<char>('a' + i % 26));
    const uint64_t size = std::filesystem::file_size(path);
    for (const uint64_t limit : {uint64_t{50}, uint64_t{50000}, size + 50, size + 50000}) {
      SCOPED_TRACE(absl::StrCat(i, ": ", limit, " of ", size, " bytes"));
      bool is_set = false;
      {
        const ShortFiles short_files(limit);
        is_set = store->Set(keys[at], value, Later()).ok();
      }
      if (is_set) values[at] = value;
      ASSERT_TRUE(store->GetEach(keys, Later()).value() == values);
      ASSERT_TRUE(NewFileStore(path).value()->GetEach(keys, Later()).value() == values);
    }
    ASSERT_EQ(store->Set(keys[at], value, Later()), absl::OkStatus());
    values[at] = value;
  }
}

// What is to be dropped may stay; and a copy that ended halfway takes no room from others.
TEST(FileStoreTest, WhereThereIsNoRoomForACopyItGoesOnWithoutOne) {
  const std::string path = NewPath();
  const auto store = NewFileStore(path).value();
  const std::string value(9000, 'x');
  for (int i = 0; std::filesystem::file_size(path) < (1 << 20) + 100; ++i) {
    ASSERT_EQ(store->Set(absl::StrCat("key", i % 10), value, Later()), absl::OkStatus());
  }
  const uint64_t size = std::filesystem::file_size(path);
  {
    const ShortFiles short_files(size + 1000);
    EXPECT_EQ(store->Set("key", "value", Later()), absl::OkStatus());
    EXPECT_EQ(store->Delete("key1", Later()), absl::OkStatus());
    EXPECT_LT(std::filesystem::file_size(path), size + 100);
  }
  const auto other = NewFileStore(path).value();
  EXPECT_EQ(other->Get("key", Later()).value(), "value");
  EXPECT_TRUE(absl::IsNotFound(other->Get("key1", absl::InfinitePast()).status()));
  EXPECT_EQ(other->Get("key2", Later()).value(), value);
}

TEST(FileStoreTest, TheFileIsShortAgainWhenMostIsDeleted) {
  const std::string path = NewPath();
  const auto store = NewFileStore(path).value();
  const std::string value(100000, 'x');
  for (int i = 0; i < 40; ++i) {
    ASSERT_EQ(store->Set(absl::StrCat("key", i), value, Later()), absl::OkStatus());
  }
  for (int i = 1; i < 40; ++i) {
    ASSERT_EQ(store->Delete(absl::StrCat("key", i), Later()), absl::OkStatus());
  }
  for (int i = 0; i < 30; ++i) {  // 3 MB
    ASSERT_EQ(store->Set("key0", value, Later()), absl::OkStatus());
  }
  EXPECT_LT(std::filesystem::file_size(path), 5u << 19);
}

// The system may give another file the number that the former one had.
TEST(FileStoreTest, AnotherStoreInItsPlaceIsNotTakenForIt) {
  const std::string path = NewPath(), other = NewPath();
  const auto store = NewFileStore(path).value();
  ASSERT_EQ(store->Set("key", "x", Later()), absl::OkStatus());
  ASSERT_EQ(NewFileStore(other).value()->Set("key", "y, which is longer", Later()),
            absl::OkStatus());
  std::filesystem::copy_file(other, path, std::filesystem::copy_options::overwrite_existing);
  for (const absl::Status& status :
       {store->Set("key", "z", Later()), store->Get("key", absl::InfinitePast()).status(),
        store->Add("n", 1, Later()).status()}) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "it was replaced by another")) << status;
  }
  EXPECT_EQ(NewFileStore(path).value()->Get("key", Later()).value(), "y, which is longer");
}

// One that is full goes on with what is there, and has room again for what takes its place.
TEST(FileStoreTest, OneThatIsFullSaysSo) {
  const std::string path = NewPath();
  constexpr uint64_t kMaxBytes = 100000;
  const auto store = NewFileStore(path, absl::Seconds(10), kMaxBytes).value();
  const auto other = NewFileStore(path, absl::Seconds(10), kMaxBytes).value();
  const std::string value(1000, 'x');
  absl::Status status;
  int set = 0;
  while (status.ok() && set < 200) {
    status = store->Set(absl::StrCat("key", set++), value, Later());
  }
  EXPECT_EQ(status,
            absl::ResourceExhaustedError(absl::StrCat(
                "the store's file \"", path, "\": it is full: its entries may take 100000 bytes")));
  EXPECT_EQ(set, 99);
  EXPECT_TRUE(absl::IsResourceExhausted(other->Set("another", value, Later())));
  for (int i = 0; i < 3000; ++i) {  // 3 MB
    ASSERT_EQ(store->Set("key1", value, Later()), absl::OkStatus());
  }
  ASSERT_EQ(other->Delete("key1", Later()), absl::OkStatus());
  EXPECT_EQ(store->Set("another", value, Later()), absl::OkStatus());
  EXPECT_EQ(NewFileStore(path).value()->Get("another", Later()).value(), value);
  EXPECT_LT(std::filesystem::file_size(path), 3u << 20);
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
  TcpStoreOptions options;
  options.is_server = true;
  options.host = "203.0.113.7";
  const absl::Status not_ours = NewTcpStore(options).status();
  EXPECT_EQ(not_ours.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(not_ours.message(), options.host)) << not_ours;
  // It may become known, so it is tried until then.
  options.host = "no-such-host.invalid";
  options.deadline = Soon();
  const absl::Status unknown = NewTcpStore(options).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(absl::StrContains(unknown.message(), options.host)) << unknown;
  EXPECT_TRUE(options.deadline.Passed());
}

TEST(TcpStoreTest, AHostMayBecomeKnownLater) {
  int unknown = 3;
  TcpStoreOptions options;
  options.host = "node0.invalid";
  options.resolver = [&](const std::string& host) -> absl::StatusOr<std::string> {
    EXPECT_EQ(host, options.host);
    if (unknown-- > 0) return absl::UnavailableError("nobody knows it yet");
    return "127.0.0.1";
  };
  options.is_server = true;
  const auto server = NewTcpStore(options);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_LE(unknown, 0);
  unknown = 3;
  options.is_server = false;
  options.port = (*server)->port();
  const auto client = NewTcpStore(options);
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_LE(unknown, 0);
  ASSERT_TRUE((*client)->Set("key", "x", Later()).ok());
  EXPECT_EQ((*server)->Get("key", Later()).value(), "x");
}

// One attempt that nobody answers does not use up all of the time.
TEST(TcpStoreTest, AnAddressThatIsSilentIsNotTheLast) {
  const auto server = Serve();
  const absl::StatusOr<Socket> silent = Socket::Listen("127.0.0.2", server->port());
  ASSERT_TRUE(silent.ok()) << silent.status();
  int asked = 0;
  TcpStoreOptions options;
  options.port = server->port();
  options.resolver = [&](const std::string&) { return ++asked == 1 ? "127.0.0.2" : "127.0.0.1"; };
  options.answer_timeout = absl::Milliseconds(100);
  const auto client = NewTcpStore(options);
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_GE(asked, 2);
}

TEST(TcpStoreTest, Ipv6) {
  TcpStoreOptions options;
  options.host = "::1";
  options.is_server = true;
  options.deadline = Later();
  const auto server = NewTcpStore(options);
  ASSERT_TRUE(server.ok()) << server.status();
  options.is_server = false;
  options.port = (*server)->port();
  const auto client = NewTcpStore(options);
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE((*client)->Set("key", "x", Later()).ok());
  EXPECT_EQ((*server)->Get("key", Later()).value(), "x");
}

TEST(TcpStoreTest, ServesOnEveryAddress) {
  TcpStoreOptions options;
  options.is_server = true;
  options.bind_host = "0.0.0.0";
  const auto server = NewTcpStore(options);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_TRUE(Join((*server)->port())->Set("key", "x", Later()).ok());
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
    EXPECT_TRUE(options.deadline.Passed());
  }
  TcpStoreOptions no_port;
  EXPECT_EQ(NewTcpStore(no_port).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(TcpStoreTest, ServerIsKilled) {
  ChildProcess server({"--child", "serve", ""});
  const auto store = Join(static_cast<uint16_t>(std::stoi(server.ReadLine())));
  ASSERT_TRUE(store->Set("key", "x", Later()).ok());
  // Several take turns with the one connection; all hear of its end.
  std::vector<std::thread> waiters;
  for (int i = 0; i < 4; ++i) {
    waiters.emplace_back([&] {
      const auto got = store->Get("never", Later());
      EXPECT_EQ(got.status().code(), absl::StatusCode::kUnavailable) << got.status();
    });
  }
  server.Signal(SIGKILL);
  server.Wait();
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_EQ(store->Set("key", "y", Later()).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(store->Get("key", Later()).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(store->Add("n", 1, Later()).status().code(), absl::StatusCode::kUnavailable);
}

std::unique_ptr<TcpStore> JoinInHaste(uint16_t port) {
  TcpStoreOptions options;
  options.port = port;
  options.deadline = Later();
  options.answer_timeout = absl::Milliseconds(200);
  auto store = NewTcpStore(options);
  EXPECT_TRUE(store.ok()) << store.status();
  return store.ok() ? *std::move(store) : nullptr;
}

// While the server's process is stopped a client waits; what it asked for is done once.
TEST(TcpStoreTest, ServerIsStoppedForAWhile) {
  ChildProcess server({"--child", "serve", ""});
  const auto port = static_cast<uint16_t>(std::stoi(server.ReadLine()));
  const auto store = JoinInHaste(port), other = JoinInHaste(port);
  ASSERT_EQ(store->Add("n", 1, Later()).value(), 1);
  server.Stop();
  std::thread adder([&] { EXPECT_EQ(store->Add("n", 1, Later()).value(), 2); });
  for (int i = 0; i < 3; ++i) {
    const absl::Status silent = other->Get("n", absl::InfinitePast()).status();
    EXPECT_EQ(silent.code(), absl::StatusCode::kDeadlineExceeded) << silent;
    EXPECT_TRUE(absl::StrContains(silent.message(), absl::StrCat("127.0.0.1:", port))) << silent;
  }
  server.Signal(SIGCONT);
  adder.join();
  EXPECT_TRUE(other->Set("key", "x", Later()).ok());
  EXPECT_EQ(other->Get("n", Later()).value(), "2");
}

// Nor does it matter to one that waits in the server.
TEST(TcpStoreTest, AWaitOutlastsAServerThatIsStopped) {
  ChildProcess server({"--child", "serve", ""});
  const auto port = static_cast<uint16_t>(std::stoi(server.ReadLine()));
  const auto store = JoinInHaste(port), other = JoinInHaste(port);
  std::thread waiting([&] { EXPECT_EQ(store->Get("key", Deadline::Never()).value(), "x"); });
  server.Stop();
  // Until it has been silent for longer than the client waits for it.
  EXPECT_TRUE(absl::IsDeadlineExceeded(other->Get("n", absl::InfinitePast()).status()));
  EXPECT_TRUE(absl::IsDeadlineExceeded(other->Get("n", absl::InfinitePast()).status()));
  server.Signal(SIGCONT);
  EXPECT_TRUE(other->Set("key", "x", Later()).ok());
  waiting.join();
}

TEST(TcpStoreTest, AStoreThatHasForgottenIsNotTaken) {
  auto server = Serve();
  const auto client = Join(server->port());
  ASSERT_TRUE(client->Set("key", "x", Later()).ok());
  TcpStoreOptions options;
  options.is_server = true;
  options.port = server->port();
  server.reset();
  const auto second = NewTcpStore(options);
  ASSERT_TRUE(second.ok()) << second.status();
  for (int i = 0; i < 2; ++i) {
    const absl::Status gone = client->Get("key", Later()).status();
    EXPECT_EQ(gone.code(), absl::StatusCode::kUnavailable);
    EXPECT_TRUE(absl::StrContains(gone.message(), "another store")) << gone;
  }
}

// Waits for the next client; invalid once the listener is shut down.
Socket AcceptNext(const Socket& listener) {
  pollfd entry = {listener.fd(), POLLIN, 0};
  poll(&entry, 1, -1);
  return Socket(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

// Stands between a client and a server, and cuts connections when so many bytes of answers have
// come through; in the midst of a number, or when the server has answered and nobody has heard it.
// Without a seed only where LoseNextAnswer() says so.
class CuttingProxy {
 public:
  CuttingProxy(uint16_t server_port, std::optional<uint64_t> seed)
      : server_port_(server_port),
        cuts_at_random_(seed.has_value()),
        random_(seed.value_or(0)),
        thread_([this] { Run(); }) {}
  ~CuttingProxy() {
    shutdown(listener_.fd(), SHUT_RDWR);
    thread_.join();
  }
  uint16_t port() const { return listener_.LocalPort().value(); }
  int cuts() const { return cuts_; }
  // The server's next answer does not come through, nor does anything after it on its connection.
  // The client notices when `meanwhile` has returned.
  void LoseNextAnswer(std::function<void()> meanwhile) {
    absl::MutexLock lock(&mu_);
    meanwhile_ = std::move(meanwhile);
  }
  // How many bytes of answers have come through.
  int answered() const { return answered_; }
  // The server's next answer does not come through, and of the next so many connections no more
  // than so many bytes of answers.
  void LoseAnswers(int connections, int bytes) {
    LoseNextAnswer([this, connections, bytes] {
      short_ones_ = connections;
      short_bytes_ = bytes;
    });
  }

 private:
  std::function<void()> TakeMeanwhile() {
    absl::MutexLock lock(&mu_);
    return std::exchange(meanwhile_, nullptr);
  }

  void Run() {
    for (;;) {
      Socket client = AcceptNext(listener_);
      if (!client.valid()) return;
      // The bytes of every second connection are enough for its handshake and an answer.
      int bytes = std::uniform_int_distribution(0, 400)(random_);
      if (++cuts_ % 2 == 0) bytes += 300;
      if (!cuts_at_random_) bytes = std::numeric_limits<int>::max();
      if (short_ones_ > 0) {
        --short_ones_;
        bytes = short_bytes_;
      }
      Forward(std::move(client), bytes);
    }
  }

  void Forward(Socket client, int answer_bytes) {
    Socket server = Socket::Connect("127.0.0.1", server_port_, Later()).value();
    char bytes[512];
    while (answer_bytes > 0) {
      pollfd entries[] = {{client.fd(), POLLIN, 0}, {server.fd(), POLLIN, 0}};
      poll(entries, 2, -1);
      if (entries[0].revents != 0) {
        const ssize_t n = recv(client.fd(), bytes, sizeof(bytes), 0);
        if (n <= 0 || !server.Send({bytes, static_cast<size_t>(n)}, Later()).ok()) return;
      }
      if (entries[1].revents != 0) {
        const ssize_t n =
            recv(server.fd(), bytes, std::min<size_t>(sizeof(bytes), answer_bytes), 0);
        if (const auto meanwhile = TakeMeanwhile(); meanwhile != nullptr) return meanwhile();
        if (n <= 0 || !client.Send({bytes, static_cast<size_t>(n)}, Later()).ok()) return;
        answer_bytes -= static_cast<int>(n);
        answered_ += static_cast<int>(n);
      }
    }
  }

  const uint16_t server_port_;
  const bool cuts_at_random_;
  std::mt19937_64 random_;
  const Socket listener_ = Socket::Listen("127.0.0.1", 0).value();
  std::atomic<int> cuts_{0}, answered_{0};
  int short_ones_ = 0, short_bytes_ = 0;  // of the thread
  absl::Mutex mu_;
  std::function<void()> meanwhile_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

// Two count in turn, each waiting for the other, while their connections are cut.
TEST(TcpStoreTest, WaitsOutlastConnectionsThatBreak) {
  const auto server = Serve();
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      const uint64_t seed = 40 + i;
      CuttingProxy proxy(server->port(), seed);
      const auto client = Join(proxy.port());
      for (int k = i; k < 200; k += 2) {
        const Keys keys = {"turn"};
        Values seen = {std::nullopt};
        while (k > 0 && seen[0] != absl::StrCat(k)) {
          const auto values = client->AwaitChange(keys, seen, Deadline::Never());
          ASSERT_TRUE(values.ok()) << values.status() << " (seed " << seed << ")";
          seen = *values;
        }
        ASSERT_EQ(client->Add("turn", 1, Later()).value(), k + 1);
      }
      EXPECT_GT(proxy.cuts(), 5);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(server->Get("turn", Later()).value(), "200");
}

TEST(TcpStoreTest, NothingIsLostOrDoneTwiceWhenConnectionsBreak) {
  const auto server = Serve();
  constexpr int kAdditions = 300;
  std::set<int64_t> seen[2];
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      const uint64_t seed = 20 + i;
      CuttingProxy proxy(server->port(), seed);
      const auto client = Join(proxy.port());
      for (int k = 0; k < kAdditions; ++k) {
        const auto sum = client->Add("n", 1, Later());
        ASSERT_TRUE(sum.ok()) << sum.status() << " (seed " << seed << ")";
        seen[i].insert(*sum);
        const std::string key = absl::StrCat(i, "/", k);
        ASSERT_TRUE(client->Set(key, absl::StrCat(*sum), Later()).ok());
        EXPECT_EQ(client->Get(key, Later()).value(), absl::StrCat(*sum));
      }
      EXPECT_GT(proxy.cuts(), 20);
    });
  }
  for (std::thread& thread : threads) thread.join();
  seen[0].merge(seen[1]);
  EXPECT_EQ(seen[0].size(), 2u * kAdditions);
  EXPECT_EQ(server->Get("n", Later()).value(), absl::StrCat(2 * kAdditions));
}

// One has changed a key, and loses its connection with the answer; another changes it again. What
// the first repeats must not undo that.
TEST(TcpStoreTest, WhatIsRepeatedTakesNothingBack) {
  const auto server = Serve();
  CuttingProxy proxy(server->port(), std::nullopt);
  const auto client = Join(proxy.port());
  const auto other_sets = [&] { EXPECT_TRUE(server->Set("key", "other", Later()).ok()); };
  proxy.LoseNextAnswer(other_sets);
  EXPECT_TRUE(client->Set("key", "first", Later()).ok());
  EXPECT_EQ(server->Get("key", absl::InfinitePast()).value(), "other");
  proxy.LoseNextAnswer(other_sets);
  EXPECT_TRUE(client->Delete("key", Later()).ok());
  EXPECT_EQ(server->Get("key", absl::InfinitePast()).value(), "other");
  proxy.LoseNextAnswer([&] { EXPECT_EQ(server->Add("n", 1, Later()).value(), 2); });
  EXPECT_EQ(client->Add("n", 1, Later()).value(), 1);
  EXPECT_EQ(server->Get("n", absl::InfinitePast()).value(), "2");
  EXPECT_EQ(proxy.cuts(), 4);  // connections, of which three are over
}

// A connection that ends in place of an answer says nothing of the store, however often.
TEST(TcpStoreTest, ConnectionsThatBreakAreNotTakenForAFullStore) {
  const auto server = Serve();
  CuttingProxy proxy(server->port(), std::nullopt);
  const auto client = Join(proxy.port());
  const int beginning = proxy.answered();  // what a connection begins with
  proxy.LoseAnswers(5, beginning);
  EXPECT_EQ(client->Set("key", "value", Later()), absl::OkStatus());
  proxy.LoseAnswers(5, beginning);
  EXPECT_EQ(client->Add("n", 1, Later()).value(), 1);
  EXPECT_EQ(server->Get("key", absl::InfinitePast()).value(), "value");
  EXPECT_EQ(server->Get("n", absl::InfinitePast()).value(), "1");
}

// Somebody between a client and the server sees nothing of a store that has a key, and what he
// changes of a request or an answer ends the connection: the client asks again.
TEST(TcpStoreTest, WithAKeyNobodyInBetweenReadsOrChangesIt) {
  const std::string key = "a key of thirty-two bytes, about", value = "an address, and its token";
  const auto server = Serve(key);
  std::string seen;  // on the proxy's thread
  int records = 0, changed = 0, changed_requests = 0, changed_answers = 0;
  {
    TcpProxy proxy(server->port(), [&](TcpProxy::Way way, std::string bytes) {
      seen += bytes;
      // One record of TLS with data in it; its type, version and length are its first 5 bytes.
      // Each connection begins with four; so it is requests and answers in turns.
      if (absl::StartsWith(bytes, "\x17\x03\x03") && ++records % (changed % 2 == 0 ? 7 : 8) == 0) {
        records = 0;
        (way == TcpProxy::Way::kToServer ? changed_requests : changed_answers) += 1;
        bytes[5 + changed % (bytes.size() - 5)] ^= 1 << (changed % 8);
        ++changed;
      }
      return bytes;
    });
    const auto client = Join(proxy.port(), key);
    for (int i = 1; i <= 100; ++i) {
      ASSERT_EQ(client->Add("n", 1, Later()).value(), i);
      ASSERT_TRUE(client->Set(absl::StrCat("name/", i), value, Later()).ok());
      ASSERT_EQ(client->Get(absl::StrCat("name/", i), Later()).value(), value);
    }
  }
  EXPECT_GT(changed_requests, 20);
  EXPECT_GT(changed_answers, 20);
  EXPECT_GT(seen.size(), 100 * value.size());
  EXPECT_FALSE(absl::StrContains(seen, value));
  EXPECT_FALSE(absl::StrContains(seen, "name/"));
}

// What a server and its clients have: a key, certificates alone, or both.
std::vector<TcpStoreOptions> Secured() {
  TestAuthority authority(NewFolder());
  std::vector<TcpStoreOptions> all(3);
  all[0].cluster_key = all[2].cluster_key = "a key of thirty-two bytes, about";
  all[1].certificates = all[2].certificates =
      Certificates::Load(authority.Issue("one", {.names = "DNS:job"})).value();
  return all;
}

std::string NameOf(const TcpStoreOptions& options) {
  return absl::StrCat(options.certificates != nullptr ? " certificates" : "",
                      options.cluster_key.empty() ? "" : " a key");
}

// A server, and what its clients need but for the port of what stands between.
std::unique_ptr<TcpStore> ServeSecured(TcpStoreOptions* options) {
  options->is_server = true;
  options->deadline = Later();
  auto server = NewTcpStore(*options).value();
  options->is_server = false;
  options->answer_timeout = absl::Hours(1);
  return server;
}

// What somebody in between changes, leaves out, sends twice or in another order, in the midst of a
// long request or answer, ends its connection at once: nobody here waits for an answer that is
// late.
TEST(TcpStoreTest, WhatIsChangedLeftOutRepeatedOrReorderedIsNotTaken) {
  using Way = TcpProxy::Way;
  constexpr size_t kChunk = 4096;  // what the proxy takes at a time, at most
  const std::vector<std::function<void(std::string*)>> edits = {
      [](std::string* bytes) { (*bytes)[1000] ^= 1; },
      [](std::string* bytes) { bytes->erase(1000, 100); },
      [](std::string* bytes) { bytes->insert(1000, bytes->substr(1000, 100)); },
      [](std::string* bytes) { std::reverse(bytes->begin() + 1000, bytes->end()); }};
  for (const TcpStoreOptions& secured : Secured()) {
    for (const Way way : {Way::kToServer, Way::kToClient}) {
      for (size_t edit = 0; edit < edits.size(); ++edit) {
        SCOPED_TRACE(absl::StrCat(edit, way == Way::kToServer ? " to the server" : " to the client",
                                  NameOf(secured)));
        TcpStoreOptions options = secured;
        const auto server = ServeSecured(&options);
        int full = 0, changed = 0;  // on the proxy's thread
        std::atomic<bool> change{false};
        {
          TcpProxy proxy(server->port(), [&](Way this_way, std::string bytes) {
            if (this_way != way) return bytes;
            full = bytes.size() == kChunk ? full + 1 : 0;
            // Most of the message is still to come.
            if (full < 3 || !change.exchange(false)) return bytes;
            edits[edit](&bytes);
            ++changed;
            return bytes;
          });
          options.port = proxy.port();
          const auto client = NewTcpStore(options);
          ASSERT_TRUE(client.ok()) << client.status();
          for (int i = 0; i < 10; ++i) {
            const std::string name = absl::StrCat("name", i);
            const std::string value(300'000, static_cast<char>('a' + i));
            change = true;
            const absl::Status set = (*client)->Set(name, value, Later());
            ASSERT_TRUE(set.ok()) << set;
            EXPECT_TRUE(server->Get(name, Later()).value() == value);
            const auto got = (*client)->Get(name, Later());
            ASSERT_TRUE(got.ok()) << got.status();
            EXPECT_TRUE(*got == value);
          }
        }
        EXPECT_GT(changed, 3);
      }
    }
  }
}

// Somebody in between gives each of two clients the other's connection to the server.
TEST(TcpStoreTest, ConnectionsThatAreSplicedEnd) {
  for (TcpStoreOptions& options : Secured()) {
    SCOPED_TRACE(NameOf(options));
    const auto server = ServeSecured(&options);
    std::atomic<int> connections{0};
    TcpProxy proxy(server->port(), [&](TcpProxy::Way way, std::string bytes) {
      if (way == TcpProxy::Way::kToServer && absl::StartsWith(bytes, "distgrad")) ++connections;
      return bytes;
    });
    options.port = proxy.port();
    const auto one = NewTcpStore(options), two = NewTcpStore(options);
    ASSERT_TRUE(one.ok() && two.ok()) << one.status() << two.status();
    ASSERT_TRUE((*one)->Set("one", "1", Later()).ok());
    ASSERT_TRUE((*two)->Set("two", "2", Later()).ok());
    EXPECT_EQ(connections, 2);
    proxy.ExchangeServers();
    EXPECT_EQ((*one)->Get("one", Later()).value(), "1");
    EXPECT_EQ((*two)->Add("count", 1, Later()).value(), 1);
    EXPECT_EQ((*one)->Add("count", 1, Later()).value(), 2);
    EXPECT_EQ((*two)->Get("two", Later()).value(), "2");
    EXPECT_EQ(connections, 4) << "both have had to connect again";
  }
}

// Who is on the way and has a certificate, but no key, passes on the handshake of who has it.
TEST(TcpStoreTest, WhoHasACertificateAndNoKeyIsNotTakenForTheOtherEnd) {
  TestAuthority authority(NewFolder());
  TcpStoreOptions options;
  options.cluster_key = "a key of thirty-two bytes, about";
  options.certificates = Certificates::Load(authority.Issue("one", {.names = "DNS:job"})).value();
  const auto server = ServeSecured(&options);
  ASSERT_TRUE(server->Set("its name", "a secret", Later()).ok());
  const TlsRelay relay(server->port(),
                       authority.Issue("relay", {.names = "DNS:job,DNS:relay.example"}));
  options.port = relay.port();
  const absl::Status status = NewTcpStore(options).status();
  EXPECT_TRUE(absl::IsUnauthenticated(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "not the one that has shaken hands")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "relay.example")) << status;
  EXPECT_GT(relay.inside(), 0) << "TLS itself has nothing against it";
  // Of what goes on within TLS it has heard no more than what proves the handshake, of each end.
  EXPECT_LE(relay.seen().size(), 64u * relay.inside());
  options.port = server->port();
  const auto client = NewTcpStore(options);
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_EQ((*client)->Get("its name", Later()).value(), "a secret");
}

// What is changed of a handshake looks as if the server had another key. It is still the same one,
// and the client has spoken to it before.
TEST(TcpStoreTest, AHandshakeThatIsChangedOnTheWayIsTriedAgain) {
  const std::string key = "a key of thirty-two bytes, about";
  const auto server = Serve(key);
  std::atomic<int> changes = 0;  // of what the server sends next
  TcpProxy proxy(server->port(), [&](TcpProxy::Way way, std::string bytes) {
    if (way == TcpProxy::Way::kToClient && changes > 0) {
      --changes;
      bytes.back() ^= 1;
    }
    return bytes;
  });
  const auto client = Join(proxy.port(), key);
  ASSERT_TRUE(client->Set("key", "value", Later()).ok());
  // An answer, and three handshakes after it.
  changes = 4;
  const auto value = client->Get("key", Later());
  ASSERT_TRUE(value.ok()) << value.status();
  EXPECT_EQ(*value, "value");
  EXPECT_EQ(changes, 0);
}

// --- who may use it

TEST(TcpStoreTest, ClusterKey) {
  TcpStoreOptions options;
  options.is_server = true;
  options.cluster_key = "a secret of the whole job";
  options.deadline = Later();
  const auto server = NewTcpStore(options);
  ASSERT_TRUE(server.ok()) << server.status();
  options.is_server = false;
  options.port = (*server)->port();
  ASSERT_TRUE((*NewTcpStore(options))->Set("key", "x", Later()).ok());
  options.cluster_key = "";
  const absl::Status none = NewTcpStore(options).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_TRUE(absl::StrContains(none.message(), "has a cluster key")) << none;
  options.cluster_key = "a secret of somebody else";
  const absl::Status other = NewTcpStore(options).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kUnauthenticated) << other;
  EXPECT_TRUE(absl::StrContains(other.message(), "cluster key")) << other;
  EXPECT_TRUE(absl::StrContains(other.message(), "DISTGRAD_KEY_FILE")) << other;
  EXPECT_FALSE(absl::StrContains(other.message(), "secret of")) << other;
  EXPECT_EQ((*server)->Get("key", Later()).value(), "x");
}

TEST(TcpStoreTest, Certificates) {
  const std::string folder = std::getenv("TEST_TMPDIR");
  TestAuthority authority(folder + "/ours"), strange(folder + "/theirs");
  const auto load = [](const CertificateFiles& files) { return Certificates::Load(files).value(); };
  TcpStoreOptions options;
  options.is_server = true;
  options.certificates = load(authority.Issue("server", {.names = "DNS:job"}));
  options.deadline = Later();
  const auto server = NewTcpStore(options);
  ASSERT_TRUE(server.ok()) << server.status();
  options.is_server = false;
  std::atomic<bool> seen{false};
  const TcpProxy proxy((*server)->port(), [&](TcpProxy::Way, std::string bytes) {
    if (absl::StrContains(bytes, "a secret") || absl::StrContains(bytes, "its name")) seen = true;
    return bytes;
  });
  options.port = proxy.port();
  options.certificates = load(authority.Issue("client", {.names = "DNS:job"}));
  {
    const auto client = NewTcpStore(options);
    ASSERT_TRUE(client.ok()) << client.status();
    ASSERT_TRUE((*client)->Set("its name", "a secret", Later()).ok());
    EXPECT_EQ((*server)->Get("its name", Later()).value(), "a secret");
  }
  EXPECT_FALSE(seen);
  options.certificates = load(strange.Issue("client", {.names = "DNS:job"}));
  const absl::Status other = NewTcpStore(options).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kUnauthenticated) << other;
  EXPECT_TRUE(absl::StrContains(other.message(), "DISTGRAD_TLS_CA")) << other;
  options.certificates = nullptr;
  const absl::Status none = NewTcpStore(options).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kUnauthenticated) << none;
  EXPECT_TRUE(absl::StrContains(none.message(), "uses certificates")) << none;
  EXPECT_EQ((*server)->Get("its name", Later()).value(), "a secret");
}

// It takes the server's, and so has finished its part of TLS 1.3 before the server looks at its
// own.
TEST(TcpStoreTest, AClientWhoseCertificateIsRefusedHearsWhyAtOnce) {
  const std::string folder = std::getenv("TEST_TMPDIR");
  TestAuthority authority(folder + "/honest"), strange(folder + "/strange");
  const auto load = [](const CertificateFiles& files) { return Certificates::Load(files).value(); };
  TcpStoreOptions options;
  options.is_server = true;
  const CertificateFiles honest = authority.Issue("server", {.names = "DNS:job"});
  options.certificates = load(honest);
  options.deadline = Later();
  const auto server = NewTcpStore(options);
  ASSERT_TRUE(server.ok()) << server.status();
  options.is_server = false;
  options.port = (*server)->port();
  CertificateFiles of_another = strange.Issue("client", {.names = "DNS:job"});
  of_another.ca = honest.ca;
  CertificateFiles unnamed = authority.Issue("unnamed", {.names = "DNS:another"});
  unnamed.name = "job";
  for (const auto& [files, why] : std::vector<std::pair<CertificateFiles, std::string>>{
           {of_another, "it is of no authority"},
           {authority.Issue("old", {.names = "DNS:job", .days = -1}), "it has expired"},
           {unnamed, "it has not the name"}}) {
    options.certificates = load(files);
    const absl::Status status = NewTcpStore(options).status();
    EXPECT_TRUE(absl::IsUnauthenticated(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "refuses this process's certificate"))
        << status;
    EXPECT_TRUE(absl::StrContains(status.message(), why)) << status;
  }
  options.certificates = load(authority.Issue("client", {.names = "DNS:job"}));
  EXPECT_TRUE(NewTcpStore(options).ok());
}

// Begins TLS with each client and then closes the connection, as a server does that is ended, or
// that gives the place to another.
class EndsInTls {
 public:
  EndsInTls() : thread_([this] { Run(); }) {}
  ~EndsInTls() {
    shutdown(listener_.fd(), SHUT_RDWR);
    thread_.join();
  }
  uint16_t port() const { return listener_.LocalPort().value(); }
  // How many times it has done so.
  int count() const { return count_; }

 private:
  void Run() {
    for (;;) {
      Socket client = AcceptNext(listener_);
      if (!client.valid()) return;
      Handshake handshake =
          Handshake::Create(Handshake::Role::kServer, "", kStoreToken, /*certificates=*/true)
              .value();
      absl::Status status;
      while (status.ok() && !handshake.done()) {
        std::string bytes(handshake.wanted(), '\0');
        status = client.Receive(bytes.data(), bytes.size(), Later());
        if (status.ok()) status = handshake.Receive(bytes);
        if (status.ok()) status = client.Send(handshake.TakeOutput(), Later());
      }
      char first;
      if (status.ok()) status = client.Receive(&first, 1, Later());
      if (status.ok()) ++count_;
    }
  }

  const Socket listener_ = Socket::Listen("127.0.0.1", 0).value();
  std::atomic<int> count_{0};
  std::thread thread_;
};

// Nobody has said that there is anything against the client: so it tries to the end of its time,
// which is longer than it takes to believe a refusal.
TEST(TcpStoreTest, AConnectionThatEndsInTlsIsNoRefusal) {
  TestAuthority authority(NewFolder());
  const EndsInTls server;
  TcpStoreOptions options;
  options.certificates =
      Certificates::Load(authority.Issue("client", {.names = "DNS:job"})).value();
  options.port = server.port();
  options.deadline = absl::Now() + absl::Seconds(3);
  const absl::Status status = NewTcpStore(options).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_GT(server.count(), 0);
}

TEST(TcpStoreTest, StrangersToCertificatesDoNotGetIn) {
  const std::string folder = std::getenv("TEST_TMPDIR");
  TestAuthority authority(folder + "/job");
  TcpStoreOptions options;
  options.is_server = true;
  options.certificates =
      Certificates::Load(authority.Issue("server", {.names = "DNS:job"})).value();
  options.deadline = Later();
  const auto server = NewTcpStore(options);
  ASSERT_TRUE(server.ok()) << server.status();
  ASSERT_TRUE((*server)->Set("key", "value", Later()).ok());
  options.is_server = false;
  options.port = (*server)->port();
  CertificateStrangers strangers(authority, folder + "/strangers");
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(strangers.Visit((*server)->port(), kStoreToken), "");
    const auto client = NewTcpStore(options);
    ASSERT_TRUE(client.ok()) << client.status();
    EXPECT_EQ((*client)->Get("key", Later()).value(), "value");
  }
}

// A dead address (of a machine that has two, say) costs a moment, not all of the time.
TEST(StoreSocketTest, ADeadAddressBeforeALivingOne) {
  const auto address_of = [](const Socket& listener) {
    Socket::Address address = {{}, sizeof(address.storage)};
    EXPECT_EQ(
        getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&address.storage), &address.size),
        0);
    return address;
  };
  const Socket dead = Socket::Listen("127.0.0.1", 0).value();
  ASSERT_EQ(listen(dead.fd(), 0), 0);
  const Socket::Address silent = address_of(dead);
  // Once its queue is full it answers nobody.
  std::vector<Socket> queued;
  for (int i = 0; i < 4; ++i) {
    Socket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    connect(socket.fd(), reinterpret_cast<const sockaddr*>(&silent.storage), silent.size);
    queued.push_back(std::move(socket));
  }
  Socket refusing = Socket::Listen("127.0.0.1", 0).value();
  const Socket::Address refused = address_of(refusing);
  refusing = Socket();
  const Socket living = Socket::Listen("127.0.0.1", 0).value();
  const Socket::Address good = address_of(living);
  const uint16_t port = living.LocalPort().value();

  const auto port_of_peer = [](const Socket& socket) {
    sockaddr_in peer = {};
    socklen_t size = sizeof(peer);
    EXPECT_EQ(getpeername(socket.fd(), reinterpret_cast<sockaddr*>(&peer), &size), 0);
    return ntohs(peer.sin_port);
  };
  for (const auto& addresses : std::vector<std::vector<Socket::Address>>{
           {good}, {silent, good}, {refused, good}, {silent, refused, silent, good}}) {
    const absl::Time deadline = Later();
    const absl::StatusOr<Socket> socket = Socket::ConnectToAny(addresses, deadline);
    ASSERT_TRUE(socket.ok()) << socket.status();
    EXPECT_EQ(port_of_peer(*socket), port);
    EXPECT_LT(absl::Now(), deadline);
  }
  EXPECT_TRUE(absl::IsUnavailable(Socket::ConnectToAny({}, Later()).status()));
  EXPECT_TRUE(
      absl::IsFailedPrecondition(Socket::ConnectToAny({refused, refused}, Later()).status()));
  EXPECT_TRUE(
      absl::IsDeadlineExceeded(Socket::ConnectToAny({silent, refused, silent}, Soon()).status()));
}

// Nobody listens there; but TCP connects a socket whose own port is the one that it looks for.
TEST(StoreSocketTest, ASocketThatHasReachedItselfHasReachedNobody) {
  const uint16_t port = FreePort();
  absl::Notification first, second;
  connects_to_itself = &first;
  const absl::Status status = Socket::Connect("127.0.0.1", port, Later()).status();
  EXPECT_TRUE(first.HasBeenNotified());
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  // Nor does it keep the port from the one who is to listen there.
  EXPECT_TRUE(Socket::Listen("127.0.0.1", port).ok());

  // A worker that is there before the one that serves.
  connects_to_itself = &second;
  std::thread early([port] { Join(port, "a key"); });
  second.WaitForNotification();
  TcpStoreOptions options;
  options.is_server = true;
  options.port = port;
  options.cluster_key = "a key";
  options.deadline = Later();
  absl::StatusOr<std::unique_ptr<TcpStore>> server;
  do {  // until the other one has closed it
    server = NewTcpStore(options);
  } while (absl::IsAlreadyExists(server.status()));
  EXPECT_TRUE(server.ok()) << server.status();
  early.join();
}

// What a stranger hears who says `words`, until the server closes.
std::string Heard(uint16_t port, const std::string& words) {
  Socket socket = Socket::Connect("127.0.0.1", port, Later()).value();
  socket.Send(words, Later()).IgnoreError();
  std::string heard;
  char byte;
  while (socket.Receive(&byte, 1, Later()).ok()) heard += byte;
  return heard;
}

// What a client does first.
void ShakeHands(Socket& socket, const std::string& key = "") {
  Handshake handshake = Handshake::Create(Handshake::Role::kClient, key, kStoreToken).value();
  while (!handshake.done()) {
    ASSERT_TRUE(socket.Send(handshake.TakeOutput(), Later()).ok());
    std::string bytes(handshake.wanted(), '\0');
    const absl::Status received = socket.Receive(bytes.data(), bytes.size(), Later());
    ASSERT_TRUE(received.ok()) << received;
    ASSERT_TRUE(handshake.Receive(bytes).ok());
  }
  if (key.empty()) return;
  const absl::Status encrypted = socket.StartTls(handshake, nullptr, Later());
  ASSERT_TRUE(encrypted.ok()) << encrypted;
}

Socket Friend(uint16_t port, const std::string& key = "") {
  Socket socket = Socket::Connect("127.0.0.1", port, Later()).value();
  ShakeHands(socket, key);
  return socket;
}

// A process of this program, on a machine whose settings of OpenSSL forbid what TLS takes.
std::unique_ptr<ChildProcess> NewChildWithoutOpenssl(const std::string& kind, uint16_t port) {
  const std::string file = NewPath() + ".cnf";
  std::ofstream(file) << "openssl_conf = all\n"
                         "[all]\nalg_section = algorithms\n"
                         "[algorithms]\ndefault_properties = \"provider=none\"\n";
  setenv("OPENSSL_CONF", file.c_str(), 1);
  auto child =
      std::make_unique<ChildProcess>(std::vector<std::string>{"--child", kind, absl::StrCat(port)});
  unsetenv("OPENSSL_CONF");
  return child;
}

// It would not begin to work by the deadline. It has no random numbers either, and so no handshake.
TEST(TcpStoreTest, WithoutOpensslAStartFailsAtOnceAndSaysNothing) {
  const Socket listener = Socket::Listen("127.0.0.1", 0).value();
  const auto client = NewChildWithoutOpenssl("join_with_key", listener.LocalPort().value());
  pollfd entry = {listener.fd(), POLLIN, 0};
  ASSERT_EQ(poll(&entry, 1, -1), 1);
  Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  ASSERT_TRUE(socket.valid());
  char byte;
  EXPECT_TRUE(absl::IsUnavailable(socket.Receive(&byte, 1, Later())));
  const std::string joined = client->ReadLine();
  EXPECT_TRUE(absl::StartsWith(joined, "INTERNAL: the store at 127.0.0.1:")) << joined;
  EXPECT_TRUE(absl::StrContains(joined, "the crypto library has no random numbers")) << joined;
  EXPECT_EQ(client->Wait(), 1);

  const auto server = NewChildWithoutOpenssl("serve_with_key", 0);
  const std::string served = server->ReadLine();
  EXPECT_TRUE(absl::StartsWith(served, "INTERNAL: the store at 127.0.0.1:")) << served;
  EXPECT_EQ(server->Wait(), 1);
}

TEST(TcpStoreTest, AServerThatCanBeginNoHandshakeSaysSoInItsLog) {
  testing::internal::CaptureStderr();
  {
    const auto server = NewChildWithoutOpenssl("only_serve_with_key", 0);
    const auto port = static_cast<uint16_t>(std::atoi(server->ReadLine().c_str()));
    Handshake handshake =
        Handshake::Create(Handshake::Role::kClient, kChildKey, kStoreToken).value();
    EXPECT_EQ(Heard(port, handshake.TakeOutput()), "");
  }
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(absl::StrContains(log,
                                "the job's store cannot take a connection: INTERNAL: the crypto "
                                "library has no random numbers"))
      << log;
}

// It gets as far as TLS, and can make no session of it. Its proof tells the client that its key is
// not what is refused.
TEST(TcpStoreTest, AServerThatCanMakeNoSessionSaysSoInItsLogAndServesLater) {
  Socket listener = Socket::Listen("127.0.0.1", 0).value();
  const uint16_t port = listener.LocalPort().value();
  const auto server = StoreServer::Start(std::move(listener), {.cluster_key = kChildKey});
  ASSERT_TRUE(server.ok()) << server.status();
  testing::internal::CaptureStderr();
  {
    const NoTls none;
    Socket socket = Socket::Connect("127.0.0.1", port, Later()).value();
    Handshake handshake =
        Handshake::Create(Handshake::Role::kClient, kChildKey, kStoreToken).value();
    absl::Status status;
    while (status.ok() && !handshake.done()) {
      status = socket.Send(handshake.TakeOutput(), Later());
      std::string bytes(handshake.wanted(), '\0');
      if (status.ok()) status = socket.Receive(bytes.data(), bytes.size(), Later());
      if (status.ok()) status = handshake.Receive(bytes);
    }
    EXPECT_TRUE(handshake.done()) << status;
    char byte;
    EXPECT_TRUE(absl::IsUnavailable(socket.Receive(&byte, 1, Later()))) << "nothing in the clear";
  }
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(absl::StrContains(log,
                                "the job's store cannot take a connection: INTERNAL: TLS: no "
                                "memory for a session"))
      << log;
  const auto client = Join(port, kChildKey);
  ASSERT_NE(client, nullptr);
  EXPECT_TRUE(client->Set("key", "value", Later()).ok());
}

// And a client that cannot ends its start at once, with what is wrong here.
TEST(TcpStoreTest, AClientThatCanMakeNoSessionFailsAtOnce) {
  const auto store = Serve(kChildKey);
  ASSERT_NE(store, nullptr);
  TcpStoreOptions options;
  options.port = store->port();
  options.cluster_key = kChildKey;
  options.deadline = absl::InfiniteFuture();
  {
    const NoTls none;
    const absl::Status status = NewTcpStore(options).status();
    EXPECT_TRUE(absl::IsInternal(status)) << status;
    EXPECT_TRUE(absl::StartsWith(status.message(), "the store at ")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "TLS: no memory for a session")) << status;
  }
  EXPECT_NE(Join(store->port(), kChildKey), nullptr);
}

// Whether the kernel asks now and then for a sign of life.
TEST(TcpStoreTest, AClientWhoseMachineIsGoneIsGivenUp) {
  const auto store = Serve();
  const Socket client = Friend(store->port());
  sockaddr_in mine = {};
  socklen_t size = sizeof(mine);
  ASSERT_EQ(getsockname(client.fd(), reinterpret_cast<sockaddr*>(&mine), &size), 0);
  // The server's end is one of this process's.
  int found = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    sockaddr_in peer = {};
    size = sizeof(peer);
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0 ||
        peer.sin_family != AF_INET || peer.sin_port != mine.sin_port) {
      continue;
    }
    ++found;
    int on = 0, idle = 0;
    size = sizeof(on);
    EXPECT_EQ(getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, &size), 0);
    size = sizeof(idle);
    EXPECT_EQ(getsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, &size), 0);
    EXPECT_EQ(on, 1);
    EXPECT_LE(idle, 60);
  }
  EXPECT_EQ(found, 1);
}

std::string Number(uint64_t number) { return {reinterpret_cast<const char*>(&number), 8}; }
std::string Short(uint32_t number) { return {reinterpret_cast<const char*>(&number), 4}; }

// A request for changes of a key that is not there, or is `seen`.
std::string Await(uint32_t milliseconds, const Keys& keys) {
  std::string body = Short(milliseconds);
  for (const std::string& key : keys) {
    body += Short(static_cast<uint32_t>(key.size())) + key + '\0';
  }
  return "\x82" + Short(static_cast<uint32_t>(body.size())) + body;
}

class HostileClientsTest : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Keys, HostileClientsTest, testing::Values("", "a secret of the whole job"),
                         [](const auto& info) { return info.index == 0 ? "Without" : "With"; });

// Those who have the key may talk nonsense, too.
TEST_P(HostileClientsTest, LoseTheirOwnConnections) {
  const std::string& key = GetParam();
  const auto store = Serve(key);
  ASSERT_TRUE(store->Set("key", "x", Later()).ok());
  for (const std::string& words :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(16, '\0'), std::string(64, '\xff'),
        std::string("\0\xce\xf7\x85\x3c", 5), std::string(1 << 20, 'x')}) {
    EXPECT_EQ(Heard(store->port(), words), "");
  }
  // Half a handshake, of one that then waits and one that breaks off with a reset.
  const std::string hello =
      Handshake::Create(Handshake::Role::kClient, key, kStoreToken)->TakeOutput();
  Socket waits = Socket::Connect("127.0.0.1", store->port(), Later()).value();
  Socket quitter = Socket::Connect("127.0.0.1", store->port(), Later()).value();
  ASSERT_TRUE(waits.Send(hello.substr(0, 40), Later()).ok());
  ASSERT_TRUE(quitter.Send(hello.substr(0, 40), Later()).ok());
  const linger reset = {1, 0};
  ASSERT_EQ(setsockopt(quitter.fd(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)), 0);
  quitter = Socket();
  // Friends, who say what is no request: huge lengths, unknown ones, text for numbers.
  const std::string length(8, '\xff');
  for (const std::string& words :
       {"\x01" + length, "\x03" + length, "\x81" + Number(1) + length, "\x83" + Number(1) + length,
        "\x84" + Number(1) + length, std::string("\x02"), std::string("\xff"),
        std::string("\0abcd", 5), "\x82" + Short(0xffffffff), "\x82" + Short(2) + "xx",
        "\x82" + Short(5) + Short(0) + "x", Await(0, {""}),
        Await(0, {std::string(kMaxStoreKey + 1, 'k')}), Await(60000, Keys(kMaxAwaitKeys + 1, "k")),
        Await(0, {"k"}).replace(14, 1, "\2"),
        "\x82" + Short(13) + Short(0) + Short(0xffffffff) + "key\1x"}) {
    Socket socket = Friend(store->port(), key);
    ASSERT_TRUE(socket.Send(words, Later()).ok());
    char byte;
    EXPECT_EQ(socket.Receive(&byte, 1, Later()).code(), absl::StatusCode::kUnavailable);
  }
  // Byte by byte a request is as good as any; half of one holds nobody up.
  Socket slow = Friend(store->port(), key), half = Friend(store->port(), key);
  ASSERT_TRUE(half.Send("\x82", Later()).ok());
  for (const char c : Await(60000, {"key"})) {
    ASSERT_TRUE(slow.Send(absl::string_view(&c, 1), Later()).ok());
  }
  std::string answer(14, '\0');
  ASSERT_TRUE(slow.Receive(answer.data(), answer.size(), Later()).ok());
  EXPECT_EQ(answer, Short(10) + Short(1) + "\1" + Short(1) + "x");
  EXPECT_EQ(store->Get("key", Later()).value(), "x");
}

// A client that asks and does not listen gets some of its answers, the rest when it does, and holds
// up no other.
TEST(TcpStoreTest, WhoDoesNotListen) {
  const auto store = Serve();
  const size_t size = kMaxStoreValue;
  ASSERT_TRUE(store->Set("k", std::string(size, 'x'), Later()).ok());
  Socket deaf = Friend(store->port());
  constexpr int kTimes = 60;  // 60 MiB of answers
  for (int i = 0; i < kTimes; ++i) {
    ASSERT_TRUE(deaf.Send(Await(0, {"k"}), Later()).ok());
  }
  EXPECT_TRUE(store->Set("other", "x", Later()).ok());
  std::string answer(13 + size, '\0');
  for (int i = 0; i < kTimes; ++i) {
    ASSERT_TRUE(deaf.Receive(answer.data(), answer.size(), Later()).ok()) << i;
    EXPECT_EQ(answer.back(), 'x');
  }
}

// Nor is it read from without end: what it asks for would be kept until it has its answers.
TEST(TcpStoreTest, WhoDoesNotListenIsNotHeardForEver) {
  const auto store = Serve();
  ASSERT_TRUE(store->Set("k", std::string(kMaxStoreValue, 'x'), Later()).ok());
  Socket deaf = Friend(store->port());
  const int room = 1 << 16;  // whatever the system gives to others
  ASSERT_EQ(setsockopt(deaf.fd(), SOL_SOCKET, SO_SNDBUF, &room, sizeof(room)), 0);
  for (int i = 0; i < 60; ++i) ASSERT_TRUE(deaf.Send(Await(0, {"k"}), Later()).ok());
  const std::string more(1 << 16, 'x');
  ssize_t sent = 0;
  // The server looks at all of its clients between two answers to this one.
  for (int rounds = 0; rounds < 1000 && sent < (64 << 20); ++rounds) {
    const ssize_t n = send(deaf.fd(), more.data(), more.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0) {
      sent += n;
      rounds = 0;
    } else {
      ASSERT_EQ(errno, EAGAIN);
    }
    ASSERT_TRUE(store->Set("other", "x", Later()).ok());
  }
  EXPECT_LT(sent, 64 << 20);
}

// A false server of a launcher says that a value is longer than any may be: the client takes no
// memory for it, and asks again.
TEST(TcpStoreTest, AValueThatIsTooLongIsNotTaken) {
  const Socket listener = Socket::Listen("127.0.0.1", 0).value();
  std::thread server([&] {
    for (const uint64_t size : {~uint64_t{0}, uint64_t{kMaxStoreValue} + 1, uint64_t{1}}) {
      pollfd entry = {listener.fd(), POLLIN, 0};
      ASSERT_EQ(poll(&entry, 1, -1), 1);
      Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      char hello[10];  // kValidate and kPing, with 32 bits each; the answer repeats the last ones
      ASSERT_TRUE(socket.Receive(hello, sizeof(hello), Later()).ok());
      ASSERT_TRUE(socket.Send(absl::string_view(hello + 6, 4), Later()).ok());
      char byte;
      ASSERT_TRUE(socket.Receive(&byte, 1, Later()).ok());  // the question
      ASSERT_TRUE(socket.Send(Number(size) + "x", Later()).ok());
      while (socket.Receive(&byte, 1, Later()).ok()) {  // until the client has closed it
      }
    }
  });
  {
    const auto client = JoinLauncher(listener.LocalPort().value());
    EXPECT_EQ(client->Get("key", Later()).value(), "x");
  }
  server.join();
}

TEST(StoreServerTest, ASessionHasOneConnection) {
  const auto store = Serve();
  const std::string session = "\x80" + Number(4711);
  const std::string add = "\x81" + Number(1) + Number(2) + "/n" + Number(1);
  Socket first = Friend(store->port());
  char known = 7, added = 7;
  int64_t sum = 0;
  ASSERT_TRUE(first.Send(session + add, Later()).ok());
  ASSERT_TRUE(first.Receive(&known, 1, Later()).ok());
  EXPECT_EQ(known, 0);
  ASSERT_TRUE(first.Receive(&added, 1, Later()).ok());
  EXPECT_EQ(added, 1);
  ASSERT_TRUE(first.Receive(&sum, 8, Later()).ok());
  EXPECT_EQ(sum, 1);

  Socket second = Friend(store->port());
  ASSERT_TRUE(second.Send(session + add, Later()).ok());
  ASSERT_TRUE(second.Receive(&known, 1, Later()).ok());
  EXPECT_EQ(known, 1);
  ASSERT_TRUE(second.Receive(&added, 1, Later()).ok());
  EXPECT_EQ(added, 1);
  ASSERT_TRUE(second.Receive(&sum, 8, Later()).ok());
  EXPECT_EQ(sum, 1);
  EXPECT_EQ(first.Receive(&known, 1, Later()).code(), absl::StatusCode::kUnavailable);

  // A second session on one connection, and an addition without any.
  ASSERT_TRUE(second.Send(session, Later()).ok());
  EXPECT_EQ(second.Receive(&known, 1, Later()).code(), absl::StatusCode::kUnavailable);
  Socket none = Friend(store->port());
  ASSERT_TRUE(none.Send(add, Later()).ok());
  EXPECT_EQ(none.Receive(&known, 1, Later()).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(store->Add("n", 0, Later()).value(), 1);
}

TEST(StoreServerTest, UnauthenticatedClientsMakeRoom) {
  Socket listener = Socket::Listen("127.0.0.1", 0).value();
  const uint16_t port = listener.LocalPort().value();
  const auto server = StoreServer::Start(
      std::move(listener),
      {.max_unauthenticated = 2, .grace = absl::ZeroDuration(), .max_bytes = 1350});
  ASSERT_TRUE(server.ok()) << server.status();
  std::vector<Socket> idle;
  for (int i = 0; i < 50; ++i) {
    idle.push_back(Socket::Connect("127.0.0.1", port, Later()).value());
  }
  char byte;
  for (int i = 0; i < 48; ++i) {
    EXPECT_EQ(idle[i].Receive(&byte, 1, Later()).code(), absl::StatusCode::kUnavailable);
  }
  const auto client = Join(port);
  ASSERT_TRUE(client->Set("key", std::string(700, 'x'), Later()).ok());
  ASSERT_TRUE(client->Set("key", std::string(800, 'x'), Later()).ok());  // in place of the other
  const absl::Status full = client->Set("more", std::string(200, 'x'), Later());
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(absl::StrContains(full.message(), "it is full")) << full;
  EXPECT_EQ(client->Add("n", 1, Later()).value(), 1);
  EXPECT_EQ(client->Set("n", std::string(200, 'x'), Later()).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(client->Get("n", Later()).value(), "1");
  EXPECT_EQ(client->Get("key", Later()).value(), std::string(800, 'x'));
  EXPECT_EQ(Join(port)->Get("key", Later()).value(), std::string(800, 'x'));
}

TEST(StoreServerTest, AClientForWhichThereIsNoRoomHearsThat) {
  Socket listener = Socket::Listen("127.0.0.1", 0).value();
  const uint16_t port = listener.LocalPort().value();
  const auto server = StoreServer::Start(std::move(listener), {.max_bytes = 1});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto client = NewTcpStore({.port = port, .deadline = Deadline::After(absl::Seconds(1))});
  EXPECT_EQ(client.status().code(), absl::StatusCode::kResourceExhausted) << client.status();
}

// Says hello and hears the server's, or sends its proof and hears the server's.
void TakeStep(Socket& socket, Handshake& handshake) {
  ASSERT_TRUE(socket.Send(handshake.TakeOutput(), Later()).ok());
  std::string bytes(handshake.wanted(), '\0');
  const absl::Status received = socket.Receive(bytes.data(), bytes.size(), Later());
  ASSERT_TRUE(received.ok()) << received;
  ASSERT_TRUE(handshake.Receive(bytes).ok());
}

// It hears that it was closed for others, and nothing of a key.
void ExpectNoPlace(Socket& socket, Handshake& handshake) {
  std::string bytes(kProofBytes, '\0');
  const absl::Status received = socket.Receive(bytes.data(), bytes.size(), Later());
  ASSERT_TRUE(received.ok()) << received;
  const absl::Status why = handshake.Receive(bytes);
  EXPECT_TRUE(absl::IsUnavailable(why)) << why;
  EXPECT_TRUE(absl::StrContains(why.message(), "had no place for one more client")) << why;
  EXPECT_TRUE(absl::IsUnavailable(socket.Receive(bytes.data(), 1, Later())));
}

// Who goes on with its handshake, however late it began with that, is not the one who makes room.
TEST(StoreServerTest, WhoWasSilentForLongestMakesRoom) {
  const std::string key = "a secret of the whole job";
  Socket listener = Socket::Listen("127.0.0.1", 0).value();
  const uint16_t port = listener.LocalPort().value();
  const auto server = StoreServer::Start(
      std::move(listener),
      {.cluster_key = key, .max_unauthenticated = 2, .grace = absl::ZeroDuration()});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto connect = [&] { return Socket::Connect("127.0.0.1", port, Later()).value(); };
  const auto shake = [&] {
    return Handshake::Create(Handshake::Role::kClient, key, kStoreToken).value();
  };
  Socket slow = connect(), silent = connect();
  Handshake of_slow = shake(), of_silent = shake(), of_third = shake();
  TakeStep(silent, of_silent);  // both are inside
  TakeStep(slow, of_slow);
  Socket third = connect();
  TakeStep(third, of_third);
  ExpectNoPlace(silent, of_silent);
  TakeStep(slow, of_slow);
  EXPECT_TRUE(of_slow.done());
}

// What a client says while the server is busy with others, as with the signatures of a crowd, it
// has said.
TEST(StoreServerTest, WhoHasSaidSomethingThatIsNotReadYetIsNotSilent) {
  TestAuthority authority(std::string(std::getenv("TEST_TMPDIR")) + "/busy");
  const CertificateFiles files = authority.Issue("store", {.names = "DNS:job"});
  const auto certificates = Certificates::Load(files).value();
  Socket listener = Socket::Listen("127.0.0.1", 0).value();
  const uint16_t port = listener.LocalPort().value();
  const auto server = StoreServer::Start(
      std::move(listener),
      {.certificates = certificates, .max_unauthenticated = 4, .grace = absl::ZeroDuration()});
  ASSERT_TRUE(server.ok()) << server.status();
  // A server that is to begin TLS reads its certificate anew, and waits for a writer of this one.
  const std::string good = files.cert + ".good";
  std::filesystem::copy_file(files.cert, good);
  const auto make_slow = [&] {
    std::filesystem::remove(files.cert);
    ASSERT_EQ(mkfifo(files.cert.c_str(), 0600), 0);
  };
  const auto await_busy = [&] { return open(files.cert.c_str(), O_WRONLY | O_CLOEXEC); };
  std::vector<Socket> clients;
  std::vector<Handshake> handshakes;
  const auto connect = [&] {
    clients.push_back(Socket::Connect("127.0.0.1", port, Later()).value());
    handshakes.push_back(
        Handshake::Create(Handshake::Role::kClient, "", kStoreToken, true).value());
  };
  for (int i = 0; i < 4; ++i) {
    connect();
    TakeStep(clients[i], handshakes[i]);
  }
  const auto prove = [&](int i) {
    ASSERT_TRUE(clients[i].Send(handshakes[i].TakeOutput(), Later()).ok());
  };
  make_slow();
  prove(2);
  const int busy = await_busy();
  // By the time that it has read what was said so far it finds the fourth's proof and a newcomer.
  make_slow();
  prove(3);
  connect();
  close(busy);
  const int busy_again = await_busy();
  prove(0);
  std::filesystem::rename(good, files.cert);
  close(busy_again);
  TakeStep(clients[4], handshakes[4]);
  ExpectNoPlace(clients[1], handshakes[1]);
  TakeStep(clients[0], handshakes[0]);
  EXPECT_TRUE(handshakes[0].done());
}

// However many descriptors there are: the store's loop looks at each of them, and with certificates
// alone all of them get as far as TLS, which takes memory for each.
TEST(StoreServerTest, UnauthenticatedClientsAreFew) {
  ASSERT_TRUE(ReserveDescriptors(3 * kMostUnauthenticated, "this test").ok());
  TestAuthority authority(std::string(std::getenv("TEST_TMPDIR")) + "/few");
  const auto certificates =
      Certificates::Load(authority.Issue("store", {.names = "DNS:job"})).value();
  const ClusterKey key = "a secret of the whole job";
  for (const bool has_key : {true, false}) {
    SCOPED_TRACE(has_key ? "a key" : "certificates");
    Socket listener = Socket::Listen("127.0.0.1", 0).value();
    const uint16_t port = listener.LocalPort().value();
    const auto server =
        StoreServer::Start(std::move(listener), {.cluster_key = has_key ? key : ClusterKey(),
                                                 .certificates = has_key ? nullptr : certificates,
                                                 .grace = absl::Hours(1),
                                                 .handshake_timeout = absl::Hours(1)});
    ASSERT_TRUE(server.ok()) << server.status();
    const std::string hello = Handshake::Create(Handshake::Role::kClient,
                                                has_key ? key : ClusterKey(), kStoreToken, !has_key)
                                  ->TakeOutput();
    std::list<Socket> strangers;
    for (size_t i = 0; i <= kMostUnauthenticated; ++i) {
      strangers.push_back(Socket::Connect("127.0.0.1", port, Later()).value());
      ASSERT_TRUE(strangers.back().Send(hello, Later()).ok());
    }
    // They are taken in the order in which they have come, and answered.
    char byte;
    EXPECT_TRUE(std::prev(strangers.end(), 2)->Receive(&byte, 1, Later()).ok());
    EXPECT_TRUE(absl::IsDeadlineExceeded(
        strangers.back().Receive(&byte, 1, Deadline::After(absl::Milliseconds(300)))));
    strangers.pop_front();
    EXPECT_TRUE(strangers.back().Receive(&byte, 1, Later()).ok());
  }
}

// The descriptors are used up, some of them by clients that say nothing.
TEST(StoreServerTest, UnauthenticatedClientsMakeRoomWhereThereAreNoDescriptors) {
  Socket listener = Socket::Listen("127.0.0.1", 0).value();
  const uint16_t port = listener.LocalPort().value();
  const auto server = StoreServer::Start(
      std::move(listener),
      {.max_unauthenticated = 100, .grace = absl::ZeroDuration(), .max_bytes = 1000});
  ASSERT_TRUE(server.ok()) << server.status();
  Socket stranger = Socket::Connect("127.0.0.1", port, Later()).value();
  Handshake half = Handshake::Create(Handshake::Role::kClient, "", kStoreToken).value();
  ASSERT_TRUE(stranger.Send(half.TakeOutput(), Later()).ok());
  std::string hello(half.wanted(), '\0');
  ASSERT_TRUE(stranger.Receive(hello.data(), hello.size(), Later()).ok());  // it is inside
  ASSERT_TRUE(half.Receive(hello).ok());
  Socket client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);

  const NoMoreDescriptors full;
  const int begun =
      connect(client.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  ASSERT_TRUE(begun == 0 || errno == EINPROGRESS) << std::strerror(errno);
  ShakeHands(client);
  ExpectNoPlace(stranger, half);
}

// Somebody in between holds an honest client's proof back until its place was given to another.
TEST(StoreServerTest, AnHonestClientThatMadeRoomComesAgain) {
  const std::string key = "a secret of the whole job";
  Socket listener = Socket::Listen("127.0.0.1", 0).value();
  const uint16_t port = listener.LocalPort().value();
  const auto server = StoreServer::Start(
      std::move(listener),
      {.cluster_key = key, .max_unauthenticated = 1, .grace = absl::ZeroDuration()});
  ASSERT_TRUE(server.ok()) << server.status();
  std::list<Socket> others;  // on the proxy's thread
  int proofs = 0;
  std::string told;
  {
    TcpProxy proxy(port, [&](TcpProxy::Way way, std::string bytes) {
      if (way == TcpProxy::Way::kToClient && absl::StrContains(bytes, "no place")) told += bytes;
      if (way == TcpProxy::Way::kToServer && bytes.size() == kProofBytes && ++proofs <= 5) {
        Handshake other = Handshake::Create(Handshake::Role::kClient, key, kStoreToken).value();
        others.push_back(Socket::Connect("127.0.0.1", port, Later()).value());
        TakeStep(others.back(), other);
      }
      return bytes;
    });
    const auto client = Join(proxy.port(), key);
    ASSERT_TRUE(client->Set("key", "x", Later()).ok());
  }
  EXPECT_GT(proofs, 5);
  EXPECT_EQ(told.size(), 5 * kProofBytes);
}

// How many there are: DISTGRAD_WRONG_KEYS, of which the long form has 10,000.
int WrongKeys() {
  const char* const count = std::getenv("DISTGRAD_WRONG_KEYS");
  return count == nullptr ? 300 : std::atoi(count);
}

size_t OpenFiles() {
  const std::filesystem::directory_iterator open("/proc/self/fd");
  return std::distance(begin(open), end(open));
}

// docs/security.md says what they cost, of whom there may be thousands.
TEST(StoreServerTest, AClientInItsHandshakeCostsLessThanAKilobyte) {
  const std::string key = "a secret of the whole job";
  const auto store = Serve(key);
  constexpr size_t kClients = 200;
  std::vector<Socket> clients;
  clients.reserve(kClients + 1);
  const auto begin = [&] {
    clients.push_back(Socket::Connect("127.0.0.1", store->port(), Later()).value());
    Handshake half = Handshake::Create(Handshake::Role::kClient, key, kStoreToken).value();
    ASSERT_TRUE(clients.back().Send(half.TakeOutput(), Later()).ok());
    std::string hello(half.wanted(), '\0');
    ASSERT_TRUE(clients.back().Receive(hello.data(), hello.size(), Later()).ok());
  };
  begin();  // what is allocated once
  const size_t files = OpenFiles(), before = mallinfo2().uordblks;
  if (before == 0) GTEST_SKIP() << "this allocator does not say what is in use";
  for (size_t i = 0; i < kClients; ++i) begin();
  const size_t after = mallinfo2().uordblks;
  EXPECT_LT(after, before + kClients * 1024);
  std::printf("%.0f bytes for each client\n", (1.0 * after - before) / kClients);
  EXPECT_EQ(OpenFiles(), files + 2 * kClients) << "one at each end";
}

// Of so many attempts of a kind, which `attempt` makes, whatever their number. `most_kept`: what
// the allocator, and the library for its next session, may keep all the same.
void ExpectNothingLeft(const std::function<void(int)>& attempt, const char* what) {
  attempt(50);  // what is allocated once
  const size_t files = OpenFiles(), before = mallinfo2().uordblks;
  const int count = WrongKeys();
  attempt(count);
  const size_t most = before + (64 << 10);
  // The server may not have noticed yet that the last client has gone.
  const absl::Time deadline = Later();
  while ((OpenFiles() > files || mallinfo2().uordblks >= most) && absl::Now() < deadline) {
    std::this_thread::yield();
  }
  std::printf("%d wrong %s: %zu files before and %zu after, %zu bytes of memory and %zu\n", count,
              what, files, OpenFiles(), before, static_cast<size_t>(mallinfo2().uordblks));
  EXPECT_LE(OpenFiles(), files);
  if (before == 0) GTEST_SKIP() << "this allocator does not say what is in use";
  EXPECT_LT(mallinfo2().uordblks, most);
}

// Those who try keys cost what they are, and only as long as they are there.
TEST(StoreServerTest, WrongKeysLeaveNothing) {
  const std::string key = "a secret of the whole job";
  const auto store = Serve(key);
  const auto attempt = [&](int count) {
    for (int i = 0; i < count; ++i) {
      Socket thief = Socket::Connect("127.0.0.1", store->port(), Later()).value();
      Handshake wrong = Handshake::Create(Handshake::Role::kClient,
                                          absl::StrCat("a secret of nobody ", i), kStoreToken)
                            .value();
      ASSERT_TRUE(thief.Send(wrong.TakeOutput(), Later()).ok());
      std::string hello(wrong.wanted(), '\0');
      ASSERT_TRUE(thief.Receive(hello.data(), hello.size(), Later()).ok());
      ASSERT_TRUE(wrong.Receive(hello).ok());
      ASSERT_TRUE(thief.Send(wrong.TakeOutput(), Later()).ok());
      char byte;
      ASSERT_TRUE(absl::IsUnavailable(thief.Receive(&byte, 1, Later())));
    }
    ASSERT_TRUE(Join(store->port(), key)->Set("key", "x", Later()).ok());
  };
  ExpectNothingLeft(attempt, "keys");
}

// The same of those who have the wrong certificates.
TEST(StoreServerTest, WrongCertificatesLeaveNothing) {
  const std::string folder = std::getenv("TEST_TMPDIR");
  TestAuthority authority(folder + "/flat");
  const auto certificates =
      Certificates::Load(authority.Issue("store", {.names = "DNS:job"})).value();
  Socket listener = Socket::Listen("127.0.0.1", 0).value();
  const uint16_t port = listener.LocalPort().value();
  const auto server = StoreServer::Start(std::move(listener), {.certificates = certificates});
  ASSERT_TRUE(server.ok()) << server.status();
  CertificateStrangers strangers(authority, folder + "/flat_strangers");
  ExpectNothingLeft(
      [&](int count) {
        for (int i = 0; i < count; ++i) ASSERT_EQ(strangers.Come(i, port, kStoreToken), "");
      },
      "certificates");
}

// More come at a time than may be unauthenticated. None of them is closed: one without a slot waits
// until others have shown who they are.
TEST(StoreServerTest, ACrowdComesInOneAfterTheOther) {
  Socket listener = Socket::Listen("127.0.0.1", 0).value();
  const uint16_t port = listener.LocalPort().value();
  const auto server = StoreServer::Start(
      std::move(listener),
      {.max_unauthenticated = 2, .grace = absl::Hours(1), .handshake_timeout = absl::Hours(1)});
  ASSERT_TRUE(server.ok()) << server.status();
  std::vector<Socket> crowd;
  for (int i = 0; i < 40; ++i) {
    crowd.push_back(Socket::Connect("127.0.0.1", port, Later()).value());
  }
  for (Socket& socket : crowd) ShakeHands(socket);
  // With all of them inside there is room again.
  ShakeHands(crowd.emplace_back(Socket::Connect("127.0.0.1", port, Later()).value()));
}

TEST(StoreServerTest, WhoComesBackOftenTakesNobodysPlace) {
  const auto store = Serve();
  Socket other = Friend(store->port());
  char known = 7;
  ASSERT_TRUE(other.Send("\x80" + Number(1), Later()).ok());
  ASSERT_TRUE(other.Receive(&known, 1, Later()).ok());
  std::vector<Socket> sockets;
  for (int i = 0; i < 300; ++i) {
    sockets.push_back(Friend(store->port()));
    ASSERT_TRUE(sockets.back().Send("\x80" + Number(2), Later()).ok());
    ASSERT_TRUE(sockets.back().Receive(&known, 1, Later()).ok());
    EXPECT_EQ(known, i == 0 ? 0 : 1);
    if (i == 0) continue;
    EXPECT_TRUE(absl::IsUnavailable(sockets[i - 1].Receive(&known, 1, Later())));
  }
  ASSERT_TRUE(other.Send("\x0d" + Short(7), Later()).ok());
  std::string pong(4, '\0');
  ASSERT_TRUE(other.Receive(pong.data(), 4, Later()).ok());
  EXPECT_EQ(pong, Short(7));
}

// What a client waits for has a place in the store's memory, or the client hears that it has none.
TEST(StoreServerTest, WaitsAreBounded) {
  Socket listener = Socket::Listen("127.0.0.1", 0).value();
  const uint16_t port = listener.LocalPort().value();
  const auto server = StoreServer::Start(std::move(listener), {.max_bytes = 100000});
  ASSERT_TRUE(server.ok()) << server.status();
  constexpr uint32_t kLong = 1 << 30;
  const Keys keys(kMaxAwaitKeys, std::string(100, 'k'));
  std::vector<Socket> sockets;
  for (int i = 0; i < 5; ++i) {
    sockets.push_back(Friend(port));
    ASSERT_TRUE(sockets.back().Send(Await(kLong, keys), Later()).ok());
  }
  // Two of them would need more than there is; which ones, nobody knows.
  int full = 0;
  for (Socket& socket : sockets) {
    // The pong of this comes after the wait's answer.
    ASSERT_TRUE(socket.Send("\x0d" + Short(7), Later()).ok());
    uint32_t size = 0, told = 0;
    ASSERT_TRUE(socket.Receive(&size, 4, Later()).ok());
    ASSERT_TRUE(socket.Receive(&told, 4, Later()).ok());
    full += told == kStoreFull;
  }
  EXPECT_GT(full, 0);
  sockets.clear();
  // And what they waited for is forgotten with them.
  const auto client = Join(port);
  EXPECT_TRUE(client->Set("key", std::string(90000, 'x'), Later()).ok());
}

TEST(StoreServerTest, WhatIsDeletedOrReplacedTakesNoRoom) {
  Socket listener = Socket::Listen("127.0.0.1", 0).value();
  const uint16_t port = listener.LocalPort().value();
  const auto server = StoreServer::Start(std::move(listener), {.max_bytes = 100000});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto client = Join(port);
  const std::string value(1000, 'x');
  for (int i = 0; i < 200; ++i) {
    const std::string key = absl::StrCat("key", i);
    ASSERT_EQ(client->Set(key, value, Later()), absl::OkStatus()) << i;
    ASSERT_EQ(client->Delete(key, Later()), absl::OkStatus());
  }
  for (int i = 0; i < 200; ++i) {
    ASSERT_EQ(client->Set("key", value, Later()), absl::OkStatus()) << i;
  }
}

// So many bytes, also of what has none of its own.
TEST(StoreServerTest, WhatAnEntryCostsBesideItsBytesCounts) {
  Socket listener = Socket::Listen("127.0.0.1", 0).value();
  const uint16_t port = listener.LocalPort().value();
  const auto server = StoreServer::Start(std::move(listener), {.max_bytes = 100000});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto client = Join(port);
  int entries = 0;
  absl::Status status;
  while (entries < 1000 && status.ok()) {
    status = client->Set(absl::StrCat("key", ++entries), "", Later());
  }
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_GT(entries, 500);
  for (int i = 1; i < entries; ++i) {
    ASSERT_TRUE(client->Delete(absl::StrCat("key", i), Later()).ok());
  }
  EXPECT_TRUE(client->Set("key", std::string(99000, 'x'), Later()).ok());
}

// The thread of this process with that name.
pid_t ThreadOf(const std::string& name) {
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string its_name;
    std::getline(std::ifstream(thread.path() / "comm"), its_name);
    if (its_name == name) return std::atoi(thread.path().filename().c_str());
  }
  ADD_FAILURE() << "no thread " << name;
  return 0;
}

class ServerWithoutMemoryTest : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Keys, ServerWithoutMemoryTest,
                         testing::Values("", "a secret of the whole job"),
                         [](const auto& info) { return info.index == 0 ? "Without" : "With"; });

// Wherever the server finds no memory: a client loses no more than its connection, nothing is done
// twice, and nothing stays counted.
TEST_P(ServerWithoutMemoryTest, ClientsComeAgain) {
  const std::string& key = GetParam();
  Socket listener = Socket::Listen("127.0.0.1", 0).value();
  const uint16_t port = listener.LocalPort().value();
  const auto server =
      StoreServer::Start(std::move(listener), {.cluster_key = key, .max_bytes = 600000});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto witness = Join(port, key);
  const pid_t thread = ThreadOf("dg/store");
  const std::string changed(1000, 'C'), counter(100, 'n'), value(20000, 'v');
  Keys others;  // that nobody sets
  for (int i = 0; i < 4; ++i) others.push_back(std::string(1000, static_cast<char>('a' + i)));
  Keys awaited = {changed};
  awaited.insert(awaited.end(), others.begin(), others.end());

  for (const int count : {1, 3}) {
    bool failed = true;
    for (int nth = 0; failed; ++nth) {
      SCOPED_TRACE(absl::StrCat(count, " from number ", nth, " on"));
      Socket waits = Friend(port, key), gone = Friend(port, key);
      FailAllocationOf(thread, nth, count);
      ASSERT_TRUE(waits.Send(Await(1 << 30, awaited), Later()).ok());
      gone = Socket();
      const auto client = Join(port, key);
      ASSERT_NE(client, nullptr);
      ASSERT_EQ(client->Set(changed, value, Later()), absl::OkStatus());
      ASSERT_EQ(client->Set(changed, value + value, Later()), absl::OkStatus());
      for (int sum = 1; sum <= 2; ++sum) {
        ASSERT_EQ(client->Add(counter, 1, Later()).value(), sum);
      }
      ASSERT_EQ(witness->GetEach(Keys{changed, counter}, Later()).value(),
                Values({value + value, "2"}));
      const Deadline moment = Deadline::After(absl::Milliseconds(1));
      ASSERT_EQ(client->AwaitChange(others, Values(others.size()), moment).value(),
                Values(others.size()));
      ASSERT_EQ(client->Delete(changed, Later()), absl::OkStatus());
      ASSERT_EQ(client->Delete(counter, Later()), absl::OkStatus());
      failed = FailAllocationOf(thread, -1);
      // It was told of the first change, or has lost its connection.
      std::string answer(13 + value.size(), '\0');
      const absl::Status told = waits.Receive(answer.data(), answer.size(), Later());
      ASSERT_TRUE(told.ok() ? absl::EndsWith(answer, value) : absl::IsUnavailable(told)) << told;
      ASSERT_TRUE(failed || told.ok()) << told;
    }
  }
  EXPECT_EQ(witness->Set("large", std::string(500000, 'x'), Later()), absl::OkStatus());
}

// It asks again on the connection that it has, and keeps no other request of its process from it.
TEST(StoreServerTest, WhoHasNoRoomToWaitKeepsItsConnection) {
  Socket listener = Socket::Listen("127.0.0.1", 0).value();
  const uint16_t port = listener.LocalPort().value();
  const auto server = StoreServer::Start(std::move(listener), {.max_bytes = 100000});
  ASSERT_TRUE(server.ok()) << server.status();
  std::atomic<int> connections{0};
  TcpStoreOptions options{.port = port, .deadline = Later()};
  options.resolver = [&](const std::string& host) {
    ++connections;
    return host;
  };
  const auto client = NewTcpStore(options);
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE((*client)->Set("large", std::string(90000, 'x'), Later()).ok());
  const Keys keys(kMaxAwaitKeys, std::string(400, 'k'));
  const std::vector<Store::Value> nothing(keys.size());
  std::thread other([&] {
    for (int i = 0; i < 100; ++i) {
      EXPECT_TRUE((*client)->Set("key", std::to_string(i), Later()).ok());
    }
  });
  // When its time is over it asks once more, which takes no room.
  const absl::Status waited =
      (*client)->AwaitChange(keys, nothing, Deadline::After(absl::Milliseconds(100))).status();
  EXPECT_EQ(waited, absl::OkStatus());
  other.join();
  EXPECT_EQ(connections, 1);
}

TEST(StoreServerTest, NobodyMayThinkForEver) {
  Socket listener = Socket::Listen("127.0.0.1", 0).value();
  const uint16_t port = listener.LocalPort().value();
  const auto server =
      StoreServer::Start(std::move(listener), {.handshake_timeout = absl::Milliseconds(20)});
  EXPECT_EQ(Heard(port, "distgrad"), "");
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc == 4 && std::string(argv[1]) == "--child") return distgrad::RunChild(argv[2], argv[3]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
