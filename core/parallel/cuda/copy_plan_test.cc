// The kernel's own functions, run one thread after the other.
#include "core/parallel/cuda/copy_plan.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace distgrad {
namespace {

// What copy_kernel.cu does, launch by launch; returns how many launches there were. `order`
// shuffles blocks and threads: no share may depend on another.
int CopyAll(const std::vector<CopyJob>& jobs, uint32_t threads, std::mt19937* order = nullptr) {
  int launches = 0;
  auto table = std::make_unique<CopyTable>();
  for (size_t done = 0; done < jobs.size();) {
    const size_t taken = FillTable(jobs.data() + done, jobs.size() - done, table.get());
    if (taken == 0) return -1;
    done += taken;
    if (table->count == 0) continue;
    ++launches;
    std::vector<std::pair<uint32_t, uint32_t>> shares;
    for (uint32_t tile = 0; tile < table->tiles(); ++tile) {
      for (uint32_t thread = 0; thread < threads; ++thread) shares.push_back({tile, thread});
    }
    if (order != nullptr) std::shuffle(shares.begin(), shares.end(), *order);
    for (const auto& [tile, thread] : shares) CopyTile(*table, tile, thread, threads);
  }
  return launches;
}

// A piece of memory of its own, at a chosen distance from an address divisible by 64, in guards.
class Memory {
 public:
  Memory(size_t bytes, size_t misalignment, uint8_t fill) : bytes_(bytes) {
    buffer_.assign(bytes + misalignment + 3 * 64, kGuard);
    const auto address = reinterpret_cast<uintptr_t>(buffer_.data());
    offset_ = 64 + (64 - address % 64) % 64 + misalignment;
    std::memset(data(), fill, bytes);
  }
  uint8_t* data() { return buffer_.data() + offset_; }
  void Randomize(std::mt19937& random) {
    for (size_t i = 0; i < bytes_; ++i) data()[i] = static_cast<uint8_t>(random());
  }
  bool GuardsStand() const {
    for (size_t i = 0; i < buffer_.size(); ++i) {
      if ((i < offset_ || i >= offset_ + bytes_) && buffer_[i] != kGuard) return false;
    }
    return true;
  }

 private:
  static constexpr uint8_t kGuard = 0xa5;
  const size_t bytes_;
  size_t offset_;
  std::vector<uint8_t> buffer_;
};

TEST(CopyPlanTest, EverySizeAtEveryAlignmentArrives) {
  std::mt19937 random(1);
  std::vector<size_t> sizes;
  for (size_t size = 0; size < 70; ++size) sizes.push_back(size);
  for (const size_t size : {kTileBytes - 1, kTileBytes, kTileBytes + 1, 3 * kTileBytes + 5}) {
    sizes.push_back(size);
  }
  for (size_t to_at = 0; to_at < 17; ++to_at) {
    for (size_t from_at : {0, 1, 2, 4, 6, 8, 12, 16}) {
      std::vector<Memory> to, from;
      std::vector<CopyJob> jobs;
      for (const size_t size : sizes) {
        to.emplace_back(size, to_at, 0);
        from.emplace_back(size, from_at, 0).Randomize(random);
        jobs.push_back({to.back().data(), from.back().data(), size});
      }
      ASSERT_EQ(CopyAll(jobs, 32), 1);
      for (size_t i = 0; i < sizes.size(); ++i) {
        ASSERT_EQ(std::memcmp(to[i].data(), from[i].data(), sizes[i]), 0) << sizes[i];
        ASSERT_TRUE(to[i].GuardsStand()) << sizes[i];
      }
    }
  }
}

TEST(CopyPlanTest, ManyJobsInAnyOrderOfThreads) {
  std::mt19937 random(2);
  for (const size_t count : {1u, 2u, 1023u, 1024u, 1025u, 3000u}) {
    std::vector<Memory> to, from;
    std::vector<CopyJob> jobs;
    size_t some = 0;
    for (size_t i = 0; i < count; ++i) {
      const size_t size = random() % 4 == 0 ? 0 : random() % 300;
      some += size > 0;
      to.emplace_back(size, random() % 20, 0);
      from.emplace_back(size, random() % 20, 0).Randomize(random);
      jobs.push_back({to.back().data(), from.back().data(), size});
    }
    ASSERT_EQ(CopyAll(jobs, 8, &random), static_cast<int>((some + 1023) / 1024)) << count;
    for (size_t i = 0; i < count; ++i) {
      ASSERT_EQ(std::memcmp(to[i].data(), from[i].data(), jobs[i].bytes), 0) << i;
      ASSERT_TRUE(to[i].GuardsStand()) << i;
    }
  }
}

TEST(CopyPlanTest, ATileBelongsToTheJobThatBeginsBeforeIt) {
  auto table = std::make_unique<CopyTable>();
  std::vector<CopyJob> jobs(kJobsPerLaunch);
  std::vector<uint32_t> owners;
  for (uint32_t i = 0; i < jobs.size(); ++i) {
    const uint32_t tiles = 1 + i % 3;
    jobs[i].bytes = uint64_t{tiles} * kTileBytes - i % 7;
    owners.insert(owners.end(), tiles, i);
  }
  ASSERT_EQ(FillTable(jobs.data(), jobs.size(), table.get()), jobs.size());
  ASSERT_EQ(table->tiles(), owners.size());
  for (uint32_t tile = 0; tile < owners.size(); ++tile) {
    ASSERT_EQ(internal::JobOfTile(*table, tile), owners[tile]) << tile;
  }
}

TEST(CopyPlanTest, MoreThanTilesCanBeNumberedIsLeftForTheNextLaunchOrRefused) {
  auto table = std::make_unique<CopyTable>();
  const uint64_t most = uint64_t{UINT32_MAX} * kTileBytes;
  const CopyJob fitting[] = {{nullptr, nullptr, most}, {nullptr, nullptr, 1}};
  EXPECT_EQ(FillTable(fitting, 2, table.get()), 1u);
  EXPECT_EQ(FillTable(fitting + 1, 1, table.get()), 1u);
  const CopyJob excessive = {nullptr, nullptr, most + 1};
  EXPECT_EQ(FillTable(&excessive, 1, table.get()), 0u);
}

}  // namespace
}  // namespace distgrad
