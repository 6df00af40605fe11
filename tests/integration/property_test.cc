// Random programs over one to five workers, whose gradients must be those of the same program in
// one process. A program calls forth and back between workers, nested and at the same time,
// ignores some results, keeps tensors on a worker for a later call, and runs backward anywhere.
//
//   property_test --seeds=5000 --delays --first=1
//
// --delays holds packets up at random. A seed that fails is printed, with the smallest part of its
// program that still fails. DISTGRAD_SEEDS in the environment is --seeds.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "tests/testing/cluster.h"

namespace distgrad {
namespace {

int seeds = 200;
uint64_t first_seed = 0;
bool delays = false;

constexpr int kWorkers = 5;
constexpr int kParameters = 2;  // of each worker
using Tensors = std::vector<at::Tensor>;

// ------------------------------------------------------------------------------------ Programs

struct Step {
  enum Kind { kOp, kParameter, kConstant, kCall, kAsync, kJoin, kKeep, kFetch, kBackward } kind;
  int a = 0, b = 0, c = 0;  // which values (modulo how many there are), worker, operator, ...
  std::vector<int> arguments = {}, results = {};  // kCall, kAsync; kBackward: the roots
  std::vector<Step> body = {};
};
using Steps = std::vector<Step>;

class Generator {
 public:
  explicit Generator(uint64_t seed) : random_(seed), workers_(1 + Below(kWorkers)) {}

  Steps Main() {
    Steps steps = Body(5 + Below(12), 0, /*alone=*/true);
    steps.push_back({Step::kBackward, Below(3) == 0, 0, 0, Places(1 + Below(3)), {}, {}});
    return steps;
  }

 private:
  int Below(int n) { return static_cast<int>(random_() % n); }
  std::vector<int> Places(int n) {
    std::vector<int> places(n);
    for (int& place : places) place = Below(64);
    return places;
  }
  // `alone`: no other call is under way, so the order of what has side effects is certain.
  Steps Body(int size, int depth, bool alone) {
    Steps steps;
    if (Below(3) == 0) steps.push_back({Step::kParameter, Below(64)});
    for (int i = 0; i < size; ++i) {
      const int dice = Below(100);
      if (dice < 40) {
        steps.push_back({Step::kOp, Below(64), Below(64), Below(6)});
      } else if (dice < 52) {
        steps.push_back({Step::kParameter, Below(64)});
      } else if (dice < 56) {
        steps.push_back({Step::kConstant, Below(64)});
      } else if (dice < 82 && depth < 4) {
        const bool async = Below(3) == 0;
        steps.push_back({async ? Step::kAsync : Step::kCall, Below(workers_), 0, 0,
                         Places(Below(4)), Places(Below(4)),
                         Body(Below(6), depth + 1, alone && !async)});
      } else if (dice < 87) {
        steps.push_back({Step::kJoin});
      } else if (alone && dice < 91) {
        steps.push_back({Step::kKeep, Below(64)});
      } else if (alone && dice < 95) {
        steps.push_back({Step::kFetch, Below(64)});
      } else if (alone) {
        steps.push_back({Step::kBackward, /*retain_graph=*/1, 0, 0, Places(1 + Below(2)), {}, {}});
      }
    }
    return steps;
  }

  std::mt19937_64 random_;
  const int workers_;
};

std::string Text(const Steps& steps, int indent = 1) {
  static const char* const kNames[] = {"op",   "parameter", "constant", "call",    "async",
                                       "join", "keep",      "fetch",    "backward"};
  std::string text;
  for (const Step& s : steps) {
    absl::StrAppend(&text, std::string(2 * indent, ' '), kNames[s.kind], " ", s.a, " ", s.b, " ",
                    s.c, " (", absl::StrJoin(s.arguments, " "), ") -> (",
                    absl::StrJoin(s.results, " "), ")\n", Text(s.body, indent + 1));
  }
  return text;
}

// ------------------------------------------------------------------------------------- Running

// What a worker does for one call: in one process, or over the network.
class Frame {
 public:
  virtual ~Frame() = default;
  virtual Tensors Call(const Step& call, Tensors arguments) = 0;
  virtual void CallAsync(const Step& call, Tensors arguments) = 0;
  virtual Tensors Join() = 0;
  virtual at::Tensor Parameter(int i) = 0;
  virtual Tensors& Kept() = 0;
  virtual void Backward(const Tensors& roots, bool retain_graph) = 0;

  Tensors Run(const Steps& steps, const std::vector<int>& results, Tensors values) {
    for (const Step& s : steps) {
      const auto value = [&](int i) { return values[i % values.size()]; };
      const auto some = [&](const std::vector<int>& places) {
        Tensors some;
        for (int i : places) {
          if (!values.empty()) some.push_back(value(i));
        }
        return some;
      };
      const auto add = [&](const Tensors& more) {
        values.insert(values.end(), more.begin(), more.end());
      };
      switch (s.kind) {
        case Step::kOp:
          if (!values.empty()) {
            at::Tensor a = value(s.a);
            if (s.c == kBrokenOp && Broken()) a = a * 2;
            values.push_back(Apply(s.c, a, value(s.b)));
          }
          break;
        case Step::kParameter:
          values.push_back(Parameter(s.a % kParameters));
          break;
        case Step::kConstant:
          values.push_back(at::full({2, 2}, s.a * 0.01, at::kDouble));
          break;
        case Step::kCall:
          add(Call(s, some(s.arguments)));
          break;
        case Step::kAsync:
          CallAsync(s, some(s.arguments));
          break;
        case Step::kJoin:
          add(Join());
          break;
        case Step::kKeep:
          if (!values.empty()) Kept().push_back(value(s.a));
          break;
        case Step::kFetch:
          if (!Kept().empty()) values.push_back(Kept()[s.a % Kept().size()]);
          break;
        case Step::kBackward: {
          Tensors roots;
          for (const at::Tensor& v : some(s.arguments)) {
            if (v.requires_grad()) roots.push_back(at::sin(v).sum());
          }
          if (!roots.empty()) Backward(roots, s.a != 0);
          break;
        }
      }
    }
    Join();
    Tensors out;
    for (int i : results) {
      if (!values.empty()) out.push_back(values[i % values.size()]);
    }
    return out;
  }

 protected:
  // Whether the run is to be wrong, so that it can be seen that it is found out.
  static constexpr int kBrokenOp = 2;
  virtual bool Broken() { return false; }

 private:
  static at::Tensor Apply(int op, const at::Tensor& a, const at::Tensor& b) {
    switch (op) {
      case 0:
        return a + b;
      case 1:
        return at::tanh(a * b);
      case 2:
        return at::tanh(a.mm(b));
      case 3:
        return at::maximum(a, b);
      case 4:
        return at::relu(a) - b.t();
      default:
        return (a > 0).to(at::kDouble);  // requires no grad
    }
  }
};

// The state of one run of a program.
struct State {
  std::vector<Tensors> parameters;  // by worker
  std::vector<Tensors> kept = std::vector<Tensors>(kWorkers);
  std::map<std::pair<int, int>, at::Tensor> gradients;  // by worker and parameter
  bool broken = false;

  absl::Mutex mu;
  absl::Status status ABSL_GUARDED_BY(mu);  // the first error
  void Fail(const absl::Status& error) {
    absl::MutexLock lock(&mu);
    if (status.ok()) status = error;
  }
};

class LocalFrame : public Frame {
 public:
  LocalFrame(State* run, int worker) : run_(*run), worker_(worker) {}
  Tensors Call(const Step& call, Tensors arguments) override {
    for (at::Tensor& argument : arguments) argument = argument.view_as(argument);
    return LocalFrame(&run_, call.a).Run(call.body, call.results, std::move(arguments));
  }
  void CallAsync(const Step& call, Tensors arguments) override {
    for (at::Tensor& result : Call(call, std::move(arguments))) pending_.push_back(result);
  }
  Tensors Join() override { return std::exchange(pending_, {}); }
  at::Tensor Parameter(int i) override { return run_.parameters[worker_][i]; }
  Tensors& Kept() override { return run_.kept[worker_]; }
  void Backward(const Tensors& roots, bool) override {
    Tensors leaves;
    for (const Tensors& parameters : run_.parameters)
      leaves.insert(leaves.end(), parameters.begin(), parameters.end());
    const Tensors gradients = torch::autograd::grad(roots, leaves, {}, /*retain_graph=*/true,
                                                    /*create_graph=*/false, /*allow_unused=*/true);
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) continue;
      at::Tensor& sum = run_.gradients[{static_cast<int>(i) / kParameters, i % kParameters}];
      sum = sum.defined() ? sum + gradients[i] : gradients[i];
    }
  }

 private:
  State& run_;
  const int worker_;
  Tensors pending_;
};

// What a call carries: it stays in this process.
struct Order {
  State* run;
  const Step* call;
};

class DistributedFrame : public Frame {
 public:
  DistributedFrame(State* run, Worker* worker, CallOptions options)
      : run_(*run), worker_(*worker), options_(options) {}
  Tensors Call(const Step& call, Tensors arguments) override {
    return Take(Start(call, std::move(arguments)));
  }
  void CallAsync(const Step& call, Tensors arguments) override {
    pending_.push_back(Start(call, std::move(arguments)));
  }
  Tensors Join() override {
    Tensors results;
    for (Future<Message>& reply : std::exchange(pending_, {})) {
      for (at::Tensor& result : Take(std::move(reply))) results.push_back(result);
    }
    return results;
  }
  at::Tensor Parameter(int i) override { return run_.parameters[worker_.id()][i]; }
  Tensors& Kept() override { return run_.kept[worker_.id()]; }
  // On a worker that was called.
  bool Broken() override { return run_.broken && worker_.id() != 0; }
  void Backward(const Tensors& roots, bool retain_graph) override {
    const absl::Status done = options_.context->Backward(
        roots, {.retain_graph = retain_graph, .deadline = options_.deadline});
    if (!done.ok()) run_.Fail(done);
  }

 private:
  Future<Message> Start(const Step& call, Tensors arguments) {
    const Order order{&run_, &call};
    std::string payload(sizeof(order), '\0');
    std::memcpy(payload.data(), &order, sizeof(order));
    return worker_.CallAsync(WorkerName(call.a), "run", {payload, std::move(arguments)}, options_);
  }
  Tensors Take(Future<Message> reply) {
    absl::StatusOr<Message> message = reply.Take();
    if (message.ok()) return std::move(message->tensors);
    run_.Fail(message.status());
    return {};
  }

  State& run_;
  Worker& worker_;
  const CallOptions options_;
  std::vector<Future<Message>> pending_;
};

// Holds packets up at random; a thread lets them go again.
class Delays : public FaultInjector {
 public:
  Action OnSend(const std::string&, const std::string&, Packet&) override {
    absl::MutexLock lock(&mu_);
    if (over_ || random_() % 5 != 0) return Action::kDeliver;
    ++held_;
    return Action::kHold;
  }
  // False when it is over.
  bool AwaitHeld() {
    absl::MutexLock lock(&mu_);
    // Not for ever: a packet is held just after it was counted here.
    mu_.AwaitWithTimeout(
        absl::Condition(
            +[](Delays* d) ABSL_SHARED_LOCKS_REQUIRED(d->mu_) { return d->held_ > 0 || d->over_; },
            this),
        absl::Milliseconds(1));
    held_ = 0;
    return !over_;
  }
  void End() {
    absl::MutexLock lock(&mu_);
    over_ = true;
  }

 private:
  absl::Mutex mu_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mu_){1};
  int held_ ABSL_GUARDED_BY(mu_) = 0;
  bool over_ ABSL_GUARDED_BY(mu_) = false;
};

class PropertyTest : public ::testing::Test {
 protected:
  PropertyTest() {
    if (delays) faults_ = std::make_shared<Delays>();
    cluster_ = std::make_unique<Cluster>(ClusterOptions{.workers = kWorkers, .faults = faults_});
    if (delays) {
      releaser_ = std::thread([this] {
        std::mt19937_64 random(2);
        do {
          // More may pile up behind what is held.
          for (uint64_t i = random() % 200; i > 0; --i) std::this_thread::yield();
          cluster_->network().ReleaseHeld();
        } while (faults_->AwaitHeld());
      });
    }
    for (int w = 0; w < kWorkers; ++w) {
      Tensors parameters;
      for (int i = 0; i < kParameters; ++i)
        parameters.push_back(at::randn({2, 2}, at::kDouble).set_requires_grad(true));
      parameters_.push_back(parameters);
      Worker& worker = (*cluster_)[w];
      EXPECT_TRUE(worker
                      .Register("run",
                                [&worker](Request& r) -> absl::StatusOr<Message> {
                                  Order order;
                                  std::memcpy(&order, r.message.payload.data(), sizeof(order));
                                  DistributedFrame frame(order.run, &worker, r.Nested());
                                  return Message{"",
                                                 frame.Run(order.call->body, order.call->results,
                                                           std::move(r.message.tensors))};
                                })
                      .ok());
      EXPECT_TRUE(worker
                      .Register("gradients",
                                [&worker](Request& r) -> absl::StatusOr<Message> {
                                  Order order;
                                  std::memcpy(&order, r.message.payload.data(), sizeof(order));
                                  Take(r.context, worker.id(), order.run);
                                  return Message{};
                                })
                      .ok());
    }
  }
  ~PropertyTest() override {
    if (faults_ != nullptr) {
      faults_->End();
      releaser_.join();
      cluster_->network().ReleaseHeld();
    }
    cluster_.reset();
  }

  static void Take(const Context& context, int worker, State* run) {
    absl::MutexLock lock(&run->mu);
    for (int i = 0; i < kParameters; ++i) {
      const auto gradient = context.Gradient(run->parameters[worker][i]);
      if (gradient.ok()) run->gradients[{worker, i}] = *gradient;
    }
  }

  // What is wrong with the distributed run; empty if nothing.
  std::string Check(const Steps& program, absl::Duration patience) {
    auto run = std::make_unique<std::pair<Steps, State>>();
    run->first = program;
    run->second.parameters = parameters_;
    run->second.broken = broken_;
    std::string wrong = Check(run->first, patience, run->second);
    // Some of it may still be under way.
    absl::MutexLock lock(&mu_);
    if (!wrong.empty()) failed_.push_back(std::move(run));
    return wrong;
  }
  std::string Check(const Steps& program, absl::Duration patience, State& distributed) {
    State local;
    local.parameters = parameters_;
    LocalFrame(&local, 0).Run(program, {}, {});
    {
      Context context = (*cluster_)[0].NewContext();
      const CallOptions options{.context = &context, .deadline = absl::Now() + patience};
      DistributedFrame(&distributed, &(*cluster_)[0], options).Run(program, {}, {});
      absl::Status status;
      {
        absl::MutexLock lock(&distributed.mu);
        status = distributed.status;
      }
      if (!status.ok()) return status.ToString();
      for (int w = 0; w < kWorkers; ++w) {
        const Order order{&distributed, nullptr};
        std::string payload(sizeof(order), '\0');
        std::memcpy(payload.data(), &order, sizeof(order));
        const auto taken =
            (*cluster_)[0].Call(WorkerName(w), "gradients", {payload, {}}, {.context = &context});
        if (!taken.ok()) return taken.status().ToString();
      }
    }
    for (int w = 0; w < kWorkers; ++w) {
      for (int i = 0; i < kParameters; ++i) {
        const at::Tensor want = local.gradients[{w, i}], got = distributed.gradients[{w, i}];
        const std::string what = absl::StrCat("parameter ", i, " of worker ", w);
        if (want.defined() != got.defined())
          return absl::StrCat(what, got.defined() ? " has a gradient" : " has no gradient");
        if (want.defined() && !at::allclose(got, want, 1e-9, 1e-12))
          return absl::StrCat("the gradient of ", what, " is wrong");
      }
    }
    return "";
  }

  // Makes the program smaller for as long as it fails; one that takes longer has failed too.
  Steps Shrink(Steps program, absl::Duration patience) {
    for (bool shrunk = true; shrunk;) {
      shrunk = false;
      std::vector<Steps> smaller = Smaller(program);
      for (size_t i = 0; i < smaller.size();) {
        if (Check(smaller[i], patience).empty()) {
          ++i;
          continue;
        }
        program = std::move(smaller[i]);
        smaller = Smaller(program);
        shrunk = true;
      }
    }
    return program;
  }
  // All programs with one step less; then those with one value less that is passed on; then those
  // in which one number is 0, since most say which of the values there are is meant.
  static std::vector<Steps> Smaller(const Steps& steps) {
    std::vector<Steps> smaller, fewer, simpler;
    for (size_t i = 0; i < steps.size(); ++i) {
      const auto with = [&](auto change) {
        Steps changed = steps;
        change(changed[i]);
        return changed;
      };
      smaller.push_back(steps);
      smaller.back().erase(smaller.back().begin() + static_cast<ptrdiff_t>(i));
      for (const auto list : {&Step::arguments, &Step::results}) {
        for (size_t k = 0; k < (steps[i].*list).size(); ++k) {
          fewer.push_back(with(
              [&](Step& s) { (s.*list).erase((s.*list).begin() + static_cast<ptrdiff_t>(k)); }));
          if ((steps[i].*list)[k] != 0) simpler.push_back(with([&](Step& s) { (s.*list)[k] = 0; }));
        }
      }
      for (const auto number : {&Step::a, &Step::b}) {
        if (steps[i].*number != 0) simpler.push_back(with([&](Step& s) { s.*number = 0; }));
      }
      for (Steps& body : Smaller(steps[i].body))
        fewer.push_back(with([&](Step& s) { s.body = std::move(body); }));
    }
    for (auto* more : {&fewer, &simpler}) smaller.insert(smaller.end(), more->begin(), more->end());
    return smaller;
  }

  std::shared_ptr<Delays> faults_;
  std::unique_ptr<Cluster> cluster_;
  std::thread releaser_;
  std::vector<Tensors> parameters_;
  bool broken_ = false;
  absl::Mutex mu_;
  std::vector<std::unique_ptr<std::pair<Steps, State>>> failed_ ABSL_GUARDED_BY(mu_);
};

TEST_F(PropertyTest, GradientsAreThoseOfOneProcess) {
  for (uint64_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    const Steps program = Generator(seed).Main();
    const std::string wrong = Check(program, absl::Seconds(30));
    if (wrong.empty()) continue;
    const Steps small = Shrink(program, absl::Seconds(2));
    FAIL() << "seed " << seed << ": " << wrong << "\nthe smallest part that fails:\n"
           << Text(small) << Check(small, absl::Seconds(2));
  }
}

int CountSteps(const Steps& steps) {
  int count = 0;
  for (const Step& step : steps) count += 1 + CountSteps(step.body);
  return count;
}

// If one operator is wrong on workers that are called, a program finds out, and what is left of it
// is a call of that operator, what it needs, and a backward.
TEST_F(PropertyTest, AnErrorIsFoundAndShrunk) {
  broken_ = true;
  int found = 0;
  for (uint64_t seed = first_seed; found < 3 && seed < first_seed + 200; ++seed) {
    const Steps program = Generator(seed).Main();
    if (Check(program, absl::Seconds(30)).empty()) continue;
    ++found;
    const Steps small = Shrink(program, absl::Seconds(30));
    EXPECT_FALSE(Check(small, absl::Seconds(30)).empty()) << Text(small);
    EXPECT_LE(CountSteps(small), 12) << "seed " << seed << ", of " << CountSteps(program) << ":\n"
                                     << Text(small);
    EXPECT_NE(Text(small).find("call"), std::string::npos) << Text(small);
  }
  EXPECT_EQ(found, 3);
}

// The same programs in several contexts at once, which share workers and parameters.
TEST_F(PropertyTest, ContextsAtOnce) {
  for (uint64_t seed = first_seed; seed < first_seed + seeds / 8; ++seed) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([this, seed, t] {
        const Steps program = Generator(seed * 3 + t).Main();
        const std::string wrong = Check(program, absl::Seconds(30));
        EXPECT_TRUE(wrong.empty())
            << "seeds " << seed * 3 << " to " << seed * 3 + 2 << ", " << t << ": " << wrong << "\n"
            << Text(program);
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const char* from_environment = std::getenv("DISTGRAD_SEEDS");
  if (from_environment != nullptr) {
    if (!absl::SimpleAtoi(from_environment, &distgrad::seeds)) return 2;
  }
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (argument == "--delays") {
      distgrad::delays = true;
    } else if (absl::ConsumePrefix(&argument, "--seeds=")) {
      if (!absl::SimpleAtoi(argument, &distgrad::seeds)) return 2;
    } else if (absl::ConsumePrefix(&argument, "--first=")) {
      if (!absl::SimpleAtoi(argument, &distgrad::first_seed)) return 2;
    }
  }
  return RUN_ALL_TESTS();
}
