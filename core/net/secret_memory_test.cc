// What memory that is given back has of a cluster key.
#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/net/cluster_key.h"
#include "core/net/handshake.h"
#include "gtest/gtest.h"

namespace {

constexpr char kKey[] = "a key that is looked for: 27182818284590452353";
constexpr char kOther[] = "another that is looked for: 31415926535897932384";
std::atomic<bool> looks{false};
std::atomic<int> found{0};

void Look(void* memory) {
  if (!looks) return;
  const size_t size = malloc_usable_size(memory);
  for (const absl::string_view key : {absl::string_view(kKey), absl::string_view(kOther)}) {
    if (memmem(memory, size, key.data(), key.size()) != nullptr) ++found;
  }
}

}  // namespace

void* operator new(size_t size) {
  if (void* const memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void* operator new[](size_t size) { return operator new(size); }
// Those of AddressSanitizer would not fit the delete below.
void* operator new(size_t size, const std::nothrow_t&) noexcept { return std::malloc(size); }
void* operator new[](size_t size, const std::nothrow_t&) noexcept { return std::malloc(size); }
void operator delete(void* memory) noexcept {
  if (memory != nullptr) Look(memory);
  std::free(memory);
}
void operator delete[](void* memory) noexcept { operator delete(memory); }
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }
void operator delete[](void* memory, size_t) noexcept { operator delete(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { operator delete(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { operator delete(memory); }

namespace distgrad {
namespace {

// How often a key stands in memory that `run` gives back.
template <typename F>
int FoundIn(F&& run) {
  found = 0;
  looks = true;
  run();
  looks = false;
  return found;
}

// A file's text must not be in a stream's memory either.
std::string WriteKeys() {
  std::string path = absl::StrCat(testing::TempDir(), "/keys");
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  EXPECT_GE(fd, 0);
  for (const absl::string_view text : {absl::string_view(kKey), absl::string_view("\n"),
                                       absl::string_view(kOther), absl::string_view("\n")}) {
    EXPECT_EQ(write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  close(fd);
  return path;
}

TEST(SecretMemoryTest, AStringWouldBeFound) {
  EXPECT_EQ(FoundIn([] { const std::string key(kKey); }), 1);
}

TEST(SecretMemoryTest, AKeyIsNotFoundOnceItIsNotNeeded) {
  const std::string path = WriteKeys();
  ASSERT_EQ(setenv("DISTGRAD_KEY", kKey, 1), 0);
  EXPECT_EQ(FoundIn([&] {
              const ClusterKey of_variable = LoadClusterKey("").value();
              EXPECT_EQ(of_variable.used(), kKey);
              ClusterKey key = LoadClusterKey(path).value();
              EXPECT_EQ(key.accepted(), kOther);
              std::vector<ClusterKey> copies(3, key);
              copies.push_back(std::move(key));
              copies[0] = ClusterKey();
              key = copies[1];
              // The client has the second key alone, so the server tries both.
              Handshake client =
                  Handshake::Create(Handshake::Role::kClient, copies[1].accepted(), {}).value();
              Handshake server = Handshake::Create(Handshake::Role::kServer, key, {}).value();
              for (int i = 0; i < 2; ++i) {
                ASSERT_TRUE(server.Receive(client.TakeOutput()).ok());
                ASSERT_TRUE(client.Receive(server.TakeOutput()).ok());
              }
              EXPECT_TRUE(client.done() && server.done());
            }),
            0);
  unsetenv("DISTGRAD_KEY");
}

}  // namespace
}  // namespace distgrad
