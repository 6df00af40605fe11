// A machine whose OpenSSL is missing or cannot do what TLS takes: an error, and no plain text.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <openssl/ssl.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "core/net/cluster_key.h"
#include "core/net/handshake.h"
#include "core/net/tls.h"
#include "tests/testing/child_process.h"

namespace {

bool lacks_memory = false;  // for the next context

}  // namespace

// Stands before that of libssl.
extern "C" SSL_CTX* SSL_CTX_new(const SSL_METHOD* method) {
  static auto* const real =
      reinterpret_cast<decltype(SSL_CTX_new)*>(dlsym(RTLD_NEXT, "SSL_CTX_new"));
  return std::exchange(lacks_memory, false) ? nullptr : real(method);
}

namespace distgrad {
namespace {

// What every connection of a job with a key begins with. Says how far it gets.
int RunChild() {
  const auto create = [] {
    return TlsSession::Create(Handshake::Role::kClient, Digest{1, 2, 3}).status();
  };
  if (std::getenv("DISTGRAD_TEST_LACKS_MEMORY") != nullptr) {
    lacks_memory = true;
    if (create().ok()) return 2;
  }
  const absl::Status status = create();
  std::printf("%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

// What a process of this program does and says where a variable of the environment has a value.
struct Said {
  int code;
  std::string output, errors;
};
Said RunWith(const char* variable, const std::string& value) {
  Said said;
  setenv(variable, value.c_str(), 1);
  testing::internal::CaptureStderr();
  {
    ChildProcess child({"--child"});
    said.output = child.ReadLine();
    said.code = child.Wait();
  }
  said.errors = testing::internal::GetCapturedStderr();
  unsetenv(variable);
  return said;
}

std::string NewFolder(const std::string& name) {
  const std::string folder = std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
  std::filesystem::create_directories(folder);
  return folder;
}

TEST(TlsLibraryTest, ThisMachineHasIt) {
  const Said said = RunWith("DISTGRAD_TEST_NOTHING", "");
  EXPECT_EQ(said.output, "OK");
  EXPECT_EQ(said.code, 0) << said.errors;
}

// The first one of a process makes what all have in common.
TEST(TlsLibraryTest, WhereThereWasNoMemoryForTheFirstSessionALaterOneIsMade) {
  const Said said = RunWith("DISTGRAD_TEST_LACKS_MEMORY", "");
  EXPECT_EQ(said.output, "OK");
  EXPECT_EQ(said.code, 0) << said.errors;
}

// It is found before the machine's own, and is none.
TEST(TlsLibraryTest, WithoutLibsslNoProcessStarts) {
  const std::string folder = NewFolder("no_libssl");
  std::ofstream(folder + "/libssl.so.3") << "";
  const Said said = RunWith("LD_LIBRARY_PATH", folder);
  EXPECT_EQ(said.output, "");
  EXPECT_NE(said.code, 0);
  EXPECT_TRUE(absl::StrContains(said.errors, "libssl.so.3")) << said.errors;
}

// One that its machine's settings forbid what TLS takes.
TEST(TlsLibraryTest, WithoutWhatTlsTakesItIsAnError) {
  const std::string file = NewFolder("settings") + "/openssl.cnf";
  std::ofstream(file) << "openssl_conf = all\n"
                         "[all]\nalg_section = algorithms\n"
                         "[algorithms]\ndefault_properties = \"provider=none\"\n";
  const Said said = RunWith("OPENSSL_CONF", file);
  EXPECT_TRUE(absl::StartsWith(said.output, "INTERNAL: TLS: this machine's OpenSSL cannot do"))
      << said.output;
  EXPECT_EQ(said.code, 1) << said.errors;
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--child") return distgrad::RunChild();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
