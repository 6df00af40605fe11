// Keeps memory by device, and runs each stream's work some time after it was launched.
#include "tests/testing/fake_cuda/machine.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

namespace distgrad::fake_cuda {
namespace {

constexpr auto kLateness = std::chrono::milliseconds(1);
constexpr size_t kPage = 4096;

}  // namespace

Machine& Machine::Get() {
  static Machine* const machine = new Machine;
  return *machine;
}

Machine::Machine() {
  for (int device = 0; device < kDevices; ++device) {
    default_streams_[device].device = device;
    streams_.push_back(&default_streams_[device]);
  }
  std::thread([this] { Loop(); }).detach();
}

void Machine::Loop() {
  std::unique_lock<std::mutex> lock(mu_);
  while (true) {
    const auto now = std::chrono::steady_clock::now();
    auto soonest = now + std::chrono::hours(1);
    std::vector<Stream*> ready;
    for (Stream* stream : streams_) {
      if (held_ > 0 || stream->held > 0 || stream->steps.empty()) continue;
      const Stream::Step& step = stream->steps.front();
      if (step.after != nullptr && !step.after->done) continue;
      soonest = std::min(soonest, step.not_before);
      if (step.not_before <= now) ready.push_back(stream);
    }
    if (ready.empty()) {
      changed_.wait_until(lock, soonest);
      continue;
    }
    random_ = random_ * 1664525 + 1013904223;
    Stream* const stream = ready[(random_ >> 16) % ready.size()];
    // It stays at the front, so that the stream is not idle, and is not run twice.
    const std::function<void()> run = std::move(stream->steps.front().run);
    const std::shared_ptr<Mark> mark = stream->steps.front().mark;
    lock.unlock();
    if (run) run();
    lock.lock();
    stream->steps.pop_front();
    if (mark != nullptr) mark->done = true;
    changed_.notify_all();
  }
}

void Machine::Push(Stream* stream, Stream::Step step) {
  step.not_before = std::chrono::steady_clock::now() + kLateness;
  const std::lock_guard<std::mutex> lock(mu_);
  stream->steps.push_back(std::move(step));
  changed_.notify_all();
}

Stream* Machine::NewStream(int device, bool blocking) {
  auto* stream = new Stream;
  stream->device = device;
  stream->blocking = blocking;
  const std::lock_guard<std::mutex> lock(mu_);
  streams_.push_back(stream);
  return stream;
}

void Machine::Delete(Stream* stream) {
  std::unique_lock<std::mutex> lock(mu_);
  changed_.wait(lock, [&] { return stream->steps.empty(); });
  streams_.erase(std::find(streams_.begin(), streams_.end(), stream));
  delete stream;
}

void Machine::Run(Stream* stream, std::function<void()> step) {
  Push(stream, {.run = std::move(step)});
}

std::shared_ptr<Mark> Machine::MarkEndOf(Stream* stream) {
  auto mark = std::make_shared<Mark>();
  Push(stream, {.mark = mark});
  return mark;
}

void Machine::Wait(Stream* stream, std::shared_ptr<const Mark> mark) {
  Push(stream, {.after = std::move(mark)});
}

void Machine::Set(Mark* mark) {
  const std::lock_guard<std::mutex> lock(mu_);
  mark->done = true;
  changed_.notify_all();
}

bool Machine::IsDone(const Mark& mark) {
  const std::lock_guard<std::mutex> lock(mu_);
  return mark.done;
}

void Machine::WaitOnHost(const Mark& mark) {
  std::unique_lock<std::mutex> lock(mu_);
  changed_.wait(lock, [&] { return mark.done; });
}

void Machine::WaitOnHostForDevice(int device) {
  std::unique_lock<std::mutex> lock(mu_);
  changed_.wait(lock, [&] {
    return std::all_of(streams_.begin(), streams_.end(), [device](const Stream* stream) {
      return stream->device != device || stream->steps.empty();
    });
  });
}

bool Machine::IsIdle(Stream* stream) {
  const std::lock_guard<std::mutex> lock(mu_);
  return stream->steps.empty();
}

void* Machine::Allocate(int device, size_t size) {
  const size_t mapped = (size + kPage - 1) / kPage * kPage;
  if (used(device) + mapped > kDeviceBytes) return nullptr;
  const int file = memfd_create("fake_cuda", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(mapped)) != 0) return nullptr;
  void* const data = mmap(nullptr, mapped, PROT_NONE, MAP_SHARED, file, 0);
  void* const bytes = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (data == MAP_FAILED || bytes == MAP_FAILED) return nullptr;
  const std::lock_guard<std::mutex> lock(mu_);
  ranges_[reinterpret_cast<uintptr_t>(data)] = {static_cast<uint8_t*>(data),
                                                static_cast<uint8_t*>(bytes), mapped, device};
  return data;
}

void* Machine::AllocatePinned(size_t size) {
  void* const data =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  const std::lock_guard<std::mutex> lock(mu_);
  auto* const bytes = static_cast<uint8_t*>(data);
  ranges_[reinterpret_cast<uintptr_t>(data)] = {bytes, bytes, size, -1};
  return data;
}

bool Machine::Free(void* data) {
  for (int device = 0; device < kDevices; ++device) WaitOnHostForDevice(device);
  const std::lock_guard<std::mutex> lock(mu_);
  const auto found = ranges_.find(reinterpret_cast<uintptr_t>(data));
  if (found == ranges_.end()) return false;
  const Range& range = found->second;
  if (range.bytes != range.data) munmap(range.bytes, range.size);
  munmap(range.data, range.size);
  ranges_.erase(found);
  return true;
}

Range Machine::Find(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const std::lock_guard<std::mutex> lock(mu_);
  auto after = ranges_.upper_bound(address);
  if (after == ranges_.begin()) return {};
  const Range& range = std::prev(after)->second;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(range.data);
  return address < begin + range.size ? range : Range{};
}

uint8_t* Machine::Bytes(const void* data) {
  auto* const address = static_cast<uint8_t*>(const_cast<void*>(data));
  const Range range = Find(data);
  return range.data == nullptr ? address : range.bytes + (address - range.data);
}

size_t Machine::used(int device) {
  const std::lock_guard<std::mutex> lock(mu_);
  size_t used = 0;
  for (const auto& [begin, range] : ranges_) used += range.device == device ? range.size : 0;
  return used;
}

void Machine::Hold(Stream* stream, int change) {
  const std::lock_guard<std::mutex> lock(mu_);
  (stream == nullptr ? held_ : stream->held) += change;
  changed_.notify_all();
}

Standstill::Standstill(void* stream) : stream_(stream) {
  Machine::Get().Hold(static_cast<Stream*>(stream_), 1);
}
Standstill::~Standstill() { Machine::Get().Hold(static_cast<Stream*>(stream_), -1); }

int Machine::BeginCapture(const Stream* stream, CaptureMode mode) {
  const std::lock_guard<std::mutex> lock(mu_);
  captures_.push_back({++captures_so_far_, stream, std::this_thread::get_id(), mode});
  return captures_so_far_;
}

void Machine::EndCapture(int number) {
  const std::lock_guard<std::mutex> lock(mu_);
  captures_.erase(std::find_if(captures_.begin(), captures_.end(),
                               [=](const CaptureState& each) { return each.number == number; }));
}

bool Machine::IsCaptured(const Stream* stream) {
  const std::lock_guard<std::mutex> lock(mu_);
  return std::any_of(captures_.begin(), captures_.end(),
                     [=](const CaptureState& each) { return each.stream == stream; });
}

bool Machine::IsBlockingStreamCaptured(int device) {
  const std::lock_guard<std::mutex> lock(mu_);
  return std::any_of(captures_.begin(), captures_.end(), [=](const CaptureState& each) {
    return each.stream->blocking && each.stream->device == device;
  });
}

bool Machine::IsIntact(int capture) {
  const std::lock_guard<std::mutex> lock(mu_);
  return std::any_of(captures_.begin(), captures_.end(), [=](const CaptureState& each) {
    return each.number == capture && each.intact;
  });
}

bool Machine::Refuses(CaptureMode mode, const Stream* stream) {
  const std::lock_guard<std::mutex> lock(mu_);
  bool refused = false;
  for (CaptureState& each : captures_) {
    const bool own = each.thread == std::this_thread::get_id();
    const bool unsafe = own ? each.mode != CaptureMode::kRelaxed && mode != CaptureMode::kRelaxed
                            : each.mode == CaptureMode::kGlobal && mode == CaptureMode::kGlobal;
    if (!unsafe && (stream == nullptr || each.stream != stream)) continue;
    each.intact = false;
    refused = true;
  }
  return refused;
}

Capture::Capture(void* stream, CaptureMode mode)
    : number_(Machine::Get().BeginCapture(static_cast<Stream*>(stream), mode)) {}
Capture::~Capture() { Machine::Get().EndCapture(number_); }
bool Capture::intact() const { return Machine::Get().IsIntact(number_); }

Broken::Broken() { ++Machine::Get().broken; }
Broken::~Broken() { --Machine::Get().broken; }

size_t Waits() { return Machine::Get().waits; }

size_t PageableBytes() { return Machine::Get().pageable_bytes; }

void Launch(void* stream, std::function<void(std::function<void()> done)> step) {
  Machine& machine = Machine::Get();
  const auto mark = std::make_shared<Mark>();
  machine.Run(static_cast<Stream*>(stream),
              [step = std::move(step), mark] { step([mark] { Machine::Get().Set(mark.get()); }); });
  machine.Wait(static_cast<Stream*>(stream), mark);
}

uint8_t* BytesOf(const void* data) { return Machine::Get().Bytes(data); }

}  // namespace distgrad::fake_cuda
