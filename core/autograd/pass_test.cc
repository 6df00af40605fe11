// The protocol of docs/autograd.md, run over random programs on a simulated network: random
// orders for large programs, every order for small ones, late replies, and faults at any point.
#include "core/autograd/pass.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace distgrad {
namespace {

using Rng = std::mt19937_64;

int Below(Rng& rng, size_t n) { return static_cast<int>(rng() % n); }

// A random forward: nodes with an owner and local next edges; crossings from a send node to a
// recv node. An edge has the number of its send node.
struct Program {
  int workers = 0;
  std::vector<int> owner;
  std::vector<std::vector<int>> next;
  std::set<int> parameters;
  std::map<int, int> recv_of, send_of;  // send -> recv, recv -> send
  std::set<int> late;                   // recv nodes that appear while the pass runs
  std::vector<int> roots;
  int initiator = 0;

  int Node(int worker, std::vector<int> nexts) {
    owner.push_back(worker);
    next.push_back(std::move(nexts));
    return static_cast<int>(owner.size()) - 1;
  }

  Program(Rng& rng, int workers, int steps, bool with_late) : workers(workers) {
    std::vector<std::vector<int>> values(workers);
    for (int w = 0; w < workers; ++w) {
      if (w > 0 && Below(rng, 5) == 0) continue;
      values[w].push_back(Node(w, {}));
      parameters.insert(values[w].back());
    }
    auto some_worker = [&] {
      int w;
      do w = Below(rng, workers);
      while (values[w].empty());
      return w;
    };
    for (int i = 0; i < steps; ++i) {
      const int a = some_worker();
      std::vector<int> picked = values[a];
      std::shuffle(picked.begin(), picked.end(), rng);
      picked.resize(std::min<size_t>(picked.size(), 1 + Below(rng, 3)));
      if (Below(rng, 100) < 45) {
        values[a].push_back(Node(a, picked));
        continue;
      }
      const int b = Below(rng, workers);
      const int send = Node(a, picked), recv = Node(b, {});
      recv_of[send] = recv;
      send_of[recv] = send;
      // A reply that is late cannot have been used yet.
      if (with_late && Below(rng, 4) == 0)
        late.insert(recv);
      else
        values[b].push_back(recv);
    }
    initiator = some_worker();
    roots = values[initiator];
    std::shuffle(roots.begin(), roots.end(), rng);
    roots.resize(std::min<size_t>(roots.size(), 1 + Below(rng, 2)));
  }

  // The parameters that the roots depend on, through all workers.
  std::set<int> Wanted() const {
    std::set<int> seen, wanted;
    std::vector<int> stack = roots;
    while (!stack.empty()) {
      const int n = stack.back();
      stack.pop_back();
      if (!seen.insert(n).second) continue;
      if (parameters.count(n)) wanted.insert(n);
      for (int m : next[n]) stack.push_back(m);
      if (auto it = send_of.find(n); it != send_of.end()) stack.push_back(it->second);
    }
    return wanted;
  }
};

struct Letter {
  enum Kind {
    kNone,
    kGradient,
    kUncountedNone,
    kUncountedGradient,
    kStart,
    kAck,
    kAbort,
    kReply,
    kLost,
    kRelease
  } kind;
  int from, to;
  uint64_t value = 0;  // edge, or number of acknowledgements
};

// A delivery order: random, or one of all of them (each step's choice counted through).
class Order {
 public:
  virtual ~Order() = default;
  virtual int Choose(int n) = 0;
};
class RandomOrder : public Order {
 public:
  explicit RandomOrder(uint64_t seed) : rng_(seed) {}
  int Choose(int n) override { return Below(rng_, n); }

 private:
  Rng rng_;
};
class EveryOrder : public Order {
 public:
  int Choose(int n) override {
    if (at_ == path_.size()) path_.push_back({0, n});
    return path_[at_++].first;
  }
  bool Next() {
    at_ = 0;
    while (!path_.empty() && path_.back().first + 1 == path_.back().second) path_.pop_back();
    if (path_.empty()) return false;
    ++path_.back().first;
    return true;
  }

 private:
  std::vector<std::pair<int, int>> path_;
  size_t at_ = 0;
};

class Network;

// A worker with its local graph.
class Worker : public PassHost {
 public:
  Worker(Network* net, const Program* program, int me)
      : net_(net), p_(*program), me_(me), pass(me, this) {
    for (auto [send, recv] : p_.recv_of) {
      if (p_.owner[send] == me) sends_.push_back(send);
      if (p_.owner[recv] == me && !p_.late.count(recv)) recvs_.push_back(recv);
    }
  }

  absl::StatusOr<PassPlan> Engage(std::optional<EdgeId> by) override {
    engaged = true;
    std::vector<int> roots = me_ == p_.initiator && !by ? p_.roots : std::vector<int>();
    std::vector<int> all = sends_, free = roots, waiting;
    all.insert(all.end(), roots.begin(), roots.end());
    for (int s : sends_) (by && static_cast<int>(*by) == s ? free : waiting).push_back(s);
    live_ = Reach(all);
    left_ = live_.size();
    for (int n : live_) {
      for (int m : p_.next[n]) ++dependencies_[m];
    }
    for (int r : roots) ++dependencies_[r];
    const std::set<int> reach_free = Reach(free), reach_waiting = Reach(waiting);
    PassPlan plan;
    for (int s : sends_) {
      unfed.insert(s);
      plan.sends.push_back({EdgeId(s), Peer(s)});
      plan.peers.push_back(Peer(s));
    }
    for (int r : recvs_) {
      plan.peers.push_back(Peer(r));
      if (!live_.count(r))
        plan.dead.push_back({EdgeId(p_.send_of.at(r)), Peer(r)});
      else if (reach_free.count(r) && !reach_waiting.count(r))
        plan.certain.push_back(Peer(r));
    }
    return plan;
  }

  void FeedRoots() override {
    for (int r : p_.roots) Arrive(r, true);
  }
  void FeedSend(EdgeId edge, Notice*) override {
    EXPECT_EQ(unfed.erase(static_cast<int>(edge)), 1u) << "a send node was fed twice";
    reached_[edge] = arrived[edge];
    Run(edge);
  }
  bool Idle() override { return true; }
  void Stop(const absl::Status&) override { stopped = true; }
  void SendNoGradient(EdgeEnd edge, bool uncounted) override;
  void SendStart(WorkerRank to) override;
  void SendAck(WorkerRank to, uint32_t count) override;
  void SendAbort(WorkerRank to, const absl::Status& why) override;
  void Finish(const absl::Status& status) override;

  void LateReply(int recv) {
    recvs_.push_back(recv);
    pass.OnLateRecv({EdgeId(p_.send_of.at(recv)), Peer(recv)});
  }
  WorkerRank Peer(int n) const {
    auto it = p_.recv_of.find(n);
    return static_cast<WorkerRank>(
        p_.owner[it != p_.recv_of.end() ? it->second : p_.send_of.at(n)]);
  }

  bool engaged = false, stopped = false, finished = false;
  absl::Status status;
  std::set<int> unfed, got;
  std::map<uint64_t, bool> arrived;

 private:
  std::set<int> Reach(std::vector<int> stack) const {
    std::set<int> seen;
    while (!stack.empty()) {
      const int n = stack.back();
      stack.pop_back();
      if (seen.insert(n).second) stack.insert(stack.end(), p_.next[n].begin(), p_.next[n].end());
    }
    return seen;
  }
  void Arrive(int n, bool reached) {
    reached_[n] = reached_[n] || reached;
    if (--dependencies_[n] == 0) Run(n);
  }
  void Run(int n);

  Network* const net_;
  const Program& p_;
  const int me_;
  std::vector<int> sends_, recvs_;
  std::set<int> live_;
  std::map<int, int> dependencies_;
  std::map<int, bool> reached_;
  size_t left_ = 0;

 public:
  Pass pass;
};

class Network {
 public:
  Network(const Program& program, Order* order, bool fifo)
      : p_(program), order_(order), fifo_(fifo) {
    for (int w = 0; w < p_.workers; ++w) workers.push_back(std::make_unique<Worker>(this, &p_, w));
    for (int r : p_.late)
      flight_.push_back({Letter::kReply, p_.owner[p_.send_of.at(r)], p_.owner[r], uint64_t(r)});
  }

  void Post(Letter letter) {
    if (letter.kind == Letter::kAck) ++acks[{letter.from, letter.to}];
    if (lost.count(letter.from)) return;
    // What is sent to a lost worker tells the sender so, sooner or later.
    if (lost.count(letter.to)) letter = {Letter::kLost, letter.to, letter.from};
    flight_.push_back(letter);
  }
  bool Busy() const { return !flight_.empty(); }
  bool OnlyAcksAndReplies() const {
    return std::all_of(flight_.begin(), flight_.end(), [](const Letter& l) {
      return l.kind == Letter::kAck || l.kind == Letter::kReply ||
             l.kind == Letter::kUncountedNone || l.kind == Letter::kRelease;
    });
  }

  void Begin() { workers[p_.initiator]->pass.Begin(); }
  void Deliver() {
    int i = order_->Choose(static_cast<int>(flight_.size()));
    if (fifo_) {
      const auto [from, to] = std::pair(flight_[i].from, flight_[i].to);
      for (i = 0; flight_[i].from != from || flight_[i].to != to; ++i) {
      }
    }
    const Letter letter = flight_[i];
    flight_.erase(flight_.begin() + i);
    Worker& w = *workers[letter.to];
    const auto from = static_cast<WorkerRank>(letter.from);
    switch (letter.kind) {
      case Letter::kNone:
      case Letter::kUncountedNone:
      case Letter::kGradient:
      case Letter::kUncountedGradient:
        w.arrived[letter.value] |=
            letter.kind == Letter::kGradient || letter.kind == Letter::kUncountedGradient;
        return w.pass.OnEdge(
            from, letter.value,
            letter.kind == Letter::kUncountedNone || letter.kind == Letter::kUncountedGradient);
      case Letter::kStart:
        return w.pass.OnStart(from);
      case Letter::kAck:
        return w.pass.OnAck(from, static_cast<uint32_t>(letter.value));
      case Letter::kAbort:
        return w.pass.OnAbort(from, absl::AbortedError("injected"));
      case Letter::kLost:
        return w.pass.OnPeerLost(from, absl::UnavailableError("lost"));
      case Letter::kRelease:
        return Release(letter.to);
      case Letter::kReply:
        return w.LateReply(static_cast<int>(letter.value));
    }
  }
  void Lose(int worker) {
    lost.insert(worker);
    flight_.erase(
        std::remove_if(flight_.begin(), flight_.end(),
                       [&](const Letter& l) { return l.from == worker || l.to == worker; }),
        flight_.end());
    for (int w = 0; w < p_.workers; ++w) {
      if (w != worker)
        workers[w]->pass.OnPeerLost(static_cast<WorkerRank>(worker),
                                    absl::UnavailableError("lost"));
    }
  }

  // The context ends on a worker, which tells those it has edges with.
  void Release(int worker) {
    if (!released.insert(worker).second) return;
    workers[worker]->pass.Fail(absl::CancelledError("released"));
    for (auto [send, recv] : p_.recv_of) {
      const int a = p_.owner[send], b = p_.owner[recv];
      if (a != b && (a == worker || b == worker))
        Post({Letter::kRelease, worker, a == worker ? b : a});
    }
  }

  std::vector<std::unique_ptr<Worker>> workers;
  std::map<std::pair<int, int>, int> acks;
  std::set<int> lost, released;

 private:
  const Program& p_;
  Order* const order_;
  const bool fifo_;
  std::deque<Letter> flight_;
};

void Worker::Run(int n) {
  std::deque<int> todo{n};
  while (!todo.empty()) {
    n = todo.front();
    todo.pop_front();
    --left_;
    const bool reached = reached_[n];
    if (reached && p_.parameters.count(n)) got.insert(n);
    if (auto it = p_.send_of.find(n); it != p_.send_of.end()) {
      const bool counted = pass.CountGradient(Peer(n));
      net_->Post({reached ? (counted ? Letter::kGradient : Letter::kUncountedGradient)
                          : (counted ? Letter::kNone : Letter::kUncountedNone),
                  me_, Peer(n), uint64_t(it->second)});
    }
    for (int m : p_.next[n]) {
      reached_[m] = reached_[m] || reached;
      if (--dependencies_[m] == 0) todo.push_back(m);
    }
  }
}
void Worker::SendNoGradient(EdgeEnd edge, bool uncounted) {
  net_->Post({uncounted ? Letter::kUncountedNone : Letter::kNone, me_, edge.peer, edge.edge});
}
void Worker::SendStart(WorkerRank to) { net_->Post({Letter::kStart, me_, to}); }
void Worker::SendAck(WorkerRank to, uint32_t count) { net_->Post({Letter::kAck, me_, to, count}); }
void Worker::SendAbort(WorkerRank to, const absl::Status&) {
  net_->Post({Letter::kAbort, me_, to});
}
void Worker::Finish(const absl::Status& s) {
  EXPECT_FALSE(finished) << "finished twice";
  finished = true;
  status = s;
  if (s.ok() && me_ == p_.initiator) {
    EXPECT_TRUE(net_->OnlyAcksAndReplies()) << "ended with work in flight";
    for (const auto& w : net_->workers)
      EXPECT_TRUE(!w->engaged || w->unfed.empty()) << "ended before a worker";
  }
}

void CheckWhole(const Program& program, const Network& net) {
  EXPECT_TRUE(net.workers[program.initiator]->finished) << "the pass never ends";
  std::set<int> got;
  for (const auto& w : net.workers) {
    EXPECT_TRUE(!w->engaged || (w->finished && w->status.ok() && w->unfed.empty()))
        << "a worker waits";
    got.insert(w->got.begin(), w->got.end());
  }
  EXPECT_EQ(got, program.Wanted());
  if (program.late.empty()) {
    for (const auto& [pair, n] : net.acks) EXPECT_LE(n, 2) << "acknowledgements of a pair";
  }
}

TEST(PassTest, RandomProgramsInRandomOrders) {
  for (uint64_t seed = 0; seed < 4000 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Rng rng(seed);
    const Program program(rng, 1 + Below(rng, 6), 1 + Below(rng, 30), /*with_late=*/seed % 2 == 1);
    for (int order = 0; order < 4; ++order) {
      RandomOrder random(order);
      Network net(program, &random, /*fifo=*/order % 2 == 0);
      net.Begin();
      while (net.Busy()) net.Deliver();
      CheckWhole(program, net);
    }
  }
}

TEST(PassTest, SmallProgramsInEveryOrder) {
  int64_t orders = 0, whole = 0;
  for (uint64_t seed = 0; seed < 400 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Rng rng(seed);
    const Program program(rng, 2 + Below(rng, 2), 2 + Below(rng, 5), /*with_late=*/seed % 2 == 1);
    EveryOrder every;
    bool more = true;
    for (int i = 0; more && i < 2000 && !::testing::Test::HasFailure(); ++i, ++orders) {
      Network net(program, &every, /*fifo=*/false);
      net.Begin();
      while (net.Busy()) net.Deliver();
      CheckWhole(program, net);
      more = every.Next();
    }
    whole += !more;
  }
  EXPECT_GT(whole, 200) << "most of the programs should be small enough";
  RecordProperty("orders", std::to_string(orders));
}

enum class Fault { kThrow, kLoss, kRelease };

// Runs `steps` of the pass, has the fault happen, and the rest run. After it nobody keeps running:
// a worker is done, has failed, or never engaged. Returns whether there were so many steps.
bool CheckFault(const Program& program, Order* order, bool fifo, int steps, Fault fault,
                int victim) {
  Network net(program, order, fifo);
  net.Begin();
  for (; steps > 0 && net.Busy(); --steps) net.Deliver();
  if (steps > 0) return false;
  const bool was_running = net.workers[victim]->pass.running();
  switch (fault) {
    case Fault::kThrow:
      net.workers[victim]->pass.Fail(absl::InternalError("a node threw"));
      break;
    case Fault::kLoss:
      net.Lose(victim);
      break;
    case Fault::kRelease:
      net.Release(victim);
      break;
  }
  while (net.Busy()) net.Deliver();
  for (int w = 0; w < program.workers; ++w) {
    if (net.lost.count(w)) continue;
    Worker& worker = *net.workers[w];
    EXPECT_FALSE(worker.pass.running()) << "worker " << w << " waits for ever";
    if (worker.engaged) {
      EXPECT_EQ(worker.stopped, !worker.status.ok());
    }
  }
  Worker& initiator = *net.workers[program.initiator];
  if (!net.lost.count(program.initiator)) {
    EXPECT_TRUE(initiator.finished);
    if (was_running) {
      EXPECT_FALSE(initiator.status.ok());
    }
  }
  return true;
}

TEST(PassTest, FaultsAtEveryPointOfSmallPrograms) {
  for (uint64_t seed = 0; seed < 300 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Rng rng(seed);
    const Program program(rng, 2 + Below(rng, 3), 3 + Below(rng, 8), /*with_late=*/seed % 2 == 1);
    for (const Fault fault : {Fault::kThrow, Fault::kLoss, Fault::kRelease}) {
      for (int victim = 0; victim < program.workers; ++victim) {
        bool more = true;
        for (int steps = 0; more; ++steps) {
          SCOPED_TRACE(absl::StrCat("fault ", int(fault), " of ", victim, " after ", steps));
          RandomOrder random(seed);
          more = CheckFault(program, &random, /*fifo=*/seed % 4 < 2, steps, fault, victim);
        }
      }
    }
  }
}

TEST(PassTest, FaultsReachEveryone) {
  for (uint64_t seed = 0; seed < 6000 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Rng rng(seed);
    const Program program(rng, 2 + Below(rng, 5), 2 + Below(rng, 25), /*with_late=*/seed % 3 == 0);
    RandomOrder random(seed);
    const int steps = Below(rng, 20), victim = Below(rng, program.workers);
    CheckFault(program, &random, /*fifo=*/seed % 2 == 0, steps, Fault(Below(rng, 3)), victim);
  }
}

TEST(PassTest, AnAcknowledgementTooManyFailsThePass) {
  for (uint64_t seed = 1;; ++seed) {
    Rng rng(seed);
    const Program program(rng, 2, 12, false);
    RandomOrder random(1);
    Network net(program, &random, true);
    net.Begin();
    Worker& initiator = *net.workers[program.initiator];
    if (!initiator.pass.running()) continue;
    initiator.pass.OnAck(static_cast<WorkerRank>(1 - program.initiator), 1000);
    EXPECT_TRUE(initiator.finished);
    EXPECT_EQ(initiator.status.code(), absl::StatusCode::kInternal);
    return;
  }
}

TEST(PassTest, AGradientOfAWorkerThatIsNotAtTheEdgeFailsThePass) {
  for (uint64_t seed = 1;; ++seed) {
    Rng rng(seed);
    const Program program(rng, 3, 12, false);
    RandomOrder random(1);
    Network net(program, &random, true);
    net.Begin();
    Worker& initiator = *net.workers[program.initiator];
    if (!initiator.pass.running() || initiator.pass.Awaited().empty()) continue;
    const EdgeEnd awaited = initiator.pass.Awaited().front();
    WorkerRank stranger = 0;
    while (stranger == awaited.peer || stranger == WorkerRank(program.initiator)) ++stranger;
    // Of an edge that it does not have, or not yet, a message may come.
    initiator.pass.OnEdge(stranger, /*edge=*/12345, /*uncounted=*/false);
    EXPECT_FALSE(initiator.finished);
    initiator.pass.OnEdge(stranger, awaited.edge, /*uncounted=*/seed % 2 == 0);
    EXPECT_TRUE(initiator.finished);
    EXPECT_EQ(initiator.status.code(), absl::StatusCode::kInvalidArgument) << initiator.status;
    EXPECT_EQ(initiator.pass.peers().count(stranger), 1u) << "it hears of that";
    EXPECT_EQ(initiator.unfed.count(static_cast<int>(awaited.edge)), 1u);
    return;
  }
}

}  // namespace
}  // namespace distgrad
