// The functions of NCCL that distgrad calls, for communicators of one process that do not block.
#include "tests/testing/fake_nccl/fake_nccl.h"

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "nccl.h"
#include "tests/testing/fake_cuda/fake_cuda.h"

namespace {

using distgrad::fake_cuda::BytesOf;
using distgrad::fake_cuda::Launch;

// One rank's part of a collective, while its stream waits.
struct Part {
  const void* send = nullptr;
  void* receive = nullptr;
  std::function<void()> done;
};

struct Collective {
  std::map<int, Part> parts;  // by rank
};

struct Clique {
  int size = 0;
  int connected = 0;                           // how many have come, and may have gone
  std::set<int> ranks;                         // that have communicators
  std::map<uint64_t, Collective> collectives;  // those that a rank has come to, and not all
};

}  // namespace

// NCCL's name for what is behind an ncclComm_t.
struct ncclComm {
  std::shared_ptr<Clique> clique;
  int rank = 0;
  int device = 0;
  uint64_t collectives = 0;
};

namespace {

std::mutex mu;
// All guarded by mu.
std::map<std::string, std::shared_ptr<Clique>> cliques;
int communicators = 0;
int finalized = 0;
int destroying = 0;
int destroyed = 0;
int elsewhere = 0;
size_t set_device = 0;
int begun = 0;
int silent = 0;
int untaken = 0;
std::condition_variable taken;
int failing = 0;
bool file = false;
uint64_t ids = 0;

int CurrentDevice() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

bool IsReady(const ncclComm& communicator) {
  return silent == 0 && communicator.clique->connected == communicator.clique->size;
}

size_t Size(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat32:
      return 4;
    case ncclInt64:
      return 8;
    default:
      std::fprintf(stderr, "fake NCCL: there is no type %d\n", type);
      std::abort();
  }
}

template <typename T>
void Add(uint8_t* sum, const uint8_t* summand, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    T a, b;
    std::memcpy(&a, sum + i * sizeof(T), sizeof(T));
    std::memcpy(&b, summand + i * sizeof(T), sizeof(T));
    a = static_cast<T>(a + b);
    std::memcpy(sum + i * sizeof(T), &a, sizeof(T));
  }
}

std::vector<uint8_t> SumOf(const Collective& collective, size_t count, ncclDataType_t type) {
  std::vector<uint8_t> sum;
  for (const auto& [rank, part] : collective.parts) {
    const uint8_t* const bytes = BytesOf(part.send);
    if (sum.empty()) {
      sum.assign(bytes, bytes + count * Size(type));
    } else if (type == ncclFloat32) {
      Add<float>(sum.data(), bytes, count);
    } else if (type == ncclInt64) {
      Add<int64_t>(sum.data(), bytes, count);
    } else {
      Add<uint8_t>(sum.data(), bytes, count);
    }
  }
  return sum;
}

// The stream of each rank waits in it for all others; then the last one writes the results.
ncclResult_t Run(ncclComm* communicator, Part part, cudaStream_t stream,
                 std::function<void(const Collective&)> run) {
  std::unique_lock<std::mutex> lock(mu);
  const std::shared_ptr<Clique> clique = communicator->clique;
  const uint64_t number = communicator->collectives++;
  const int rank = communicator->rank;
  ++begun;
  lock.unlock();
  Launch(stream, [=](std::function<void()> done) {
    const std::lock_guard<std::mutex> guard(mu);
    if (clique->ranks.count(rank) == 0) return done();  // aborted
    Collective& collective = clique->collectives[number];
    collective.parts[rank] = {part.send, part.receive, std::move(done)};
    if (static_cast<int>(collective.parts.size()) < clique->size) return;
    run(collective);
    for (const auto& [each, there] : collective.parts) there.done();
    clique->collectives.erase(number);
  });
  return ncclInProgress;
}

void WriteTo(const Part& part, const std::vector<uint8_t>& bytes) {
  if (!bytes.empty()) std::memcpy(BytesOf(part.receive), bytes.data(), bytes.size());
}

// With mu held.
void End(ncclComm* communicator) {
  if (CurrentDevice() != communicator->device) ++elsewhere;
  set_device = distgrad::fake_cuda::LastSetDevice();
  communicator->clique->ranks.erase(communicator->rank);
  // Its streams go on, whatever they have.
  for (auto& [number, collective] : communicator->clique->collectives) {
    const auto part = collective.parts.find(communicator->rank);
    if (part == collective.parts.end()) continue;
    part->second.done();
    collective.parts.erase(part);
  }
  delete communicator;
  --communicators;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const std::lock_guard<std::mutex> lock(mu);
  if (file) setenv("NCCL_COMM_BLOCKING", "1", 0);
  std::memset(id, 0, sizeof(*id));
  std::snprintf(id->internal, sizeof(id->internal), "fake %llu",
                static_cast<unsigned long long>(++ids));  // NOLINT: printf's type
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (config == nullptr || config->blocking != 0) {
    std::fputs("fake NCCL: communicators that block are not to be used\n", stderr);
    std::abort();
  }
  const std::lock_guard<std::mutex> lock(mu);
  auto* const communicator = new ncclComm;
  std::shared_ptr<Clique>& clique = cliques[std::string(id.internal)];
  if (clique == nullptr) clique = std::make_shared<Clique>();
  clique->size = size;
  clique->ranks.insert(rank);
  ++clique->connected;
  communicator->clique = clique;
  communicator->rank = rank;
  communicator->device = CurrentDevice();
  ++communicators;
  *out = communicator;
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* error) {
  if (communicator == nullptr) return ncclInvalidArgument;
  const std::lock_guard<std::mutex> lock(mu);
  *error = failing > 0 ? ncclRemoteError : IsReady(*communicator) ? ncclSuccess : ncclInProgress;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  if (communicator == nullptr) return ncclSuccess;
  const std::lock_guard<std::mutex> lock(mu);
  End(communicator);
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t communicator) {
  if (communicator == nullptr) return ncclInvalidArgument;
  const std::lock_guard<std::mutex> lock(mu);
  ++finalized;
  if (CurrentDevice() != communicator->device) ++elsewhere;
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  if (communicator == nullptr) return ncclSuccess;
  std::unique_lock<std::mutex> lock(mu);
  ++destroying;
  taken.wait(lock, [] { return untaken == 0; });
  --destroying;
  if (failing > 0) return ncclRemoteError;  // nothing is freed then
  ++destroyed;
  End(communicator);
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclSuccess; }
const char* ncclGetLastError(ncclComm_t) { return "nothing: this NCCL is a fake"; }

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t, ncclComm_t communicator, cudaStream_t stream) {
  return Run(communicator, {send, receive, nullptr}, stream, [=](const Collective& collective) {
    const std::vector<uint8_t> sum = SumOf(collective, count, type);
    for (const auto& [rank, part] : collective.parts) WriteTo(part, sum);
  });
}

ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                        ncclRedOp_t, int root, ncclComm_t communicator, cudaStream_t stream) {
  return Run(communicator, {send, receive, nullptr}, stream, [=](const Collective& collective) {
    WriteTo(collective.parts.at(root), SumOf(collective, count, type));
  });
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t communicator, cudaStream_t stream) {
  return Run(communicator, {send, receive, nullptr}, stream, [=](const Collective& collective) {
    const uint8_t* const bytes = BytesOf(collective.parts.at(root).send);
    const std::vector<uint8_t> all(bytes, bytes + count * Size(type));
    for (const auto& [rank, part] : collective.parts) WriteTo(part, all);
  });
}

}  // extern "C"

namespace distgrad::fake_nccl {

int Communicators() {
  const std::lock_guard<std::mutex> lock(mu);
  return communicators;
}

int Finalized() {
  const std::lock_guard<std::mutex> lock(mu);
  return finalized;
}

int Destroying() {
  const std::lock_guard<std::mutex> lock(mu);
  return destroying;
}

int Destroyed() {
  const std::lock_guard<std::mutex> lock(mu);
  return destroyed;
}

int EndedElsewhere() {
  const std::lock_guard<std::mutex> lock(mu);
  return elsewhere;
}

size_t SetDeviceBeforeTheEnd() {
  const std::lock_guard<std::mutex> lock(mu);
  return set_device;
}

int Begun() {
  const std::lock_guard<std::mutex> lock(mu);
  return begun;
}

Silence::Silence() {
  const std::lock_guard<std::mutex> lock(mu);
  ++silent;
}
Silence::~Silence() {
  const std::lock_guard<std::mutex> lock(mu);
  --silent;
}

Untaken::Untaken() {
  const std::lock_guard<std::mutex> lock(mu);
  ++untaken;
}
Untaken::~Untaken() {
  const std::lock_guard<std::mutex> lock(mu);
  --untaken;
  taken.notify_all();
}

Failure::Failure() {
  const std::lock_guard<std::mutex> lock(mu);
  ++failing;
}
Failure::~Failure() {
  const std::lock_guard<std::mutex> lock(mu);
  --failing;
}

BlockingByFile::BlockingByFile() {
  const std::lock_guard<std::mutex> lock(mu);
  file = true;
}
BlockingByFile::~BlockingByFile() {
  const std::lock_guard<std::mutex> lock(mu);
  file = false;
  unsetenv("NCCL_COMM_BLOCKING");
}

}  // namespace distgrad::fake_nccl
