// Two ends with certificates: of one authority and of two, with names that fit and others, expired,
// rotated, and missing.
#include "core/net/certificates.h"

#include <gtest/gtest.h>
#include <openssl/bio.h>
#include <openssl/ssl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/base/log.h"
#include "core/net/certificate_version.h"
#include "core/net/cluster_key.h"
#include "core/net/handshake.h"
#include "core/net/openssl_objects.h"
#include "core/net/tls.h"
#include "tests/testing/certificates.h"
#include "tests/testing/no_descriptors.h"

namespace distgrad {
namespace {

using Role = Handshake::Role;

std::string Folder(const std::string& name) {
  return std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
}

std::shared_ptr<Certificates> Load(CertificateFiles files, const std::string& name = "") {
  files.name = name;
  auto certificates = Certificates::Load(std::move(files));
  EXPECT_TRUE(certificates.ok()) << certificates.status();
  return *certificates;
}

// `change`: where a byte of it is changed on its way.
void Pass(TlsSession& from, TlsSession& to, std::optional<size_t> change = std::nullopt) {
  std::string bytes(from.output());
  if (change.has_value()) bytes[*change] ^= 1 << (*change % 8);
  absl::string_view output = bytes;
  while (!output.empty()) {
    const absl::Span<char> space = to.InputSpace();
    const size_t size = output.copy(space.data(), space.size());
    to.AddInput(size);
    from.DropOutput(size);
    output.remove_prefix(size);
  }
}

// What each end says when they have talked: the client's and the server's.
std::pair<absl::Status, absl::Status> Talk(Certificates& client_has, Certificates& server_has) {
  const auto client = TlsSession::Create(Role::kClient, client_has).value();
  const auto server = TlsSession::Create(Role::kServer, server_has).value();
  std::pair<absl::Status, absl::Status> said;
  char word[5] = {};
  for (int i = 0; i < 4; ++i) {
    if (said.first.ok()) said.first = client->Establish();
    Pass(*client, *server);
    if (said.second.ok()) said.second = server->Establish();
    Pass(*server, *client);
  }
  if (said.second.ok() && server->established()) said.second = server->Write("hello");
  Pass(*server, *client);
  if (said.first.ok()) {
    const absl::StatusOr<size_t> n = client->Read(word, sizeof(word));
    said.first = n.status();
    if (n.ok()) {
      EXPECT_EQ(std::string(word, *n), "hello");
    }
  }
  return said;
}

void ExpectAgreed(Certificates& one, Certificates& other) {
  for (const auto& [client, server] : {std::pair(&one, &other), std::pair(&other, &one)}) {
    const auto [by_client, by_server] = Talk(*client, *server);
    EXPECT_TRUE(by_client.ok()) << by_client;
    EXPECT_TRUE(by_server.ok()) << by_server;
  }
}

// `refuses`: what the end that refuses says. The other one learns that it is refused. `both`: each
// would refuse the other, and a server then hears of that before it looks itself.
void ExpectRefused(Certificates& honest, Certificates& other, const std::string& refuses,
                   bool both = false) {
  const auto as_server = Talk(other, honest), as_client = Talk(honest, other);
  for (const absl::Status& status : {both ? as_server.first : as_server.second, as_client.first}) {
    EXPECT_TRUE(absl::StrContains(status.message(), "the other end's certificate is refused"))
        << status;
    EXPECT_TRUE(absl::StrContains(status.message(), refuses)) << status;
  }
  for (const absl::Status& status : {both ? as_server.second : as_server.first, as_client.second}) {
    EXPECT_TRUE(absl::StrContains(status.message(), "refuses this process's certificate"))
        << status;
  }
}

TEST(CertificatesTest, OfOneAuthorityWithANameInCommonTheyAgree) {
  TestAuthority authority(Folder("agree"));
  const auto one = Load(authority.Issue("one", {.names = "DNS:one.example,URI:spiffe://c/sa/t"}));
  const auto two = Load(authority.Issue("two", {.names = "DNS:two.example,URI:spiffe://c/sa/t"}));
  ExpectAgreed(*one, *two);
}

TEST(CertificatesTest, WithoutANameInCommonTheyDoNotUnlessItIsSaidWhichTheOthersHave) {
  TestAuthority authority(Folder("names"));
  const CertificateFiles one = authority.Issue("one", {.names = "DNS:one.example"});
  const CertificateFiles two = authority.Issue(
      "two", {.names = "DNS:Two.example,DNS:*.pods.example,IP:10.0.0.7,URI:spiffe://c/sa/two"});
  ExpectRefused(*Load(one), *Load(two), "DISTGRAD_TLS_NAME", true);
  const auto server = Load(two, "one.example");
  for (const std::string& name :
       {std::string("two.example"), std::string("TWO.example"), std::string("a.pods.example"),
        std::string("10.0.0.7"), std::string("spiffe://c/sa/two")}) {
    SCOPED_TRACE(name);
    ExpectAgreed(*Load(one, name), *server);
  }
  for (const std::string& name :
       {std::string("wo.example"), std::string("example"), std::string("a.b.pods.example"),
        std::string("10.0.0.70"), std::string("spiffe://c/sa/two/x"), std::string("spiffe://c/sa"),
        std::string("two"), std::string("10.0.0")}) {
    SCOPED_TRACE(name);
    ExpectRefused(*Load(one, name), *server, "it is for ");
  }
}

TEST(CertificatesTest, ANameOfEveryMachineIsNotOneInCommon) {
  TestAuthority authority(Folder("localhost"));
  const std::string everybody = "DNS:LOCALHOST,DNS:a.localhost,IP:127.0.0.1,IP:127.1.2.3,IP:::1";
  const CertificateFiles one = authority.Issue("one", {.names = everybody + ",DNS:one.example"});
  const CertificateFiles two = authority.Issue("two", {.names = everybody + ",DNS:two.example"});
  ExpectRefused(*Load(one), *Load(two), "and not for DNS:", true);
  ExpectAgreed(*Load(one), *Load(authority.Issue("same", {.names = "DNS:one.example"})));
  // Whoever wants them to count says so.
  ExpectAgreed(*Load(one, "localhost"), *Load(two, "127.0.0.1"));
  const CertificateFiles none = authority.Issue("none", {.names = everybody});
  const absl::Status status = Certificates::Load(none).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "DISTGRAD_TLS_NAME")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "the option tls.name")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "localhost")) << status;
  ExpectAgreed(*Load(none, "localhost"), *Load(two, "localhost"));
}

TEST(CertificatesTest, ANameThatBeginsWithADotIsNone) {
  TestAuthority authority(Folder("dot"));
  CertificateFiles files = authority.Issue("one", {.names = "DNS:a.job.example"});
  files.name = ".job.example";
  const absl::Status status = Certificates::Load(files).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "DISTGRAD_TLS_NAME")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "begins with a dot")) << status;
}

TEST(CertificatesTest, OfAnotherAuthorityOrExpiredTheyAreRefused) {
  TestAuthority authority(Folder("good")), other(Folder("bad"));
  const auto honest = Load(authority.Issue("one", {.names = "DNS:job"}));
  ExpectRefused(*honest, *Load(other.Issue("two", {.names = "DNS:job"})), "DISTGRAD_TLS_CA", true);
  ExpectRefused(*honest, *Load(authority.Issue("old", {.names = "DNS:job", .days = -1})),
                "certificate has expired");
}

// A process is both a client and a server.
TEST(CertificatesTest, ForAnotherUseOrWithoutItsChainTheyAreRefused) {
  TestAuthority authority(Folder("use"));
  const auto honest = Load(authority.Issue("one", {.names = "DNS:job"}));
  ExpectAgreed(*honest, *Load(authority.Issue(
                            "both", {.names = "DNS:job", .use = "serverAuth,clientAuth"})));
  const auto servers = Load(authority.Issue("s", {.names = "DNS:job", .use = "serverAuth"}));
  const auto clients = Load(authority.Issue("c", {.names = "DNS:job", .use = "clientAuth"}));
  for (const auto& [by_refused, by_honest] :
       {Talk(*servers, *honest),
        std::pair(Talk(*honest, *clients).second, Talk(*honest, *clients).first)}) {
    EXPECT_TRUE(absl::StrContains(by_honest.message(), "certificate purpose")) << by_honest;
    EXPECT_TRUE(absl::StrContains(by_refused.message(), "it is not for this use")) << by_refused;
  }
  ExpectRefused(*honest, *Load(authority.Issue("part", {.names = "DNS:job", .lacks_chain = true})),
                "local issuer certificate");
}

// TLS 1.3 alone tells a client that when it reads for the first time, and a client that writes
// first may never come to that.
TEST(CertificatesTest, AClientIsNotDoneBeforeItsServerTakesItsCertificate) {
  TestAuthority authority(Folder("ours")), other(Folder("others"));
  const auto honest = Load(authority.Issue("one", {.names = "DNS:job"}));
  const auto taking_ours = [&](CertificateFiles files) {
    files.ca = authority.Issue("any", {.names = "DNS:job"}).ca;
    return files;
  };
  const CertificateFiles unnamed = authority.Issue("unnamed", {.names = "DNS:another"});
  for (const auto& [client_has, why] : std::vector<std::pair<CertificateFiles, std::string>>{
           {taking_ours(other.Issue("two", {.names = "DNS:job"})), "it is of no authority"},
           {authority.Issue("old", {.names = "DNS:job", .days = -1}), "it has expired"},
           {unnamed, "it has not the name"}}) {
    SCOPED_TRACE(why);
    const auto certificates = Load(client_has, "job");
    const auto client = TlsSession::Create(Role::kClient, *certificates).value();
    const auto server = TlsSession::Create(Role::kServer, *honest).value();
    absl::Status by_client, by_server;
    for (int i = 0; i < 4; ++i) {
      if (by_client.ok()) by_client = client->Establish();
      Pass(*client, *server);
      if (by_server.ok()) by_server = server->Establish();
      Pass(*server, *client);
    }
    EXPECT_FALSE(client->established());
    EXPECT_FALSE(server->established());
    EXPECT_TRUE(absl::IsUnauthenticated(by_client)) << by_client;
    EXPECT_TRUE(absl::StrContains(by_client.message(), why)) << by_client;
    EXPECT_TRUE(absl::StrContains(by_client.message(), "DISTGRAD_TLS_CERT")) << by_client;
  }
}

// Who is between two clients and two workers leads the one's TLS to where the other has shaken
// hands. All have good certificates.
TEST(CertificatesTest, WhoHasShakenHandsWithAnotherIsNotTakenForIt) {
  TestAuthority authority(Folder("spliced"));
  const auto certificates = Load(authority.Issue("one", {.names = "DNS:job"}));
  const auto shake_hands = [](const Token& token) {
    auto client = Handshake::Create(Role::kClient, "", token, true).value();
    auto server = Handshake::Create(Role::kServer, "", token, true).value();
    while (!client.done() || !server.done()) {
      EXPECT_TRUE(server.Receive(client.TakeOutput()).ok());
      EXPECT_TRUE(client.Receive(server.TakeOutput()).ok());
    }
    return std::pair(std::move(client), std::move(server));
  };
  const auto establish = [&](const Handshake& one, const Handshake& other) {
    const auto client = TlsSession::Create(one, certificates).value();
    const auto server = TlsSession::Create(other, certificates).value();
    absl::Status by_client, by_server;
    for (int i = 0; i < 4; ++i) {
      if (by_client.ok()) by_client = client->Establish();
      Pass(*client, *server);
      if (by_server.ok()) by_server = server->Establish();
      Pass(*server, *client);
    }
    EXPECT_EQ(client->established(), by_client.ok());
    EXPECT_EQ(server->established(), by_server.ok());
    EXPECT_EQ(by_client.message(), by_server.message()) << "both say so";
    return by_client;
  };
  const auto first = shake_hands(Token{1}), second = shake_hands(Token{2});
  const auto again = shake_hands(Token{1});
  EXPECT_TRUE(establish(first.first, first.second).ok());
  for (const Handshake* const server : {&second.second, &again.second}) {
    const absl::Status status = establish(first.first, *server);
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "has exchanged connections")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "for DNS:job")) << status;
  }
}

// Each changed byte of TLS's own handshake stops one of the two before anything is given out.
TEST(CertificatesTest, EveryByteOfTheHandshakeCounts) {
  TestAuthority authority(Folder("changed"));
  const auto certificates = Load(authority.Issue("one", {.names = "DNS:job"}));
  // Returns whether there was such a byte, which was changed, and whether both go on.
  const auto talk = [&](size_t change) {
    const auto client = TlsSession::Create(Role::kClient, *certificates).value();
    const auto server = TlsSession::Create(Role::kServer, *certificates).value();
    size_t at = 0;  // bytes said before
    absl::Status by_client, by_server;
    const auto pass = [&](TlsSession& from, TlsSession& to) {
      const size_t size = from.output().size();
      Pass(from, to, change - at < size ? std::optional(change - at) : std::nullopt);
      at += size;
    };
    for (int i = 0; i < 4; ++i) {
      if (by_client.ok()) by_client = client->Establish();
      pass(*client, *server);
      if (by_server.ok()) by_server = server->Establish();
      pass(*server, *client);
    }
    return std::pair(change < at, client->established() && server->established());
  };
  const auto client = TlsSession::Create(Role::kClient, *certificates).value();
  ASSERT_TRUE(client->Establish().ok());
  const size_t hello = client->output().size();
  EXPECT_TRUE(talk(SIZE_MAX).second);
  size_t change = 0;
  // To the end of one talk: signatures differ in length by some bytes.
  for (bool changed = true; changed; ++change) {
    // The end of the version in the first record of each end has no meaning.
    if (change == 2 || change == hello + 2) continue;
    bool agree;
    std::tie(changed, agree) = talk(change);
    EXPECT_EQ(agree, !changed) << change;
  }
  EXPECT_GT(change, 1000u);
}

// A client that speaks TLS by OpenSSL itself, and has a good certificate.
class RawClient {
 public:
  explicit RawClient(Certificates& certificates)
      : version_(certificates.Current()),
        ssl_(SSL_new(version_->context())),
        in_(BIO_new(BIO_s_mem())),
        out_(BIO_new(BIO_s_mem())) {
    SSL_set_bio(ssl_.get(), in_, out_);
    SSL_set_connect_state(ssl_.get());
  }

  // To the end of TLS's own handshake, which the server then has gone through, too.
  absl::Status Establish(TlsSession& server) {
    absl::Status by_server;
    for (int i = 0; i < 4; ++i) {
      SSL_do_handshake(ssl_.get());
      SendTo(server);
      if (by_server.ok()) by_server = server.Establish();
      BIO_write(in_, server.output().data(), static_cast<int>(server.output().size()));
      server.DropOutput(server.output().size());
    }
    EXPECT_EQ(SSL_is_init_finished(ssl_.get()), 1);
    ERR_clear_error();
    return by_server;
  }
  // What docs/wire.md says that a client says first, with a secret of zeros.
  std::string Proof() {
    std::string exported(32, '\0');
    const absl::string_view label = "EXPORTER-Channel-Binding";
    EXPECT_EQ(
        SSL_export_keying_material(ssl_.get(), reinterpret_cast<unsigned char*>(exported.data()),
                                   exported.size(), label.data(), label.size(), nullptr, 0, 0),
        1);
    const Digest proof = Hmac(std::string(32, '\0'), "client" + exported).value();
    return {proof.begin(), proof.end()};
  }
  void Say(const std::string& words) {
    EXPECT_EQ(SSL_write(ssl_.get(), words.data(), static_cast<int>(words.size())),
              static_cast<int>(words.size()));
  }
  // A record that brings no byte.
  void ChangeKey() {
    EXPECT_EQ(SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED), 1);
    EXPECT_EQ(SSL_do_handshake(ssl_.get()), 1);
  }
  void SendTo(TlsSession& server) {
    for (;;) {
      const absl::Span<char> space = server.InputSpace();
      const int n = BIO_read(out_, space.data(), static_cast<int>(space.size()));
      if (n <= 0) return;
      server.AddInput(static_cast<size_t>(n));
    }
  }

 private:
  const std::shared_ptr<const CertificateVersion> version_;
  const std::unique_ptr<SSL, OpensslFree<SSL_free>> ssl_;
  BIO* const in_;
  BIO* const out_;
};

// However many come, they take a server no longer than the few that an honest client sends.
TEST(CertificatesTest, RecordsThatBringNothingAreFew) {
  constexpr int kMany = 500;
  TestAuthority authority(Folder("empty"));
  const auto certificates = Load(authority.Issue("one", {.names = "DNS:job"}));
  const auto prove = [](RawClient& client, TlsSession& server) {
    EXPECT_TRUE(client.Establish(server).ok());
    EXPECT_FALSE(server.established()) << "the client has not proved its handshake";
    client.Say(client.Proof());
    client.SendTo(server);
    EXPECT_TRUE(server.Establish().ok());
    EXPECT_TRUE(server.established());
  };
  {
    SCOPED_TRACE("a client that changes its key now and then");
    const auto server = TlsSession::Create(Role::kServer, *certificates).value();
    RawClient client(*certificates);
    prove(client, *server);
    const std::string words(16 << 10, 'w');
    for (int i = 0; i < 4 * kMany; ++i) {
      if (i % 8 == 0) client.ChangeKey();
      client.Say(words);
      client.SendTo(*server);
      for (size_t size = 0; size < words.size();) {
        char part[16 << 10];
        const absl::StatusOr<size_t> read = server->Read(part, sizeof(part));
        ASSERT_TRUE(read.ok()) << i << ": " << read.status();
        ASSERT_GT(*read, 0u);
        ASSERT_EQ(std::string(part, *read), words.substr(size, *read));
        size += *read;
      }
    }
    for (int i = 0; i < kMany; ++i) client.ChangeKey();
    client.Say("never");
    client.SendTo(*server);
    char word[5] = {};
    const absl::Status status = server->Read(word, sizeof(word)).status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "without a byte")) << status;
    EXPECT_TRUE(server->HasInput()) << "it has looked at all of them";
  }
  {
    SCOPED_TRACE("a byte now and then");
    const auto server = TlsSession::Create(Role::kServer, *certificates).value();
    RawClient client(*certificates);
    prove(client, *server);
    absl::StatusOr<size_t> read = 0;
    int bytes = 0;
    // Many small records alone are no reason.
    for (; bytes < kMany; ++bytes) {
      client.Say("b");
      client.SendTo(*server);
      char byte;
      ASSERT_EQ(server->Read(&byte, 1).value(), 1u);
    }
    for (; read.ok() && bytes < 2 * kMany; ++bytes) {
      client.ChangeKey();
      client.Say("b");
      client.SendTo(*server);
      char byte;
      read = server->Read(&byte, 1);
    }
    EXPECT_TRUE(absl::IsUnavailable(read.status())) << read.status();
    EXPECT_EQ(bytes, kMany + 17) << "a new key is a record and a message";
  }
  SCOPED_TRACE("one that has proved nothing yet");
  const auto server = TlsSession::Create(Role::kServer, *certificates).value();
  RawClient client(*certificates);
  EXPECT_TRUE(client.Establish(*server).ok());
  for (int i = 0; i < kMany; ++i) client.ChangeKey();
  client.Say(client.Proof());
  client.SendTo(*server);
  const absl::Status status = server->Establish();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "without a byte")) << status;
  EXPECT_FALSE(server->established());
}

// An agent of the platform replaces the files before they expire.
TEST(CertificatesTest, FilesThatAreReplacedAreReadAnew) {
  TestAuthority authority(Folder("rotated"));
  const auto other = Load(authority.Issue("two", {.names = "DNS:job"}));
  const auto certificates = Load(authority.Issue("one", {.names = "DNS:job", .days = -1}));
  const auto former = certificates->Current();
  EXPECT_EQ(certificates->Current(), former);
  ExpectRefused(*other, *certificates, "certificate has expired");
  const CertificateFiles files = authority.Issue("one", {.names = "DNS:job"});
  EXPECT_NE(certificates->Current(), former);
  ExpectAgreed(*other, *certificates);

  // Until they are whole again the ones before are used.
  int warnings = 0;
  SetLogSink([&](LogSeverity, absl::string_view text) {
    if (absl::StrContains(text, "DISTGRAD_TLS_CERT")) ++warnings;
  });
  std::ofstream(files.cert) << "half of a";
  ExpectAgreed(*other, *certificates);
  SetLogSink(nullptr);
  EXPECT_EQ(warnings, 1) << "one for each time that they change";
  authority.Issue("one", {.names = "DNS:another"});
  ExpectRefused(*other, *certificates, "DNS:", true);
}

// They are as they are to be, and it is this process that lacks something: nothing changes in them
// once it no longer does.
TEST(CertificatesTest, FilesThatCouldNotBeReadOnceAreReadLater) {
  TestAuthority authority(Folder("later"));
  const auto certificates = Load(authority.Issue("one", {.names = "DNS:job"}));
  const auto former = certificates->Current();
  authority.Issue("one", {.names = "DNS:job"});
  int warnings = 0;
  std::string warning;
  SetLogSink([&](LogSeverity, absl::string_view text) {
    ++warnings;
    warning = text;
  });
  {
    const NoDescriptors none;
    for (int i = 0; i < 2; ++i) EXPECT_EQ(certificates->Current(), former);
  }
  SetLogSink(nullptr);
  EXPECT_EQ(warnings, 1) << "one for each time that they change";
  EXPECT_TRUE(absl::StrContains(warning, "goes on with the certificates")) << warning;
  const auto renewed = certificates->Current();
  EXPECT_NE(renewed, former);
  EXPECT_EQ(certificates->Current(), renewed);
}

// No other file would help.
TEST(CertificatesTest, WithoutDescriptorsNoFileIsToBlame) {
  TestAuthority authority(Folder("descriptors"));
  const CertificateFiles files = authority.Issue("one", {.names = "DNS:job"});
  absl::Status status;
  {
    const NoDescriptors none;
    status = Certificates::Load(files).status();
  }
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "Too many open files")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "ulimit -n")) << status;
}

TEST(CertificatesTest, FilesThatCannotBeUsedAreNamed) {
  TestAuthority authority(Folder("unusable"));
  const CertificateFiles good = authority.Issue("one", {.names = "DNS:job"});
  const auto refused = [](const CertificateFiles& files, const std::string& words) {
    const absl::Status status = Certificates::Load(files).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), words)) << status;
  };
  CertificateFiles files = good;
  files.key = authority.Issue("two", {.names = "DNS:job"}).key;
  refused(files, "DISTGRAD_TLS_KEY");
  files = good;
  files.cert = "/no/such/file";
  refused(files, "DISTGRAD_TLS_CERT");
  refused(files, "No such file");
  files = good;
  files.ca = good.key;
  refused(files, "DISTGRAD_TLS_CA");
  files = good;
  files.ca.clear();
  refused(files, "DISTGRAD_TLS_CA");
  refused(files, "the option tls.ca");
  refused(authority.Issue("nobody", {.names = ""}), "DISTGRAD_TLS_NAME");
}

// What the log says while the files are loaded.
std::string LogOfLoading(const CertificateFiles& files) {
  testing::internal::CaptureStderr();
  const absl::Status loaded = Certificates::Load(files).status();
  std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(loaded.ok()) << loaded;
  return log;
}

TEST(CertificatesTest, APrivateKeyThatEverybodyCanReadIsWarnedOf) {
  TestAuthority authority(Folder("permissions"));
  const CertificateFiles files = authority.Issue("one", {.names = "DNS:job"});
  for (const mode_t mode : {0600, 0640, 0644}) {
    ASSERT_EQ(chmod(files.key.c_str(), mode), 0);
    const std::string log = LogOfLoading(files);
    EXPECT_EQ(absl::StrContains(log, "can read the private key in " + files.key), mode == 0644)
        << log;
    EXPECT_EQ(absl::StrContains(log, "defaultMode: 0400"), mode == 0644) << "what to do: " << log;
  }
}

// Kubernetes mounts a Secret as links into a folder that it replaces, ..data, and with the mode
// that the volume's defaultMode says.
TEST(CertificatesTest, ASecretOfKubernetesIsWarnedOfByItsFilesMode) {
  const std::string folder = Folder("secret_volume");
  TestAuthority authority(folder);
  const CertificateFiles issued = authority.Issue("tls", {.names = "DNS:job"});
  CertificateFiles files = issued;
  ASSERT_EQ(symlink(".", (folder + "/..data").c_str()), 0);
  for (std::string* const path : {&files.cert, &files.key}) {
    const std::string name = path->substr(path->rfind('/') + 1);
    *path = folder + "/link_" + name;
    ASSERT_EQ(symlink(("..data/" + name).c_str(), path->c_str()), 0);
  }
  for (const mode_t mode : {0400, 0440, 0644}) {
    ASSERT_EQ(chmod(issued.key.c_str(), mode), 0);
    const std::string log = LogOfLoading(files);
    EXPECT_EQ(absl::StrContains(log, "can read the private key in " + files.key), mode == 0644)
        << log;
  }
}

TEST(CertificatesTest, OfTheEnvironmentAllOrNone) {
  TestAuthority authority(Folder("environment"));
  const CertificateFiles files = authority.Issue("one", {.names = "DNS:job"});
  std::map<std::string, std::string> variables;
  const auto load = [&] {
    return LoadCertificates({}, [&](const std::string& name) -> std::optional<std::string> {
      const auto found = variables.find(name);
      if (found == variables.end()) return std::nullopt;
      return found->second;
    });
  };
  ASSERT_TRUE(load().ok());
  EXPECT_EQ(*load(), nullptr);
  variables["DISTGRAD_TLS_CERT"] = files.cert;
  EXPECT_TRUE(absl::StrContains(load().status().message(), "DISTGRAD_TLS_KEY"));
  variables["DISTGRAD_TLS_KEY"] = files.key;
  variables["DISTGRAD_TLS_CA"] = files.ca;
  ASSERT_TRUE(load().ok()) << load().status();
  EXPECT_NE(*load(), nullptr);
  variables["DISTGRAD_TLS_NAME"] = "";
  EXPECT_TRUE(absl::IsInvalidArgument(load().status()));
}

// Each by itself, but a certificate with its key.
TEST(CertificatesTest, OptionsWinOverTheEnvironment) {
  TestAuthority ours(Folder("options")), theirs(Folder("variables"));
  const CertificateFiles mine = ours.Issue("one", {.names = "DNS:job"});
  const CertificateFiles other = theirs.Issue("two", {.names = "DNS:job"});
  std::map<std::string, std::string> variables;
  const auto load = [&](const TlsOptions& options) {
    return LoadCertificates(options, [&](const std::string& name) -> std::optional<std::string> {
      const auto found = variables.find(name);
      if (found == variables.end()) return std::nullopt;
      return found->second;
    });
  };
  const auto refused = [&](const TlsOptions& options, const std::string& option,
                           const std::string& variable) {
    const absl::Status status = load(options).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), option)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), variable)) << status;
  };
  const auto honest = Load(mine);
  ExpectAgreed(*honest, *load({.cert = mine.cert, .key = mine.key, .ca = mine.ca}).value());
  refused({.cert = mine.cert}, "tls.key is not", "DISTGRAD_TLS_KEY");
  refused({.key = mine.key}, "tls.cert is not", "DISTGRAD_TLS_CERT");
  refused({.cert = mine.cert, .key = mine.key}, "tls.ca", "DISTGRAD_TLS_CA");
  refused({.cert = "/no/such/file", .key = mine.key, .ca = mine.ca}, "tls.cert",
          "DISTGRAD_TLS_CERT");
  refused({.cert = mine.cert, .key = "/no/such/file", .ca = mine.ca}, "tls.key",
          "DISTGRAD_TLS_KEY");
  refused({.cert = mine.cert, .key = mine.key, .ca = "/no/such/file"}, "tls.ca", "DISTGRAD_TLS_CA");
  refused({.name = "job"}, "tls.cert", "DISTGRAD_TLS_CERT");
  EXPECT_EQ(load({.encrypt_local = true}).value(), nullptr);

  variables = {{"DISTGRAD_TLS_CERT", other.cert},
               {"DISTGRAD_TLS_KEY", other.key},
               {"DISTGRAD_TLS_CA", other.ca},
               {"DISTGRAD_TLS_NAME", "another"}};
  // The variable's key is not this certificate's.
  refused({.cert = mine.cert}, "tls.key is not", "DISTGRAD_TLS_KEY");
  ExpectAgreed(*honest,
               *load({.cert = mine.cert, .key = mine.key, .ca = mine.ca, .name = "job"}).value());
  // Of the four one is the variable's.
  ExpectRefused(*load({.cert = mine.cert, .key = mine.key, .name = "job"}).value(), *honest,
                "DISTGRAD_TLS_CA");
}

// An end that has a cluster key's secret and no certificate.
TEST(CertificatesTest, NoSecretPassesForACertificate) {
  TestAuthority authority(Folder("secret"));
  const auto certificates = Load(authority.Issue("one", {.names = "DNS:job"}));
  for (const Role role : {Role::kClient, Role::kServer}) {
    const auto one = TlsSession::Create(role, *certificates).value();
    const auto other =
        TlsSession::Create(role == Role::kClient ? Role::kServer : Role::kClient, Digest{1, 2, 3})
            .value();
    absl::Status by_one, by_other;
    for (int i = 0; i < 4; ++i) {
      if (by_one.ok()) by_one = one->Establish();
      Pass(*one, *other);
      if (by_other.ok()) by_other = other->Establish();
      Pass(*other, *one);
    }
    EXPECT_FALSE(one->established());
    EXPECT_FALSE(other->established());
  }
}

}  // namespace
}  // namespace distgrad
