// Has ranks meet, adds up what they bring, and breaks.
#include "tests/simulation/group.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/check.h"
#include "core/base/deadline.h"
#include "core/parallel/process_group/new_backend.h"
#include "core/tensor/exception.h"

namespace distgrad::simulation {

using Clock = SimulatedNetwork::Clock;
using Time = Clock::time_point;

// Thread-safe.
class Room {
 public:
  explicit Room(int size) : size_(size), ranks_(size) {}

  // Waits until all are here.
  void Enter(int rank, const std::string& address, Time until) {
    std::unique_lock<std::mutex> lock(mu_);
    TORCH_CHECK(!GroupNetwork::Current().IsDead(address), "this process is dead");
    ranks_[rank].address = address;
    ranks_[rank].here = true;
    changed_.notify_all();
    while (true) {
      CheckConnected(rank);
      if (std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.here; })) return;
      TORCH_CHECK(changed_.wait_until(lock, until) == std::cv_status::no_timeout,
                  "Timed out waiting for all ranks to connect");
    }
  }

  // Brings a tensor to the rank's next collective; returns its number. `root`: -1 for a sum.
  size_t Begin(int rank, at::Tensor tensor, int root) {
    std::lock_guard<std::mutex> lock(mu_);
    const size_t number = ranks_[rank].begun++;
    if (number == collectives_.size()) collectives_.emplace_back(size_);
    Collective& at = collectives_[number];
    at.tensors[rank] = std::move(tensor);
    const auto& network = GroupNetwork::Current().network();
    for (int to = 0; to < size_; ++to) {
      if (ranks_[rank].broken || to == rank) continue;
      at.arrival[to] =
          std::max(at.arrival[to], network->Arrival(ranks_[rank].address, ranks_[to].address));
    }
    if (++at.there == size_) {
      const at::NoGradGuard no_grad;
      at.result = at.tensors[std::max(root, 0)].clone();
      for (int i = 1; i < size_ && root < 0; ++i) at.result.add_(at.tensors[i]);
    }
    changed_.notify_all();
    return number;
  }

  // False if the time is over.
  bool Await(int rank, size_t number, Time timeout, Time patience) {
    std::unique_lock<std::mutex> lock(mu_);
    while (true) {
      Collective& at = collectives_[number];
      CheckAlive(rank);
      const Time now = Clock::now();
      Time next = std::min(timeout, patience);
      if (at.there == size_) {
        if (at.arrival[rank] <= now) {
          const at::NoGradGuard no_grad;
          at.tensors[rank].copy_(at.result);
          return true;
        }
        next = std::min(next, at.arrival[rank]);
      } else {
        // What has been sent comes before the end of the connection.
        next = std::min(next, CheckConnected(rank));
      }
      TORCH_CHECK(now < timeout, "Timed out waiting for recv operation to complete");
      if (now >= patience) return false;
      if (next == Time::max()) {
        changed_.wait(lock);
      } else {
        changed_.wait_until(lock, next);
      }
    }
  }

  // The connections of a rank end, and the others hear of it, unless its machine is gone.
  void Break(int rank, bool silently) {
    std::lock_guard<std::mutex> lock(mu_);
    Rank& broken = ranks_[rank];
    if (broken.broken) return;
    broken.broken = true;
    if (!broken.here || silently) return;
    const auto& network = GroupNetwork::Current().network();
    for (Rank& other : ranks_) {
      if (!other.here || &other == &broken) continue;
      other.hears = std::min(other.hears, network->Arrival(broken.address, other.address));
    }
    changed_.notify_all();
  }
  void BreakAt(const std::string& address, bool silently) {
    int rank = -1;
    {
      std::lock_guard<std::mutex> lock(mu_);
      for (int i = 0; i < size_; ++i) {
        if (ranks_[i].here && ranks_[i].address == address) rank = i;
      }
    }
    if (rank < 0) return;
    Break(rank, silently);
    std::lock_guard<std::mutex> lock(mu_);
    ranks_[rank].dead = true;
    changed_.notify_all();
  }

 private:
  struct Rank {
    std::string address;
    bool here = false, broken = false, dead = false;
    Time hears = Time::max();  // that the connection with another one has ended
    size_t begun = 0;
  };
  struct Collective {
    explicit Collective(int size) : tensors(size), arrival(size) {}
    std::vector<at::Tensor> tensors;  // by rank
    std::vector<Time> arrival;        // of all that others have brought, by rank
    int there = 0;
    at::Tensor result;
  };

  void CheckAlive(int rank) const { TORCH_CHECK(!ranks_[rank].dead, "this process is dead"); }
  // Returns when this rank will hear that a connection has ended.
  Time CheckConnected(int rank) const {
    CheckAlive(rank);
    TORCH_CHECK(!ranks_[rank].broken, "the group was aborted");
    TORCH_CHECK(ranks_[rank].hears > Clock::now(), "Connection closed by peer");
    return ranks_[rank].hears;
  }

  const int size_;
  std::mutex mu_;
  std::condition_variable changed_;
  std::vector<Rank> ranks_;              // guarded by mu_
  std::vector<Collective> collectives_;  // guarded by mu_
};

namespace {

GroupNetwork* current = nullptr;

class SimulatedWork final : public c10d::Work {
 public:
  SimulatedWork(std::shared_ptr<Room> room, int rank, size_t number, Time timeout)
      : room_(std::move(room)), in_room_(rank), number_(number), timeout_(timeout) {}

  bool isCompleted() override { return over_; }
  bool wait(std::chrono::milliseconds timeout) override {
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    if (over_) return true;
    const Time patience = timeout == c10d::kUnsetTimeout || timeout.count() == 0
                              ? Time::max()
                              : Clock::now() + timeout;
    try {
      over_ = room_->Await(in_room_, number_, timeout_, patience);
    } catch (...) {
      over_ = true;
      failure_ = std::current_exception();
      throw;
    }
    return over_;
  }

 private:
  const std::shared_ptr<Room> room_;
  const int in_room_;
  const size_t number_;
  const Time timeout_;
  bool over_ = false;
  std::exception_ptr failure_;
};

class SimulatedBackend final : public c10d::Backend {
 public:
  SimulatedBackend(std::shared_ptr<Room> room, int rank, int size, absl::Duration timeout)
      : Backend(rank, size), room_(std::move(room)), timeout_(timeout) {}
  ~SimulatedBackend() override { room_->Break(rank_, /*silently=*/false); }

  const std::string getBackendName() const override { return "simulated"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& /*a sum*/) override {
    return Begin(tensors, -1);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return Begin(tensors, static_cast<int>(options.rootRank));
  }
  void abort() override { room_->Break(rank_, /*silently=*/false); }

 private:
  c10::intrusive_ptr<c10d::Work> Begin(std::vector<at::Tensor>& tensors, int root) {
    DG_CHECK(tensors.size() == 1);
    const Time timeout = Clock::now() + absl::ToChronoNanoseconds(timeout_);
    const size_t number = room_->Begin(rank_, tensors[0], root);
    return c10::make_intrusive<SimulatedWork>(room_, rank_, number, timeout);
  }

  const std::shared_ptr<Room> room_;
  const absl::Duration timeout_;
};

}  // namespace

GroupNetwork::GroupNetwork(std::shared_ptr<SimulatedNetwork> network)
    : network_(std::move(network)) {
  DG_CHECK(current == nullptr);
  current = this;
}

GroupNetwork::~GroupNetwork() { current = nullptr; }

GroupNetwork& GroupNetwork::Current() {
  DG_CHECK(current != nullptr);
  return *current;
}

int GroupNetwork::NewRoom(int size) {
  absl::MutexLock lock(&mu_);
  rooms_[++last_] = std::make_shared<Room>(size);
  return last_;
}

std::shared_ptr<Room> GroupNetwork::Find(int number) {
  absl::MutexLock lock(&mu_);
  const auto found = rooms_.find(number);
  return found == rooms_.end() ? nullptr : found->second;
}

bool GroupNetwork::IsDead(const std::string& address) {
  absl::MutexLock lock(&mu_);
  return dead_.count(address) > 0;
}

void GroupNetwork::Kill(const std::string& address, bool silently) {
  std::vector<std::shared_ptr<Room>> rooms;
  {
    absl::MutexLock lock(&mu_);
    dead_.insert(address);
    for (const auto& [number, room] : rooms_) rooms.push_back(room);
  }
  for (const auto& room : rooms) room->BreakAt(address, silently);
}

}  // namespace distgrad::simulation

namespace distgrad {

// What the linker has others call in place of NewGlooBackend().
NewBackend NewSimulatedBackend(const BackendPlace& place) __asm__(
    "__wrap__ZN8distgrad14NewGlooBackendERKNS_12BackendPlaceE");
NewBackend NewSimulatedBackend(const BackendPlace& place) {
  using simulation::GroupNetwork;
  GroupNetwork& groups = GroupNetwork::Current();
  const Deadline deadline = Deadline::After(place.connect_timeout);
  absl::StatusOr<std::string> number;
  if (place.rank == 0) {
    number = absl::StrCat(groups.NewRoom(place.size));
    const absl::Status set = place.store->Set("room", *number, deadline);
    if (!set.ok()) throw StatusError(set);
  } else {
    number = place.store->Get("room", deadline);
    if (!number.ok()) throw StatusError(number.status());
  }
  int room = 0;
  DG_CHECK(absl::SimpleAtoi(*number, &room));
  auto backend = c10::make_intrusive<simulation::SimulatedBackend>(groups.Find(room), place.rank,
                                                                   place.size, place.timeout);
  groups.Find(room)->Enter(place.rank, place.host, deadline.at());
  return {std::move(backend)};
}

}  // namespace distgrad
