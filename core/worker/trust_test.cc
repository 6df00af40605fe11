// Workers with and without the cluster key, and with certificates.
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/base/log.h"
#include "core/membership/store/in_process_store.h"
#include "core/membership/worker_info.h"
#include "core/net/certificates.h"
#include "core/worker/worker.h"
#include "gtest/gtest.h"
#include "tests/testing/certificates.h"

namespace distgrad {
namespace {

class TrustTest : public testing::Test {
 protected:
  std::string KeyFile(const std::string& key) {
    const std::string path = absl::StrCat(testing::TempDir(), "/trust_test_key", files_++);
    std::ofstream(path) << key << "\n";
    chmod(path.c_str(), 0600);
    return path;
  }

  // One worker for each of the files; their statuses where that fails.
  std::vector<absl::Status> Start(const std::vector<std::string>& key_files) {
    return Start(key_files, std::vector<TlsOptions>(key_files.size()));
  }
  std::vector<absl::Status> Start(const std::vector<std::string>& key_files,
                                  const std::vector<TlsOptions>& tls) {
    store_ = NewInProcessStore();
    workers_.resize(key_files.size());
    std::vector<absl::Status> statuses(key_files.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < key_files.size(); ++i) {
      threads.emplace_back([&, i] {
        auto worker = Worker::Create({.store = store_,
                                      .rank = static_cast<int>(i),
                                      .world_size = static_cast<int>(key_files.size()),
                                      .key_file = key_files[i],
                                      .tls = tls[i],
                                      .thread_count = 1,
                                      .join_timeout = absl::Minutes(1)});
        statuses[i] = worker.status();
        if (worker.ok()) workers_[i] = *std::move(worker);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return statuses;
  }

  // On worker 1.
  absl::Status RegisterEcho() {
    return workers_[1]->Register("echo", [](Request& request) -> absl::StatusOr<Message> {
      return std::move(request.message);
    });
  }

  std::shared_ptr<Store> store_;  // of the last Start()
  std::vector<std::unique_ptr<Worker>> workers_;
  int files_ = 0;
};

TEST_F(TrustTest, WhoHasTheKeyCallsTheOthers) {
  const std::string key = KeyFile("a secret of the whole job");
  for (const absl::Status& status : Start({key, key})) ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(RegisterEcho().ok());
  const auto reply = workers_[0]->Call("worker1", "echo", Message{"hello", {}});
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->payload, "hello");
}

TEST_F(TrustTest, WhoHasAnotherOrNoneDoesNotJoin) {
  const std::string key = KeyFile("a secret of the whole job");
  for (const std::string& other : {KeyFile("a secret of somebody else"), std::string()}) {
    const std::vector<absl::Status> statuses = Start({key, other});
    EXPECT_TRUE(absl::IsUnauthenticated(statuses[0])) << statuses[0];
    EXPECT_TRUE(absl::StrContains(statuses[0].message(), "cluster key")) << statuses[0];
    EXPECT_FALSE(statuses[1].ok());
  }
}

TEST_F(TrustTest, TheKeyMayComeFromTheEnvironment) {
  setenv("DISTGRAD_KEY", "a secret in the environment", 1);
  const auto statuses = Start({"", KeyFile("a secret in the environment")});
  unsetenv("DISTGRAD_KEY");
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
}

TEST_F(TrustTest, CertificatesOfTheEnvironmentDoAsWell) {
  TestAuthority authority(absl::StrCat(testing::TempDir(), "/trust_test_certificates"));
  const CertificateFiles files = authority.Issue("worker", {.names = "URI:spiffe://job/worker"});
  setenv("DISTGRAD_TLS_CERT", files.cert.c_str(), 1);
  setenv("DISTGRAD_TLS_KEY", files.key.c_str(), 1);
  const absl::Status half = Start({""})[0];
  EXPECT_TRUE(absl::IsInvalidArgument(half)) << half;
  EXPECT_TRUE(absl::StrContains(half.message(), "DISTGRAD_TLS_CA")) << half;
  setenv("DISTGRAD_TLS_CA", files.ca.c_str(), 1);
  setenv("DISTGRAD_ENCRYPT_LOCAL", "1", 1);  // these two share a machine
  const auto statuses = Start({"", ""});
  for (const char* name : {"DISTGRAD_TLS_CERT", "DISTGRAD_TLS_KEY", "DISTGRAD_TLS_CA"}) {
    unsetenv(name);
  }
  for (const absl::Status& status : statuses) ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(RegisterEcho().ok());
  const auto reply = workers_[0]->Call("worker1", "echo", Message{"hello", {}});
  EXPECT_TRUE(reply.ok()) << reply.status();
  // With neither of the two there is nothing to encrypt with.
  const absl::Status open = Start({""})[0];
  unsetenv("DISTGRAD_ENCRYPT_LOCAL");
  EXPECT_TRUE(absl::IsFailedPrecondition(open)) << open;
  EXPECT_TRUE(absl::StrContains(open.message(), "DISTGRAD_ENCRYPT_LOCAL")) << open;
}

TlsOptions OptionsOf(const CertificateFiles& files) {
  return {.cert = files.cert, .key = files.key, .ca = files.ca, .encrypt_local = true};
}

TEST_F(TrustTest, CertificatesMayBeOptionsWhateverTheEnvironmentSays) {
  TestAuthority authority(absl::StrCat(testing::TempDir(), "/trust_test_options"));
  const CertificateFiles files = authority.Issue("worker", {.names = "DNS:job"});
  const std::pair<const char*, const char*> variables[] = {{"DISTGRAD_TLS_CERT", "/no/such/file"},
                                                           {"DISTGRAD_TLS_KEY", "/no/such/file"},
                                                           {"DISTGRAD_TLS_CA", "/no/such/file"},
                                                           {"DISTGRAD_TLS_NAME", "another"},
                                                           {"DISTGRAD_ENCRYPT_LOCAL", "2"}};
  for (const auto& [name, value] : variables) setenv(name, value, 1);
  TlsOptions options = OptionsOf(files);
  options.name = "job";
  const auto statuses = Start({"", ""}, {options, options});
  for (const auto& [name, value] : variables) unsetenv(name);
  for (const absl::Status& status : statuses) ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(RegisterEcho().ok());
  const auto reply = workers_[0]->Call("worker1", "echo", Message{"hello", {}});
  EXPECT_TRUE(reply.ok()) << reply.status();
  EXPECT_NE(workers_[0]->certificates(), nullptr);

  options.key.clear();
  const absl::Status half = Start({""}, {options})[0];
  EXPECT_TRUE(absl::IsInvalidArgument(half)) << half;
  EXPECT_TRUE(absl::StrContains(half.message(), "tls.key is not")) << half;
  const absl::Status nothing = Start({""}, {{.encrypt_local = true}})[0];
  EXPECT_TRUE(absl::IsFailedPrecondition(nothing)) << nothing;
  EXPECT_TRUE(absl::StrContains(nothing.message(), "tls.encrypt_local")) << nothing;
}

// A file knows no certificates, and entries are signed by a cluster key alone.
TEST_F(TrustTest, CertificatesAloneWithAStoreThatIsAFileAreWarnedOf) {
  TestAuthority authority(absl::StrCat(testing::TempDir(), "/trust_test_unsigned"));
  const TlsOptions tls = OptionsOf(authority.Issue("worker", {.names = "DNS:job"}));
  const auto warnings = [&](const std::string& store, const std::string& key_file) {
    struct Log {
      absl::Mutex mu;
      int lines ABSL_GUARDED_BY(mu) = 0;
    };
    const auto log = std::make_shared<Log>();
    SetLogSink([log](LogSeverity severity, absl::string_view text) {
      absl::MutexLock lock(&log->mu);
      if (severity == LogSeverity::kWARNING && absl::StrContains(text, "DISTGRAD_KEY_FILE") &&
          absl::StrContains(text, "key_file") && absl::StrContains(text, "can forge")) {
        ++log->lines;
      }
    });
    const absl::Status status =
        Worker::Create({.rendezvous = absl::StrCat("file://", testing::TempDir(), "/", store),
                        .rank = 0,
                        .world_size = 1,
                        .key_file = key_file,
                        .tls = tls,
                        .thread_count = 1})
            .status();
    EXPECT_TRUE(status.ok()) << status;
    SetLogSink([](LogSeverity, absl::string_view) {});
    absl::MutexLock lock(&log->mu);
    return log->lines;
  };
  EXPECT_EQ(warnings("unsigned", ""), 1);
  EXPECT_EQ(warnings("signed", KeyFile("a secret of the whole job")), 0);
}

// Long before the call's deadline, and with the reason.
TEST_F(TrustTest, WhoseCertificateIsRefusedLearnsOfItAtItsFirstCall) {
  TestAuthority ours(absl::StrCat(testing::TempDir(), "/trust_test_ours")),
      theirs(absl::StrCat(testing::TempDir(), "/trust_test_theirs"));
  const CertificateFiles honest = ours.Issue("honest", {.names = "DNS:job"});
  CertificateFiles strange = theirs.Issue("strange", {.names = "DNS:job"});
  strange.ca = honest.ca;  // it takes the others'
  // Their store is within this process, and asks nobody for a certificate.
  for (const absl::Status& status : Start({"", ""}, {OptionsOf(strange), OptionsOf(honest)})) {
    ASSERT_TRUE(status.ok()) << status;
  }
  ASSERT_TRUE(RegisterEcho().ok());
  const absl::Time begin = absl::Now();
  const absl::Status told = workers_[0]
                                ->Call("worker1", "echo", Message{"hello", {}},
                                       {.deadline = Deadline::After(absl::Minutes(5))})
                                .status();
  EXPECT_TRUE(absl::IsUnavailable(told)) << told;
  EXPECT_TRUE(absl::StrContains(told.message(), "refuses this process's certificate")) << told;
  EXPECT_TRUE(absl::StrContains(told.message(), "it is of no authority")) << told;
  EXPECT_LT(absl::Now() - begin, absl::Seconds(30));
  for (const auto& worker : workers_) worker->Abort();
}

TEST_F(TrustTest, AKeyThatCannotBeUsedIsAnError) {
  const auto create = [](std::string transport, std::string key_file) {
    return Worker::Create({.store = NewInProcessStore(),
                           .rank = 0,
                           .world_size = 1,
                           .transport = std::move(transport),
                           .key_file = std::move(key_file)})
        .status();
  };
  EXPECT_TRUE(absl::IsNotFound(create("socket", "/no/such/file")));
  EXPECT_TRUE(absl::IsInvalidArgument(create("socket", KeyFile("short"))));
  for (const std::string transport : {"tcp", "shm"}) {
    const absl::Status status = create(transport, KeyFile("a secret of the whole job"));
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  }
}

// Connects to where a worker listens.
int ConnectTo(const std::string& address) {
  const std::string host_and_port = address.substr(address.find("://") + 3);
  sockaddr_in in = {};
  in.sin_family = AF_INET;
  in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  in.sin_port = htons(std::stoi(host_and_port.substr(host_and_port.find(':') + 1)));
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&in), sizeof(in)), 0);
  return fd;
}

// What core/transport/tensorpipe/hostile_client_test.cc does to a listener, done to a worker
// that others call meanwhile.
TEST_F(TrustTest, AWorkerServesWhileClientsWithoutTheKeyKnock) {
  const std::string key = KeyFile("a secret of the whole job");
  for (const absl::Status& status : Start({key, key})) ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(RegisterEcho().ok());
  // The entry in the store has a signature behind it.
  std::string entry = store_->Get("worker/1", absl::InfinitePast()).value();
  entry.resize(entry.size() - 32);
  const auto worker = DecodeWorkerInfo(entry, 1);
  ASSERT_TRUE(worker.ok()) << worker.status();

  const std::string greetings[] = {"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
                                   std::string(16, '\0'),  // enough for TensorPipe's own listener
                                   std::string(8, '\xff') + "huge", "distgrad half a hello"};
  std::vector<int> idle;
  for (int i = 0; i < 300; ++i) idle.push_back(ConnectTo(worker->address));
  for (int round = 0; round < 50; ++round) {
    for (const std::string& greeting : greetings) {
      const int fd = ConnectTo(worker->address);
      send(fd, greeting.data(), greeting.size(), MSG_NOSIGNAL);
      close(fd);
    }
    const auto reply = workers_[0]->Call("worker1", "echo", Message{"still there", {}});
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->payload, "still there");
  }
  for (const int fd : idle) close(fd);
}

}  // namespace
}  // namespace distgrad
