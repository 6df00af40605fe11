// Process groups with a cluster key: what somebody on the network sees of them, can change, and can
// do to their ports.
#include "core/parallel/process_group/encrypted_gloo.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/synchronization/barrier.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "core/base/wire.h"
#include "core/membership/store.h"
#include "core/membership/store/in_process_store.h"
#include "core/net/certificates.h"
#include "core/net/endpoint.h"
#include "core/net/handshake.h"
#include "core/net/loop.h"
#include "core/net/socket.h"
#include "core/parallel/process_group/process_group.h"
#include "core/tensor/exception.h"
#include "core/transport/tensorpipe/socket/socket_listener.h"
#include "gloo/transport/context.h"
#include "tests/testing/certificate_strangers.h"
#include "tests/testing/certificates.h"
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

  bool has_endpoints() {
    absl::MutexLock lock(&mu_);
    return !endpoints_.empty();
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

// For one test.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    setenv(name, value.c_str(), 1);
  }
  ~Variable() { unsetenv(name_); }

 private:
  const char* const name_;
};

// What each rank says to joining a group, each by the options that `options` gives it.
std::vector<absl::Status> Join(int size, const std::function<ProcessGroupOptions(int)>& options) {
  std::vector<absl::Status> results(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back(
        [&, rank] { results[rank] = ProcessGroup::Create(options(rank)).status(); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

// What each of two ranks says to joining, and then to averaging `tensors`, one each.
// `certificates`: what both have, or null.
std::vector<absl::Status> RunTwo(const std::shared_ptr<Store>& store,
                                 const std::vector<ClusterKey>& keys, std::vector<Tensor> tensors,
                                 const std::shared_ptr<Certificates>& certificates = nullptr) {
  std::vector<absl::Status> results(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      ProcessGroupOptions options = Options(store, rank, 2, keys[rank]);
      options.certificates = certificates;
      const auto group = ProcessGroup::Create(options);
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

  // Of the first two connections to each rank. For three ranks or more that are connected.
  void ExchangeServers() {
    for (TcpProxy& proxy : proxies_) proxy.ExchangeServers();
  }

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

TEST(EncryptedGlooTest, WithCertificatesAloneWhoListensSeesNoTensor) {
  TestAuthority authority(std::string(std::getenv("TEST_TMPDIR")) + "/group");
  absl::Mutex mu;
  std::string seen;
  const std::vector<Tensor> tensors = {at::rand({10'000}), at::rand({10'000})};
  const Tensor average = tensors[0].add(tensors[1]).div(2);
  const std::string secret = BytesOf(tensors[0]).substr(5'000, 16);
  Proxies proxies([&](Way, std::string bytes) {
    absl::MutexLock lock(&mu);
    seen += bytes;
    return bytes;
  });
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    ProcessGroupOptions options = Options(proxies.store, rank, 2, ClusterKey());
    options.certificates =
        Certificates::Load(authority.Issue(absl::StrCat(rank), {.names = "URI:spiffe://job/rank"}))
            .value();
    threads.emplace_back([&, rank, options] {
      const auto group = ProcessGroup::Create(options);
      ASSERT_TRUE(group.ok()) << group.status();
      const absl::Status status = (*group)->Average({tensors[rank]});
      EXPECT_TRUE(status.ok()) << status;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Tensor& tensor : tensors) EXPECT_TRUE(tensor.equal(average));
  absl::MutexLock lock(&mu);
  EXPECT_GT(seen.size(), average.nbytes()) << "it has not all passed here";
  EXPECT_FALSE(absl::StrContains(seen, secret));
}

TEST(EncryptedGlooTest, ACertificateOfAnotherAuthorityIsRefused) {
  const std::string folder = std::getenv("TEST_TMPDIR");
  TestAuthority ours(folder + "/ours"), theirs(folder + "/theirs");
  const auto store = std::make_shared<EndpointStore>();
  std::vector<CertificateFiles> files = {ours.Issue("rank", {.names = "DNS:job"}),
                                         theirs.Issue("rank", {.names = "DNS:job"})};
  for (const absl::Status& status : Join(2, [&](int rank) {
         ProcessGroupOptions options = Options(store, rank, 2, ClusterKey());
         options.certificates = Certificates::Load(files[rank]).value();
         return options;
       })) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "certificate")) << status;
  }
}

// And not at the deadline: after two attempts.
TEST(EncryptedGlooTest, ARankWhoseCertificateIsRefusedFailsAtOnce) {
  const std::string folder = std::getenv("TEST_TMPDIR");
  TestAuthority ours(folder + "/honest"), theirs(folder + "/strange");
  const CertificateFiles honest = ours.Issue("honest", {.names = "DNS:job"});
  CertificateFiles takes_ours = theirs.Issue("takes_ours", {.names = "DNS:job"});
  takes_ours.ca = honest.ca;
  for (const CertificateFiles& strange : {takes_ours, theirs.Issue("strange", {.names = "DNS:job"}),
                                          ours.Issue("old", {.names = "DNS:job", .days = -1})}) {
    std::atomic<int> attempts{0};
    Proxies proxies([&](Way way, std::string bytes) {
      if (way == Way::kToServer && absl::StartsWith(bytes, "distgrad")) ++attempts;
      return bytes;
    });
    for (const absl::Status& status : Join(2, [&](int rank) {
           ProcessGroupOptions options = Options(proxies.store, rank, 2, ClusterKey());
           options.certificates = Certificates::Load(rank == 0 ? honest : strange).value();
           return options;
         })) {
      EXPECT_TRUE(absl::IsUnavailable(status)) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "certificate")) << status;
    }
    EXPECT_LE(attempts, 4) << "two of each rank";
  }
}

// Somebody on the way may have shown it, or the rank's agent replaces it just now, as here: each
// rank refuses the other, or is refused by it, before that.
TEST(EncryptedGlooTest, OneRefusedCertificateIsNotTheEndOfAGroup) {
  const std::string folder = std::getenv("TEST_TMPDIR");
  TestAuthority ours(folder + "/job"), theirs(folder + "/stranger");
  const CertificateFiles honest = ours.Issue("honest", {.names = "DNS:job"});
  const CertificateFiles good = ours.Issue("renewed", {.names = "DNS:job"});
  CertificateFiles renewed = theirs.Issue("renewed", {.names = "DNS:job"});
  renewed.ca = honest.ca;
  absl::Mutex mu;
  std::map<std::thread::id, int> attempts;  // by the proxy, each of which has a thread
  int again = 0;
  const auto both_again = [&] { return again == 2; };
  Proxies proxies([&](Way way, std::string bytes) {
    if (way != Way::kToServer || !absl::StartsWith(bytes, "distgrad")) return bytes;
    absl::MutexLock lock(&mu);
    if (++attempts[std::this_thread::get_id()] != 2) return bytes;
    if (++again == 2) {
      // The key first: a certificate without its key is not taken.
      std::filesystem::rename(good.key, renewed.key);
      std::filesystem::rename(good.cert, renewed.cert);
    }
    // Where the other rank has given up it does not come again.
    mu.AwaitWithTimeout(absl::Condition(&both_again), absl::Seconds(30));
    return bytes;
  });
  for (const absl::Status& status : Join(2, [&](int rank) {
         ProcessGroupOptions options = Options(proxies.store, rank, 2, ClusterKey());
         options.certificates = Certificates::Load(rank == 0 ? honest : renewed).value();
         return options;
       })) {
    EXPECT_TRUE(status.ok()) << status;
  }
  absl::MutexLock lock(&mu);
  EXPECT_EQ(again, 2);
}

// What ranks may have: a key (null), or certificates alone.
std::vector<std::shared_ptr<Certificates>> Secured(const std::string& name) {
  TestAuthority authority(absl::StrCat(std::getenv("TEST_TMPDIR"), "/", name));
  return {nullptr, Certificates::Load(authority.Issue("rank", {.names = "DNS:job"})).value()};
}

// Lets `edit` change what passes one rank's proxy in one way where it has come to `at` bytes, once.
// A connection that ends before its rank is welcome is opened again; else it is an error.
void Tamper(const std::shared_ptr<Certificates>& certificates, Way way, size_t at,
            const std::function<void(std::string*, size_t)>& edit) {
  SCOPED_TRACE(absl::StrCat(at, way == Way::kToServer ? " to the server" : " to the client",
                            certificates != nullptr ? ", certificates" : ", a key"));
  size_t passed = 0;  // on the one proxy's thread that counts
  std::atomic<std::thread::id> counts{};
  bool changed = false;
  std::atomic<int> connections{0};
  Proxies proxies([&](Way this_way, std::string bytes) {
    std::thread::id none{};
    counts.compare_exchange_strong(none, std::this_thread::get_id());
    if (counts.load() != std::this_thread::get_id()) return bytes;
    if (this_way == Way::kToServer && absl::StartsWith(bytes, "distgrad")) ++connections;
    if (this_way != way) return bytes;
    const size_t size = bytes.size();
    if (!changed && at < passed + size) {
      edit(&bytes, at - passed);
      changed = true;
    }
    passed += size;
    return bytes;
  });
  const std::vector<Tensor> tensors = {at::full({100'000}, 1.0f), at::full({100'000}, 2.0f)};
  const ClusterKey key = certificates != nullptr ? ClusterKey() : ClusterKey(kKey);
  const std::vector<absl::Status> results =
      RunTwo(proxies.store, {key, key}, tensors, certificates);
  if (results[0].ok() && results[1].ok()) {
    EXPECT_TRUE(connections > 1 || !changed);
  }
  for (const int rank : {0, 1}) {
    const absl::Status& status = results[rank];
    // As well if the other rank has not: one whose last message is changed on its way has all
    // that it needs itself.
    if (status.ok()) {
      EXPECT_TRUE(tensors[rank].equal(at::full({100'000}, 1.5f)));
      continue;
    }
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "process group 'secret'")) << status;
  }
}

// In the midst of what the ranks send each other, behind the handshakes: what is left out at the
// end of all is missed by who waits for it, at its deadline.
std::vector<size_t> PlacesInTensors() {
  std::vector<size_t> places;
  for (size_t at = 5'000; at < 300'000; at += 49'999) places.push_back(at);
  return places;
}

TEST(EncryptedGlooTest, AnyChangedByteEndsTheConnectionAndIsNoWrongResult) {
  const auto flip = [](std::string* bytes, size_t i) { (*bytes)[i] ^= 4; };
  for (const auto& certificates : Secured("changed")) {
    for (const size_t at : {0, 47, 79, 80, 85, 200, 300, 400, 500}) {
      Tamper(certificates, Way::kToServer, at, flip);
      // Nothing but handshakes and the welcome.
      Tamper(certificates, Way::kToClient, at, flip);
    }
    for (const size_t at : PlacesInTensors()) Tamper(certificates, Way::kToServer, at, flip);
  }
}

TEST(EncryptedGlooTest, WhatIsLeftOutRepeatedOrReorderedEndsTheConnectionAndIsNoWrongResult) {
  for (const auto& certificates : Secured("left_out")) {
    for (const size_t at : PlacesInTensors()) {
      Tamper(certificates, Way::kToServer, at,
             [](std::string* bytes, size_t i) { bytes->erase(i, 100); });
      Tamper(certificates, Way::kToServer, at,
             [](std::string* bytes, size_t i) { bytes->insert(i, bytes->substr(i, 100)); });
      Tamper(certificates, Way::kToServer, at, [](std::string* bytes, size_t i) {
        std::reverse(bytes->begin() + static_cast<ptrdiff_t>(i / 2), bytes->end());
      });
    }
  }
}

// Somebody in between gives each of two ranks the other's connection to the third.
TEST(EncryptedGlooTest, ConnectionsThatAreSplicedEndAndAreNoWrongResult) {
  TestAuthority authority(std::string(std::getenv("TEST_TMPDIR")) + "/spliced");
  for (const bool with_certificates : {false, true}) {
    SCOPED_TRACE(with_certificates);
    Proxies proxies([](Way, std::string bytes) { return bytes; });
    absl::Barrier connected(3), exchanged(3);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ProcessGroupOptions options =
          Options(proxies.store, rank, 3, with_certificates ? ClusterKey() : ClusterKey(kKey));
      if (with_certificates) {
        options.certificates =
            Certificates::Load(authority.Issue(absl::StrCat(rank), {.names = "DNS:job"})).value();
      }
      ranks.emplace_back([&, rank, options] {
        const auto group = ProcessGroup::Create(options);
        ASSERT_TRUE(group.ok()) << group.status();
        const Tensor tensor = at::full({10'000}, static_cast<float>(rank));
        absl::Status status = (*group)->Average({tensor});
        EXPECT_TRUE(status.ok()) << status;
        EXPECT_TRUE(tensor.equal(at::ones({10'000})));
        connected.Block();
        if (rank == 0) proxies.ExchangeServers();
        exchanged.Block();
        tensor.fill_(static_cast<float>(rank));
        status = (*group)->Average({tensor});
        EXPECT_TRUE(absl::IsUnavailable(status)) << status;
        EXPECT_TRUE(tensor.equal(at::full({10'000}, static_cast<float>(rank)))) << rank;
      });
    }
    for (std::thread& rank : ranks) rank.join();
  }
}

TEST(EncryptedGlooTest, AnotherKeyIsRefused) {
  const auto store = std::make_shared<EndpointStore>();
  const std::vector<Tensor> tensors = {at::ones({3}), at::ones({3})};
  for (const absl::Status& status : RunTwo(store, {kKey, kOtherKey}, tensors)) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 1 has another cluster key than rank 0"))
        << status;
    EXPECT_FALSE(absl::StrContains(status.message(), kKey)) << status;
  }
}

TEST(EncryptedGlooTest, WithoutTheOptionTheKeyIsThatOfTheEnvironment) {
  const Variable key("DISTGRAD_KEY", kKey);
  const auto store = std::make_shared<EndpointStore>();
  for (const absl::Status& status : Join(2, [&](int rank) {
         ProcessGroupOptions options = Options(store, rank, 2);
         options.cluster_key = std::nullopt;
         return options;
       })) {
    EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_TRUE(store->has_endpoints()) << "it is not encrypted";
  const Variable too_short("DISTGRAD_KEY", "short");
  ProcessGroupOptions options = Options(store, 0, 1);
  options.cluster_key = std::nullopt;
  const absl::Status status = ProcessGroup::Create(options).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
}

// It sends plain text.
TEST(EncryptedGlooTest, GloosOwnTlsIsRefused) {
  const Variable transport("GLOO_DEVICE_TRANSPORT", "TCP_TLS");
  const auto store = std::make_shared<EndpointStore>();
  const absl::Status status = ProcessGroup::Create(Options(store, 0, 1, ClusterKey())).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "DISTGRAD_KEY_FILE")) << status;
  // Ours does not ask for it.
  for (const absl::Status& each : Join(2, [&](int rank) { return Options(store, rank, 2); })) {
    EXPECT_TRUE(each.ok()) << each;
  }
}

TEST(EncryptedGlooTest, OneWithoutAKeyIsAnErrorAndNotPlainText) {
  for (const bool first_has_key : {true, false}) {
    const auto store = std::make_shared<EndpointStore>();
    // Long before join_timeout.
    for (const absl::Status& status : Join(2, [&](int rank) {
           return Options(store, rank, 2,
                          (rank == 0) == first_has_key ? ClusterKey(kKey) : ClusterKey());
         })) {
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "has a cluster key and rank")) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "DISTGRAD_KEY_FILE")) << status;
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

// Gets as far as a client can; what the server says then.
std::string ShakeHands(Socket& socket, Handshake& handshake) {
  const Deadline deadline = Deadline::After(absl::Minutes(1));
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
std::string ShakeHands(Socket& socket, const std::string& key, const Token& token) {
  Handshake handshake = Handshake::Create(Handshake::Role::kClient, key, token).value();
  return ShakeHands(socket, handshake);
}

// Lets no rank say where it listens before it may.
class HeldStore final : public ForwardingStore {
 public:
  HeldStore(std::shared_ptr<Store> store, absl::Notification* go)
      : ForwardingStore(std::move(store)), go_(go) {}
  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    if (absl::StrContains(key, "/encrypted/")) go_->WaitForNotification();
    return ForwardingStore::Set(key, value, deadline);
  }

 private:
  absl::Notification* const go_;
};

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
  std::thread second([&] {
    const auto group =
        ProcessGroup::Create(Options(std::make_shared<HeldStore>(store, &connects), 1, 2));
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
  // Half a handshake, of one that then waits and one that breaks off with a reset.
  const std::string hello =
      Handshake::Create(Handshake::Role::kClient, kKey, endpoint.token)->TakeOutput();
  Socket half = connect(), quitter = connect();
  ASSERT_TRUE(half.Send(hello.substr(0, 40), deadline).ok());
  ASSERT_TRUE(quitter.Send(hello.substr(0, 40), deadline).ok());
  const linger reset = {1, 0};
  ASSERT_EQ(setsockopt(quitter.fd(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)), 0);
  quitter = Socket();
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

size_t OpenFiles() {
  const std::filesystem::directory_iterator open("/proc/self/fd");
  return std::distance(begin(open), end(open));
}

int WrongKeys() {
  const char* const count = std::getenv("DISTGRAD_WRONG_KEYS");
  return count == nullptr ? 300 : std::atoi(count);
}

// Two ranks of a group average, of which the second comes late: meanwhile there are so many
// attempts to get in as there are wrong keys, and nothing is left of them.
void ExpectNothingLeft(
    const char* what,
    const std::function<ProcessGroupOptions(std::shared_ptr<Store>, int)>& options,
    const std::function<void(const Endpoint&, int)>& attempt) {
  const auto store = std::make_shared<EndpointStore>();
  absl::Notification connects;
  const Tensor tensors[] = {at::full({10}, 1.0f), at::full({10}, 3.0f)};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ProcessGroupOptions of_rank = options(store, rank);
    if (rank == 1) of_rank.store = std::make_shared<HeldStore>(store, &connects);
    of_rank.join_timeout = absl::Minutes(10);
    ranks.emplace_back([&, rank, of_rank] {
      const auto group = ProcessGroup::Create(of_rank);
      ASSERT_TRUE(group.ok()) << group.status();
      const absl::Status status = (*group)->Average({tensors[rank]});
      EXPECT_TRUE(status.ok()) << status;
    });
  }
  const Endpoint endpoint = store->Await();
  for (int i = 0; i < 50; ++i) attempt(endpoint, i);  // what is allocated once
  const size_t files = OpenFiles(), before = mallinfo2().uordblks;
  const int count = WrongKeys();
  for (int i = 0; i < count; ++i) attempt(endpoint, i);
  const size_t most = before + (64 << 10);
  // The rank may not have noticed yet that the last of them has gone.
  const absl::Time deadline = absl::Now() + absl::Minutes(1);
  while ((OpenFiles() > files || mallinfo2().uordblks >= most) && absl::Now() < deadline) {
    std::this_thread::yield();
  }
  const size_t files_after = OpenFiles(), after = mallinfo2().uordblks;
  std::printf("%d wrong %s: %zu files before and %zu after, %zu bytes of memory and %zu\n", count,
              what, files, files_after, before, after);
  connects.Notify();
  for (std::thread& thread : ranks) thread.join();
  for (const Tensor& tensor : tensors) EXPECT_TRUE(tensor.equal(at::full({10}, 2.0f)));
  EXPECT_LE(files_after, files);
  if (before == 0) GTEST_SKIP() << "this allocator does not say what is in use";
  EXPECT_LT(after, most);
}

// Those who try keys while a rank waits for another cost what they are, and only as long as they
// are there.
TEST(EncryptedGlooTest, WrongKeysLeaveNothing) {
  ExpectNothingLeft(
      "keys", [](auto store, int rank) { return Options(std::move(store), rank, 2); },
      [](const Endpoint& endpoint, int i) {
        Socket thief =
            Socket::Connect("127.0.0.1", PortOf(endpoint), Deadline::After(absl::Minutes(1)))
                .value();
        ASSERT_NE(ShakeHands(thief, absl::StrCat(kOtherKey, i), endpoint.token), "welcome");
      });
}

// The same of those who have the wrong certificates, of whom each gets as far as TLS.
TEST(EncryptedGlooTest, WrongCertificatesLeaveNothing) {
  const std::string folder = std::getenv("TEST_TMPDIR");
  TestAuthority authority(folder + "/flat");
  CertificateStrangers strangers(authority, folder + "/flat_strangers");
  ExpectNothingLeft(
      "certificates",
      [&](auto store, int rank) {
        ProcessGroupOptions options = Options(std::move(store), rank, 2, ClusterKey());
        options.certificates =
            Certificates::Load(authority.Issue(absl::StrCat(rank), {.names = "DNS:job"})).value();
        return options;
      },
      [&](const Endpoint& endpoint, int i) {
        ASSERT_EQ(strangers.Come(i, PortOf(endpoint), endpoint.token), "");
      });
}

TEST(EncryptedGlooTest, StrangersToCertificatesNeitherGetInNorDisturb) {
  const std::string folder = std::getenv("TEST_TMPDIR");
  TestAuthority authority(folder + "/job");
  CertificateStrangers strangers(authority, folder + "/strangers");
  const auto store = std::make_shared<EndpointStore>();
  const Tensor tensors[] = {at::full({1000}, 1.0f), at::full({1000}, 3.0f)};
  absl::Notification connects;  // the second rank, when the strangers have come to the first
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    ProcessGroupOptions options = Options(store, rank, 2, ClusterKey());
    if (rank == 1) options.store = std::make_shared<HeldStore>(store, &connects);
    options.certificates =
        Certificates::Load(authority.Issue(absl::StrCat(rank), {.names = "DNS:job"})).value();
    threads.emplace_back([&, rank, options] {
      const auto group = ProcessGroup::Create(options);
      ASSERT_TRUE(group.ok()) << group.status();
      const absl::Status status = (*group)->Average({tensors[rank]});
      EXPECT_TRUE(status.ok()) << status;
    });
  }
  const Endpoint endpoint = store->Await();
  EXPECT_EQ(strangers.Visit(PortOf(endpoint), endpoint.token), "");
  connects.Notify();
  for (std::thread& thread : threads) thread.join();
  for (const Tensor& tensor : tensors) EXPECT_TRUE(tensor.equal(at::full({1000}, 2.0f)));
}

// A listener that holds too many strangers closes the connections of ranks, too.
TEST(EncryptedGlooTest, AConnectionThatIsClosedBeforeItIsWelcomeIsOpenedAgain) {
  std::atomic<int> begun{0};
  Proxies proxies([&](Way way, std::string bytes) {
    if (way == Way::kToServer && absl::StartsWith(bytes, "distgrad") && begun++ < 5) {
      bytes[0] = 'x';
    }
    return bytes;
  });
  const std::vector<Tensor> tensors = {at::full({10}, 1.0f), at::full({10}, 3.0f)};
  for (const absl::Status& status : RunTwo(proxies.store, {kKey, kKey}, tensors)) {
    EXPECT_TRUE(status.ok()) << status;
  }
  for (const Tensor& tensor : tensors) EXPECT_TRUE(tensor.equal(at::full({10}, 2.0f)));
  EXPECT_GT(begun, 5);
}

// Exchanges the entries of two ranks, as who can write to a store that is not signed may.
class ExchangingStore final : public ForwardingStore {
 public:
  ExchangingStore(std::shared_ptr<Store> store, std::string one, std::string other)
      : ForwardingStore(std::move(store)), one_(std::move(one)), other_(std::move(other)) {}

  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    std::string where = key;
    if (absl::StrContains(key, one_)) {
      where = absl::StrReplaceAll(key, {{one_, other_}});
    } else if (absl::StrContains(key, other_)) {
      where = absl::StrReplaceAll(key, {{other_, one_}});
    }
    return ForwardingStore::Set(where, value, deadline);
  }

 private:
  const std::string one_, other_;
};

TEST(EncryptedGlooTest, ARankThatIsNotTheOneLookedForIsNotTakenForIt) {
  const auto store =
      std::make_shared<ExchangingStore>(NewInProcessStore(), "/encrypted/1", "/encrypted/2");
  bool said = false;
  for (const absl::Status& status : Join(3, [&](int rank) { return Options(store, rank, 3); })) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    said = said || absl::StrContains(status.message(), "there is rank");
  }
  EXPECT_TRUE(said);
}

TEST(EncryptedGlooTest, ARankOfAnotherGroupIsNotTakenForOneOfThis) {
  const auto store = std::make_shared<ExchangingStore>(
      NewInProcessStore(), "group/one/1/encrypted/1", "group/two/1/encrypted/1");
  bool said = false;
  for (const absl::Status& status : Join(4, [&](int i) {
         ProcessGroupOptions options = Options(store, i % 2, 2);
         options.name = i < 2 ? "one" : "two";
         return options;
       })) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    said = said || absl::StrContains(status.message(), "of another group");
  }
  EXPECT_TRUE(said);
}

// As of a process that is killed: it says nothing.
class MuteStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    if (absl::EndsWith(key, "/failure")) return absl::OkStatus();
    return ForwardingStore::Set(key, value, deadline);
  }
};

TEST(EncryptedGlooTest, ARankThatDiesWhileOthersAreStillToComeIsNoticedAtOnce) {
  const std::shared_ptr<Store> store = NewInProcessStore();
  absl::Notification may_come;
  absl::Status results[3];
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      ProcessGroupOptions options = Options(store, rank, 3);
      if (rank == 1) {
        options.store = std::make_shared<MuteStore>(store);
        options.join_timeout = absl::Seconds(2);
      }
      if (rank == 2) options.store = std::make_shared<HeldStore>(store, &may_come);
      results[rank] = ProcessGroup::Create(options).status();
      if (rank == 0) may_come.Notify();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(absl::IsDeadlineExceeded(results[1])) << results[1];
  EXPECT_TRUE(absl::IsUnavailable(results[0])) << results[0];
  EXPECT_TRUE(absl::StrContains(results[0].message(), "rank 1")) << results[0];
}

// Who finds the connections of a rank closed shall find its reason.
TEST(EncryptedGlooTest, ARankThatGivesUpSaysWhyBeforeItCloses) {
  class Watch final : public ForwardingStore {
   public:
    using ForwardingStore::ForwardingStore;
    absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
      if (absl::EndsWith(key, "/encrypted/0")) port_ = PortOf(ParseEndpoint(value).value());
      if (absl::EndsWith(key, "/encrypted/1")) {
        return ForwardingStore::Set(key, "nowhere", deadline);
      }
      if (absl::EndsWith(key, "/failure") && absl::StartsWith(value, "rank 0")) {
        const auto socket = Socket::Connect("127.0.0.1", port_, Deadline::After(absl::Minutes(1)));
        listened = socket.ok();
      }
      return ForwardingStore::Set(key, value, deadline);
    }
    std::atomic<bool> listened{false};

   private:
    std::atomic<uint16_t> port_{0};
  };
  const auto store = std::make_shared<Watch>(NewInProcessStore());
  const auto others = std::make_shared<MuteStore>(store);
  const std::vector<absl::Status> results = Join(2, [&](int rank) {
    return Options(rank == 0 ? std::shared_ptr<Store>(store) : others, rank, 2);
  });
  EXPECT_TRUE(absl::IsInvalidArgument(results[0])) << results[0];
  EXPECT_TRUE(store->listened);
}

// However many ranks wait for one: what they ask the store grows with time, not with each that
// comes.
TEST(EncryptedGlooTest, RanksThatWaitDoNotAskTheStoreForEachThatComes) {
  class Count final : public ForwardingStore {
   public:
    using ForwardingStore::ForwardingStore;
    absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
      if (absl::EndsWith(keys[0], "/failure")) ++asked;
      return ForwardingStore::GetEach(keys, deadline);
    }
    std::atomic<int> asked{0};
  };
  constexpr int kRanks = 12;
  const auto store = std::make_shared<Count>(NewInProcessStore());
  const absl::Time begin = absl::Now();
  for (const absl::Status& status :
       Join(kRanks, [&](int rank) { return Options(store, rank, kRanks); })) {
    EXPECT_TRUE(status.ok()) << status;
  }
  const double seconds = absl::ToDoubleSeconds(absl::Now() - begin);
  EXPECT_LE(store->asked, kRanks * (5 * seconds + 1));
}

// The device of one rank.
std::shared_ptr<EncryptedGloo> NewEncryptedGloo(const std::shared_ptr<Store>& store,
                                                absl::Duration connect_timeout = absl::Minutes(2)) {
  return std::make_shared<EncryptedGloo>(EncryptedGlooOptions{
      .cluster_key = kKey,
      .host = "127.0.0.1",
      .store = store,
      .connect_timeout = connect_timeout,
      .failed_elsewhere = [] { return absl::OkStatus(); },
      .tell_failure = [](const absl::Status&) {},
  });
}

// What a call of Gloo's throws; OK if nothing.
absl::Status StatusOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const StatusError& error) {
    return error.status();
  }
  return absl::OkStatus();
}

// Two ranks that are connected, whose messages a test sends and receives itself.
struct ConnectedRanks {
  ConnectedRanks() {
    const std::shared_ptr<Store> store = NewInProcessStore();
    for (int rank = 0; rank < 2; ++rank) {
      devices.push_back(NewEncryptedGloo(store));
      contexts.push_back(devices[rank]->createContext(rank, 2));
    }
    std::thread other([&] { contexts[1]->createAndConnectAllPairs(nullptr); });
    contexts[0]->createAndConnectAllPairs(nullptr);
    other.join();
  }

  std::vector<std::shared_ptr<EncryptedGloo>> devices;
  std::vector<std::shared_ptr<gloo::transport::Context>> contexts;
};

// Rank 1 of two, of which a test plays the connection to rank 0. docs/wire.md has the bytes.
class PlayedRank {
 public:
  PlayedRank() = default;
  explicit PlayedRank(const Endpoint& endpoint) {
    const absl::Status connected = Connect(endpoint);
    EXPECT_TRUE(connected.ok()) << connected;
  }

  // Connects, and says hello.
  absl::Status Connect(const Endpoint& endpoint) {
    absl::StatusOr<Socket> socket = Socket::Connect("127.0.0.1", PortOf(endpoint), deadline_);
    if (!socket.ok()) return socket.status();
    socket_ = *std::move(socket);
    Handshake handshake = Handshake::Create(Handshake::Role::kClient, kKey, endpoint.token).value();
    const std::string answer = ShakeHands(socket_, handshake);
    if (answer != "welcome") return absl::UnavailableError(answer);
    const absl::Status encrypted = socket_.StartTls(handshake, nullptr, deadline_);
    return encrypted.ok() ? Send(Hello(/*from=*/1, /*to=*/0)) : encrypted;
  }

  void AwaitAnswer() {
    const std::string expected = FrameOf(Hello(/*from=*/0, /*to=*/1));
    std::string answer(expected.size(), '\0');
    const absl::Status received = socket_.Receive(answer.data(), answer.size(), deadline_);
    EXPECT_TRUE(received.ok()) << received;
    EXPECT_EQ(answer, expected);
  }
  absl::Status Send(const std::string& frame) { return socket_.Send(FrameOf(frame), deadline_); }
  // Waits until rank 0 closes the connection.
  void AwaitEnd() {
    absl::Status received;
    char byte;
    while (received.ok()) received = socket_.Receive(&byte, 1, deadline_);
    EXPECT_TRUE(absl::IsUnavailable(received)) << received;
  }

 private:
  static std::string FrameOf(const std::string& bytes) {
    std::string frame;
    WireWriter(&frame).U64(bytes.size());
    return frame + bytes;
  }
  static std::string Hello(uint32_t from, uint32_t to) {
    std::string hello;
    WireWriter writer(&hello);
    for (const uint32_t number : {from, to, uint32_t{2}}) writer.U32(number);
    const Digest group_id = {};
    writer.Raw(group_id.data(), group_id.size());
    return hello;
  }

  const Deadline deadline_ = Deadline::After(absl::Minutes(1));
  Socket socket_;
};

// Rank 0 of two, which begins to connect and looks for the address of rank 1.
class ConnectingRank {
 public:
  explicit ConnectingRank(absl::Duration timeout = absl::Minutes(2))
      : device_(NewEncryptedGloo(store_, timeout)),
        context_(device_->createContext(0, 2)),
        thread_([this] {
          status_ = StatusOf([this] { context_->createAndConnectAllPairs(nullptr); });
        }) {}
  ~ConnectingRank() { Abort(); }

  // Returns where it listens.
  Endpoint Await() {
    return ParseEndpoint(store_->Get("encrypted/0", Deadline::After(absl::Minutes(1))).value())
        .value();
  }
  void SetAddressOfOther(const Endpoint& endpoint) {
    EXPECT_TRUE(store_->Set("encrypted/1", FormatEndpoint(endpoint), Deadline::Never()).ok());
  }
  // Waits until it gives up, and returns why.
  absl::Status Join() {
    if (thread_.joinable()) thread_.join();
    return status_;
  }
  void Abort() {
    device_->Abort();
    Join().IgnoreError();
  }

 private:
  const std::shared_ptr<Store> store_ = NewInProcessStore();
  const std::shared_ptr<EncryptedGloo> device_;
  const std::shared_ptr<gloo::transport::Context> context_;
  absl::Status status_;
  std::thread thread_;
};

// The network may have eaten the end of its first one.
TEST(EncryptedGlooTest, ARankThatComesAgainHasOneConnection) {
  ConnectingRank rank;
  const Endpoint endpoint = rank.Await();
  PlayedRank first(endpoint);
  first.AwaitAnswer();
  PlayedRank again(endpoint);
  again.AwaitAnswer();
  first.AwaitEnd();
}

// Else it would take itself for connected, and wait until its deadline.
TEST(EncryptedGlooTest, ARankThatComesToOneThatHasGivenUpIsNotKept) {
  ConnectingRank rank;
  const Endpoint endpoint = rank.Await();
  rank.Abort();
  PlayedRank(endpoint).AwaitEnd();
}

TEST(EncryptedGlooTest, WhyTheConnectionOfARankHasBrokenIsSaidIfItDoesNotComeAgain) {
  // The rank listens, and does not answer.
  const std::shared_ptr<Loop> loop = Loop::Start("dg-silent").value();
  SocketOptions socket;
  socket.key = kKey;
  socket.unix_sockets = false;
  const auto silent = SocketListener::Listen(loop, "127.0.0.1", socket).value();
  absl::Status status;
  // A rank that gives up before the strange one has had its turn says nothing of it. So it has
  // twice as long then, until that is more than a machine under load needs.
  for (absl::Duration enough = absl::Milliseconds(200); enough < absl::Minutes(1); enough *= 2) {
    ConnectingRank rank(enough);
    PlayedRank strange;
    absl::Status sent = strange.Connect(rank.Await());
    if (sent.ok()) sent = strange.Send(std::string(17, 'x'));
    if (sent.ok()) strange.AwaitEnd();
    rank.SetAddressOfOther(ParseEndpoint(silent->address()).value());
    status = rank.Join();
    if (absl::StrContains(status.message(), "no message of a collective")) break;
  }
  loop->Close();
  loop->Join();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "rank 1 and this one are not connected yet: "))
      << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "no message of a collective")) << status;
}

// A rank that has the key and lies about what it is ready for costs no more memory than that. Nor
// has it taken what this rank was to send to it.
TEST(EncryptedGlooTest, ARankIsNotReadyForMoreThanCollectivesReceive) {
  const ConnectedRanks ranks;
  char byte = 0, lie = 0;
  const auto buffer = ranks.contexts[0]->createUnboundBuffer(&byte, 1);
  const auto liar = ranks.contexts[1]->createUnboundBuffer(&lie, 1);
  buffer->recv(1, 1, 0, 1);
  buffer->send(1, 5000, 0, 1);
  StatusOf([&] {  // until the other one has had enough
    for (uint64_t slot = 0; slot < 1000; ++slot) liar->recv(0, slot, 0, 1);
  })
      .IgnoreError();
  for (const absl::Status& status :
       {StatusOf([&] { buffer->waitSend(nullptr, std::chrono::minutes(2)); }),
        StatusOf([&] { buffer->waitRecv(nullptr, std::chrono::minutes(2)); })}) {
    EXPECT_TRUE(absl::StrContains(status.message(), "more messages than collectives have"))
        << status;
  }
}

// Each collective has slots of its own.
TEST(EncryptedGlooTest, MessagesThatHaveBeenSentLeaveNothing) {
  const ConnectedRanks ranks;
  char sent = 1, received = 0;
  const auto sends = ranks.contexts[0]->createUnboundBuffer(&sent, 1);
  const auto receives = ranks.contexts[1]->createUnboundBuffer(&received, 1);
  uint64_t slot = 0;
  const auto pass = [&](int messages) {
    for (int i = 0; i < messages; ++i, ++slot) {
      // Before the other rank is ready for it.
      sends->send(1, slot, 0, 1);
      receives->recv(0, slot, 0, 1);
      receives->waitRecv(nullptr, std::chrono::minutes(2));
      sends->waitSend(nullptr, std::chrono::minutes(2));
    }
  };
  pass(100);  // what is allocated once
  const size_t before = mallinfo2().uordblks;
  pass(2000);
  const size_t after = mallinfo2().uordblks;
  if (before == 0) GTEST_SKIP() << "this allocator does not say what is in use";
  EXPECT_LT(after, before + (256 << 10));
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
