// Process groups with a cluster key: what somebody on the network sees of them, can change, and can
// do to their ports.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "core/membership/store.h"
#include "core/membership/store/in_process_store.h"
#include "core/net/endpoint.h"
#include "core/net/handshake.h"
#include "core/net/socket.h"
#include "core/parallel/process_group/process_group.h"
#include "tests/testing/forwarding_store.h"
#include "tests/testing/tcp_proxy.h"

namespace distgrad {
namespace {

using at::Tensor;
using Way = TcpProxy::Way;

const std::string kKey = "a key of thirty-two bytes, about";
const std::string kOtherKey = "A key of thirty-two bytes, about";

// Keeps the endpoints at which ranks listen, and may write others in their place.
class EndpointStore final : public ForwardingStore {
 public:
  using Change = std::function<void(Endpoint*)>;

  explicit EndpointStore(Change change = nullptr)
      : ForwardingStore(NewInProcessStore()), change_(std::move(change)) {}

  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    if (!absl::StrContains(key, "/encrypted/")) return ForwardingStore::Set(key, value, deadline);
    Endpoint endpoint = ParseEndpoint(value).value();
    {
      absl::MutexLock lock(&mu_);
      if (change_ != nullptr) change_(&endpoint);
      endpoints_.push_back(endpoint);
    }
    return ForwardingStore::Set(key, FormatEndpoint(endpoint), deadline);
  }

  // The first that comes.
  Endpoint Await() {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(
        +[](EndpointStore* self) { return !self->endpoints_.empty(); }, this));
    return endpoints_[0];
  }

 private:
  absl::Mutex mu_;
  const Change change_;  // under mu_
  std::vector<Endpoint> endpoints_ ABSL_GUARDED_BY(mu_);
};

uint16_t PortOf(const Endpoint& endpoint) {
  return static_cast<uint16_t>(std::stoi(endpoint.tcp.substr(endpoint.tcp.rfind(':') + 1)));
}

ProcessGroupOptions Options(std::shared_ptr<Store> store, int rank, int size,
                            const ClusterKey& key = kKey) {
  return {.name = "secret",
          .store = std::move(store),
          .rank = rank,
          .size = size,
          .timeout = absl::Minutes(2),
          .join_timeout = absl::Minutes(2),
          .cluster_key = key};
}

// What each of two ranks says to joining, and then to averaging `tensors`, one each.
std::vector<absl::Status> RunTwo(const std::shared_ptr<Store>& store,
                                 const std::vector<ClusterKey>& keys, std::vector<Tensor> tensors) {
  std::vector<absl::Status> results(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto group = ProcessGroup::Create(Options(store, rank, 2, keys[rank]));
      results[rank] = group.ok() ? (*group)->Average({tensors[rank]}) : group.status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

std::string BytesOf(const Tensor& tensor) {
  return std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
}

// A proxy before each rank.
class Proxies {
 public:
  explicit Proxies(TcpProxy::Edit edit)
      : store(std::make_shared<EndpointStore>([this, edit](Endpoint* endpoint) {
          TcpProxy& proxy = proxies_.emplace_back(PortOf(*endpoint), edit);
          endpoint->tcp = absl::StrCat("127.0.0.1:", proxy.port());
        })) {}

 private:
  std::list<TcpProxy> proxies_;  // outlive the store, and so the groups

 public:
  const std::shared_ptr<EndpointStore> store;
};

TEST(EncryptedGlooTest, WhoListensSeesNoTensor) {
  absl::Mutex mu;
  std::string seen;
  std::vector<Tensor> tensors = {at::rand({100'000}), at::rand({100'000})};
  std::vector<std::string> secrets;
  const Tensor sum = tensors[0].add(tensors[1]), average = sum.div(2);
  for (const Tensor& tensor : {tensors[0], tensors[1], sum, average}) {
    const std::string bytes = BytesOf(tensor);
    for (size_t at = 0; at + 16 <= bytes.size(); at += 9'992)
      secrets.push_back(bytes.substr(at, 16));
  }
  {
    Proxies proxies([&](Way, std::string bytes) {
      absl::MutexLock lock(&mu);
      seen += bytes;
      return bytes;
    });
    for (const absl::Status& status : RunTwo(proxies.store, {kKey, kKey}, tensors)) {
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  for (const Tensor& tensor : tensors) EXPECT_TRUE(tensor.equal(average));
  EXPECT_GT(seen.size(), 2 * average.nbytes()) << "it has not all passed here";
  for (const std::string& secret : secrets) EXPECT_FALSE(absl::StrContains(seen, secret));
}

// In one connection, of one way, the byte at `at`; or all before it, if the connection is shorter.
TEST(EncryptedGlooTest, AnyChangedByteIsAnErrorAndNoWrongResult) {
  std::vector<size_t> places = {0, 47, 79, 80, 85, 200, 300, 400, 500};
  for (size_t at = 1'000; at < 300'000; at += 49'999) places.push_back(at);
  for (const Way way : {Way::kToServer, Way::kToClient}) {
    for (const size_t at : places) {
      if (way == Way::kToClient && at > 200) continue;  // nothing but handshakes and the welcome
      SCOPED_TRACE(absl::StrCat(at, way == Way::kToServer ? " to the server" : " to the client"));
      size_t passed = 0;  // on the one proxy's thread that counts
      std::atomic<std::thread::id> counts{};
      bool changed = false;
      Proxies proxies([&](Way this_way, std::string bytes) {
        if (this_way != way) return bytes;
        std::thread::id none{};
        counts.compare_exchange_strong(none, std::this_thread::get_id());
        if (counts.load() != std::this_thread::get_id()) return bytes;
        if (!changed && at < passed + bytes.size()) {
          bytes[at - passed] ^= 4;
          changed = true;
        }
        passed += bytes.size();
        return bytes;
      });
      const std::vector<Tensor> tensors = {at::full({100'000}, 1.0f), at::full({100'000}, 2.0f)};
      const std::vector<absl::Status> results = RunTwo(proxies.store, {kKey, kKey}, tensors);
      EXPECT_FALSE(results[0].ok() && results[1].ok());
      for (const int rank : {0, 1}) {
        const absl::Status& status = results[rank];
        // A rank whose last message is changed on its way has all that it needs itself.
        if (status.ok()) {
          EXPECT_TRUE(tensors[rank].equal(at::full({100'000}, 1.5f)));
          continue;
        }
        EXPECT_TRUE(absl::IsUnavailable(status)) << status;
        EXPECT_TRUE(absl::StrContains(status.message(), "process group 'secret'")) << status;
      }
    }
  }
}

TEST(EncryptedGlooTest, AnotherKeyIsRefused) {
  const auto store = std::make_shared<EndpointStore>();
  const std::vector<Tensor> tensors = {at::ones({3}), at::ones({3})};
  for (const absl::Status& status : RunTwo(store, {kKey, kOtherKey}, tensors)) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "the same cluster key?")) << status;
    EXPECT_FALSE(absl::StrContains(status.message(), kKey)) << status;
  }
}

TEST(EncryptedGlooTest, OneWithoutAKeyIsAnErrorAndNotPlainText) {
  for (const bool first_has_key : {true, false}) {
    const auto store = std::make_shared<EndpointStore>();
    absl::Status results[2];
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        ProcessGroupOptions options =
            Options(store, rank, 2, (rank == 0) == first_has_key ? kKey : std::string());
        // Gloo's own, without a key, does not ask meanwhile whether another rank has failed.
        if (options.cluster_key.empty()) options.join_timeout = absl::Seconds(5);
        results[rank] = ProcessGroup::Create(options).status();
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(absl::IsFailedPrecondition(results[1])) << results[1];
    for (const absl::Status& status : results) {
      EXPECT_TRUE(absl::StrContains(status.message(), "cluster key")) << status;
      EXPECT_FALSE(status.ok());
    }
  }
}

// While a key is exchanged for another, ranks that have both get on with those that have one.
TEST(EncryptedGlooTest, RanksWithTwoKeysGetOn) {
  const ClusterKey old(kKey), both(kKey, kOtherKey), other_first(kOtherKey, kKey), fresh(kOtherKey);
  for (const auto& [first, second, ok] : std::vector<std::tuple<ClusterKey, ClusterKey, bool>>{
           {old, both, true},
           {both, other_first, true},
           {other_first, fresh, true},
           {old, other_first, false},
       }) {
    const std::vector<Tensor> tensors = {at::full({3}, 1.0f), at::full({3}, 3.0f)};
    for (const absl::Status& status :
         RunTwo(std::make_shared<EndpointStore>(), {first, second}, tensors)) {
      EXPECT_EQ(status.ok(), ok) << status;
    }
    if (ok) {
      EXPECT_TRUE(tensors[0].equal(at::full({3}, 2.0f)));
    }
  }
}

// Gets as far as a client with this key does; what the server says then.
std::string ShakeHands(Socket& socket, const std::string& key, const Token& token) {
  const Deadline deadline = Deadline::After(absl::Minutes(1));
  Handshake handshake = Handshake::Create(Handshake::Role::kClient, key, token).value();
  std::string bytes;
  while (!handshake.done()) {
    absl::Status status = socket.Send(handshake.TakeOutput(), deadline);
    bytes.resize(handshake.wanted());
    if (status.ok()) status = socket.Receive(bytes.data(), bytes.size(), deadline);
    if (status.ok()) status = handshake.Receive(bytes);
    if (!status.ok()) return std::string(status.message());
  }
  return "welcome";
}

// While the first rank waits for the second one.
TEST(EncryptedGlooTest, StrangersNeitherGetInNorDisturb) {
  const auto store = std::make_shared<EndpointStore>();
  const Tensor tensors[] = {at::full({1000}, 1.0f), at::full({1000}, 3.0f)};
  absl::Status results[2];
  const auto run = [&](int rank) {
    const auto group = ProcessGroup::Create(Options(store, rank, 2));
    results[rank] = group.ok() ? (*group)->Average({tensors[rank]}) : group.status();
  };
  std::thread first([&] { run(0); });
  // The second rank has come, or the first would not listen yet; it connects when it is let.
  absl::Notification connects;
  class Held final : public ForwardingStore {
   public:
    Held(std::shared_ptr<Store> store, absl::Notification* go)
        : ForwardingStore(std::move(store)), go_(go) {}
    absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
      if (absl::StrContains(key, "/encrypted/")) go_->WaitForNotification();
      return ForwardingStore::Set(key, value, deadline);
    }

   private:
    absl::Notification* const go_;
  };
  std::thread second([&] {
    const auto group =
        ProcessGroup::Create(Options(std::make_shared<Held>(store, &connects), 1, 2));
    results[1] = group.ok() ? (*group)->Average({tensors[1]}) : group.status();
  });

  const Endpoint endpoint = store->Await();
  const Deadline deadline = Deadline::After(absl::Minutes(1));
  const auto connect = [&] {
    return Socket::Connect("127.0.0.1", PortOf(endpoint), deadline).value();
  };
  std::list<Socket> silent;
  for (int i = 0; i < 300; ++i) silent.push_back(connect());  // more than it holds
  for (const std::string& words :
       {std::string("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), std::string(100'000, '\0'),
        std::string(64, '\xff'), std::string("distgraX")}) {
    Socket socket = connect();
    // It may close before it has all of it.
    socket.Send(words, deadline).IgnoreError();
    char answer;
    EXPECT_TRUE(absl::IsUnavailable(socket.Receive(&answer, 1, deadline))) << words.substr(0, 8);
  }
  Socket half = connect();
  ASSERT_TRUE(half.Send(Handshake::Create(Handshake::Role::kClient, kKey, endpoint.token)
                            ->TakeOutput()
                            .substr(0, 40),
                        deadline)
                  .ok());
  Socket wrong_key = connect(), wrong_token = connect();
  EXPECT_NE(ShakeHands(wrong_key, kOtherKey, endpoint.token), "welcome");
  EXPECT_NE(ShakeHands(wrong_token, kKey, Token{1}), "welcome");
  // One that has the key, and then speaks no TLS.
  Socket plain = connect();
  EXPECT_EQ(ShakeHands(plain, kKey, endpoint.token), "welcome");
  ASSERT_TRUE(plain.Send(std::string(1000, 'x'), deadline).ok());
  char answer;
  while (plain.Receive(&answer, 1, deadline).ok()) {  // an alert, perhaps, and then the end
  }

  connects.Notify();
  first.join();
  second.join();
  for (const absl::Status& status : results) EXPECT_TRUE(status.ok()) << status;
  for (const Tensor& tensor : tensors) EXPECT_TRUE(tensor.equal(at::full({1000}, 2.0f)));
}

// Once all are connected nobody can try any more.
TEST(EncryptedGlooTest, NobodyListensOnceAllAreConnected) {
  const auto store = std::make_shared<EndpointStore>();
  std::thread second([&] {
    const auto group = ProcessGroup::Create(Options(store, 1, 2));
    ASSERT_TRUE(group.ok()) << group.status();
    EXPECT_TRUE((*group)->Average({at::ones({1})}).ok());
  });
  const auto group = ProcessGroup::Create(Options(store, 0, 2));
  ASSERT_TRUE(group.ok()) << group.status();
  const Tensor tensor = at::ones({1});
  EXPECT_TRUE((*group)->Average({tensor}).ok());
  second.join();
  const auto socket =
      Socket::Connect("127.0.0.1", PortOf(store->Await()), Deadline::After(absl::Minutes(1)));
  EXPECT_TRUE(absl::IsFailedPrecondition(socket.status())) << socket.status();
}

TEST(EncryptedGlooTest, TensorsOfOtherSizesAreAnErrorThatSaysSo) {
  const auto store = std::make_shared<EndpointStore>();
  const std::vector<absl::Status> results =
      RunTwo(store, {kKey, kKey}, {at::ones({1000}), at::ones({2000})});
  bool said = false;
  for (const absl::Status& status : results) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    said = said || absl::StrContains(status.message(), "the same shapes?");
  }
  EXPECT_TRUE(said) << results[0] << "\n" << results[1];
}

}  // namespace
}  // namespace distgrad
