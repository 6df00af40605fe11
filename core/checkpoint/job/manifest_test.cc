// A manifest comes back, shows every wrong bit, and is believed in nothing that could do harm.
#include "core/checkpoint/job/manifest.h"

#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "core/base/crc32c.h"
#include "gtest/gtest.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

Manifest Example() {
  Manifest manifest{120, 7, "2026-01-02T03:04:05Z", {}};
  manifest.workers.push_back(
      {"front/\"one\"",
       {{"epoch", "3"}, {"generator", std::string("\x00\xff\x80", 3)}},
       {{"model-00001-of-00002.safetensors", std::nullopt, {1000, 0x1, {{"a.b", 0xffffffff}}}},
        {"optimizer-00001-of-00002.safetensors", "", {200, 2, {{"a.b", 3}}}}}});
  manifest.workers.push_back({"back", {}, {}});
  return manifest;
}

// A text with the checksum that it should have.
std::string Signed(std::string text) {
  const size_t at = text.rfind("\"crc32c\"");
  text.resize(at);
  return absl::StrFormat("%s\"crc32c\": \"%08x\"\n}\n", text, Crc32c(text));
}

TEST(ManifestTest, ComesBackAsItWas) {
  const absl::StatusOr<std::string> text = EncodeManifest(Example());
  ASSERT_TRUE(text.ok()) << text.status();
  const absl::StatusOr<Manifest> read = ParseManifest(*text);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->step, 120);
  EXPECT_EQ(read->sequence, 7u);
  ASSERT_EQ(read->workers.size(), 2u);
  const ManifestWorker& worker = read->workers[0];
  EXPECT_EQ(worker.name, "front/\"one\"");
  EXPECT_EQ(worker.values, Example().workers[0].values);
  ASSERT_EQ(worker.files.size(), 2u);
  EXPECT_FALSE(worker.files[0].optimizer.has_value());
  EXPECT_EQ(worker.files[0].checksums.size, 1000u);
  EXPECT_EQ(worker.files[0].checksums.tensors, Example().workers[0].files[0].checksums.tensors);
  EXPECT_EQ(worker.files[1].optimizer, "");
  EXPECT_EQ(*EncodeManifest(*read), *text);
}

TEST(ManifestTest, NoBitMayBeWrongAndNoByteMissing) {
  const std::string text = *EncodeManifest(Example());
  for (size_t i = 0; i < text.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = text;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << bit));
      EXPECT_EQ(ParseManifest(damaged).status().code(), absl::StatusCode::kDataLoss)
          << "bit " << bit << " of byte " << i;
    }
    EXPECT_EQ(ParseManifest(text.substr(0, i)).status().code(), absl::StatusCode::kDataLoss) << i;
  }
  EXPECT_EQ(Signed(text), text);
}

// It may be good, and what is damaged is passed over. Each allocation fails in turn, in a process
// of its own: destructors of nlohmann's allocate, and end the process where there is no memory for
// that.
TEST(ManifestTest, WithoutMemoryItIsNotDamaged) {
  const std::string text = *EncodeManifest(Example());
  enum { kRead = 1, kDamaged, kNoMemory, kEnded };
  int read = 0, no_memory = 0;
  for (int nth = 0; read == 0; ++nth) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      std::set_terminate([] { _exit(kEnded); });
      absl::Status status;
      FailAllocation(nth);
      try {
        status = ParseManifest(text).status();
      } catch (const std::bad_alloc&) {
        _exit(kNoMemory);
      }
      if (status.ok()) _exit(kRead);
      _exit(IsDamage(status) ? kDamaged : kNoMemory);
    }
    int how = 0;
    ASSERT_EQ(waitpid(child, &how, 0), child);
    ASSERT_TRUE(WIFEXITED(how)) << "allocation " << nth;
    EXPECT_NE(WEXITSTATUS(how), kDamaged) << "allocation " << nth;
    read += WEXITSTATUS(how) == kRead;
    no_memory += WEXITSTATUS(how) == kNoMemory;
  }
  EXPECT_GT(no_memory, 20);
}

TEST(ManifestTest, WithoutMemoryItsFileIsClosed) {
  const std::string folder = absl::StrCat(testing::TempDir(), "/manifest.", getpid());
  std::filesystem::create_directory(folder);
  std::ofstream(absl::StrCat(folder, "/", kManifestName)) << *EncodeManifest(Example());
  const auto descriptors = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const auto before = descriptors();
  int failures = 0;
  for (bool failed = true; failed; ++failures) {
    FailAllocation(failures);
    try {
      static_cast<void>(ReadManifestText(folder));
    } catch (const std::bad_alloc&) {
      // What is left then is looked for below.
    }
    failed = FailAllocation(-1);
    ASSERT_EQ(descriptors(), before) << failures;
  }
  EXPECT_GT(failures, 1);
  std::filesystem::remove_all(folder);
}

// A checksum keeps nobody from writing what he likes.
TEST(ManifestTest, WhatSomebodyElseWroteIsChecked) {
  const std::string text = *EncodeManifest(Example());
  const auto with = [&](absl::string_view from, absl::string_view to) {
    EXPECT_TRUE(absl::StrContains(text, from)) << from;
    return ParseManifest(Signed(absl::StrReplaceAll(text, {{from, to}}))).status();
  };
  const std::string file = "model-00001-of-00002.safetensors";
  for (const char* name :
       {"../model.safetensors", "/etc/x.safetensors", "a/b.safetensors", ".x.safetensors",
        "model.pt", "", "a\\u0000.safetensors", "a b.safetensors"}) {
    EXPECT_EQ(with(file, name).code(), absl::StatusCode::kInvalidArgument) << name;
  }
  EXPECT_EQ(with("optimizer-00001", "model-00001").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(with("\"back\"", "\"front/\\\"one\\\"\"").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(with("\"version\": 1", "\"version\": 2").code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(with("distgrad checkpoint", "something").code(), absl::StatusCode::kInvalidArgument);
  for (const char* step : {"-1", "1.5", "\"1\"", "null", "9223372036854775808", "1e99", "[[]]"}) {
    EXPECT_EQ(with("\"step\": 120", absl::StrCat("\"step\": ", step)).code(),
              absl::StatusCode::kInvalidArgument)
        << step;
  }
  for (const std::string& name :
       {std::string("a b"), std::string("\\u001b[31m"), std::string(65, 'x')}) {
    EXPECT_EQ(with("\"optimizer\": \"\"", absl::StrCat("\"optimizer\": \"", name, "\"")).code(),
              absl::StatusCode::kInvalidArgument)
        << name;
  }
  EXPECT_TRUE(with("\"optimizer\": \"\"", "\"optimizer\": \"adam_2-b\"").ok());
  EXPECT_EQ(with("\"size\": 1000", "\"size\": -1").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(with("\"ffffffff\"", "\"fffffffff\"").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(with("\"ffffffff\"", "17").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(with("\"epoch\": \"3\"", "\"epoch\": 3").code(), absl::StatusCode::kInvalidArgument);
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  EXPECT_EQ(with("\"epoch\": \"3\"", "\"epoch\": " + deep).code(),
            absl::StatusCode::kInvalidArgument);
  // The same tensor in two files of parameters.
  Manifest twice = Example();
  twice.workers[0].files[1].optimizer = std::nullopt;
  EXPECT_EQ(ParseManifest(*EncodeManifest(twice)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ManifestTest, NamesAreUtf8) {
  Manifest manifest = Example();
  manifest.workers[0].name = "\xff";
  EXPECT_EQ(EncodeManifest(manifest).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace distgrad
