// Advances the vector clocks, and compares them at each use of memory.
#include "tests/testing/fake_device/timeline.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace distgrad::fake_device {
namespace {

// What the calling thread has waited for.
thread_local VectorClock host_clock;

void Join(const VectorClock& from, VectorClock* into) {
  for (const auto& [stream, tick] : from) {
    uint64_t& mine = (*into)[stream];
    mine = std::max(mine, tick);
  }
}

bool Covers(const VectorClock& clock, StreamKey stream, uint64_t tick) {
  const auto it = clock.find(stream);
  return tick == 0 || (it != clock.end() && it->second >= tick);
}

std::string Name(StreamKey stream) {
  return absl::StrCat("stream ", stream.second, " of device ", stream.first);
}

}  // namespace

Timeline& Timeline::Get() {
  static Timeline* const timeline = new Timeline;
  return *timeline;
}

std::string Timeline::Launch(StreamKey stream, const std::vector<Block*>& reads,
                             const std::vector<Block*>& writes) {
  absl::MutexLock lock(&mu_);
  VectorClock& clock = clocks_[stream];
  Join(host_clock, &clock);
  const uint64_t tick = ++clock[stream];
  std::string wrong;
  const auto check_write_before = [&](const Block& block, const char* verb) {
    const auto& [writer, when] = block.last_write;
    if (Covers(clock, writer, when)) return;
    wrong =
        absl::StrCat(Name(stream), verb, "what ", Name(writer), " wrote, without waiting for it");
  };
  for (const Block* block : reads) check_write_before(*block, " reads ");
  for (const Block* block : writes) {
    check_write_before(*block, " writes over ");
    for (const auto& [reader, when] : block->last_reads) {
      if (reader == stream || Covers(clock, reader, when)) continue;
      wrong = absl::StrCat(Name(stream), " writes over what ", Name(reader),
                           " reads, without waiting for it");
    }
  }
  if (!wrong.empty()) {
    violations_.push_back(wrong);
    return wrong;
  }
  for (Block* block : reads) block->last_reads[stream] = tick;
  for (Block* block : writes) block->last_write = {stream, tick};
  return wrong;
}

VectorClock Timeline::Record(StreamKey stream) {
  absl::MutexLock lock(&mu_);
  return clocks_[stream];
}

void Timeline::Wait(StreamKey stream, const VectorClock& event) {
  absl::MutexLock lock(&mu_);
  Join(event, &clocks_[stream]);
}

void Timeline::WaitOnHost(StreamKey stream) { WaitOnHost(Record(stream)); }

void Timeline::WaitOnHost(const VectorClock& event) { Join(event, &host_clock); }

void Timeline::WaitOnHostForDevice(int device) {
  absl::MutexLock lock(&mu_);
  for (const auto& [stream, clock] : clocks_) {
    if (stream.first == device) Join(clock, &host_clock);
  }
}

void Timeline::RecordUse(Block* block, StreamKey stream) {
  absl::MutexLock lock(&mu_);
  block->recorded[stream] = 1;
}

void Timeline::Free(const Block& block) {
  absl::MutexLock lock(&mu_);
  VectorClock known = clocks_[block.owner];
  Join(host_clock, &known);
  // The allocator keeps it until these are done with what they have been given.
  for (const auto& [stream, recorded] : block.recorded) Join(clocks_[stream], &known);
  VectorClock uses = block.last_reads;
  if (block.last_write.second != 0) {
    uint64_t& use = uses[block.last_write.first];
    use = std::max(use, block.last_write.second);
  }
  for (const auto& [stream, tick] : uses) {
    if (stream == block.owner || Covers(known, stream, tick)) continue;
    violations_.push_back(absl::StrCat("memory of ", Name(block.owner), " was freed while ",
                                       Name(stream), " may use it"));
  }
}

std::vector<std::string> Timeline::TakeViolations() {
  absl::MutexLock lock(&mu_);
  return std::exchange(violations_, {});
}

}  // namespace distgrad::fake_device
