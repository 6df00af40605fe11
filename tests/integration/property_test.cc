// Random programs over one to five workers, and one that joins later, whose gradients must be those
// of the same program in one process. A program calls forth and back between workers, nested and
// at the same time, ignores some results, keeps tensors on a worker for a later call, writes to
// what it has sent, hooks tensors and nodes, and runs backward anywhere, also within a backward.
// property_program.h has its steps.
//
//   property_test --seeds=5000 --delays --first=1 --features=5
//
// --features is a set of Features, to look for the cause of a failure: with fewer of them a seed
// means the same program without their steps. --delays holds packets of inproc up at random. A seed
// that fails is printed, with the smallest part of its program that still fails. DISTGRAD_SEEDS in
// the environment is --seeds.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "core/membership/store/in_process_store.h"
#include "tests/integration/property_frame.h"
#include "tests/integration/property_program.h"
#include "tests/testing/cluster.h"
#include "tests/testing/forwarding_store.h"

namespace distgrad {
namespace {

int seeds = 200;
uint64_t first_seed = 0;
bool delays = false;
unsigned features = kAllFeatures;

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

// Gives no answer while somebody holds `look_ups`.
class SlowStore final : public ForwardingStore {
 public:
  explicit SlowStore(absl::Mutex* look_ups)
      : ForwardingStore(NewInProcessStore()), look_ups_(*look_ups) {}

  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    { absl::MutexLock lock(&look_ups_); }
    return ForwardingStore::GetEach(keys, deadline);
  }

 private:
  absl::Mutex& look_ups_;
};

// Threads that each call the others from one of the workers, in a mode of its own, to the end of
// the scope.
class SendersInOtherModes {
 public:
  explicit SendersInOtherModes(Cluster* cluster) {
    for (int worker = 0; worker < cluster->size(); ++worker) {
      threads_.emplace_back([this, cluster, worker] { Send(*cluster, worker); });
    }
  }
  ~SendersInOtherModes() {
    over_ = true;
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  void Send(Cluster& cluster, int worker) {
    std::optional<c10::InferenceMode> inference;
    std::optional<at::NoGradGuard> no_grad;
    switch (worker % 3) {
      case 0:
        inference.emplace();
        break;
      case 1:
        at::autocast::set_autocast_enabled(at::kCPU, true);
        at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
        break;
      default:
        no_grad.emplace();
    }
    while (!over_) {
      std::vector<Future<Message>> replies;
      for (int i = 1; i < cluster.size(); ++i) {
        replies.push_back(
            cluster[worker].CallAsync(WorkerName((worker + i) % cluster.size()), "ignore", {}));
      }
      for (const Future<Message>& reply : replies) {
        EXPECT_TRUE(reply.Wait().ok()) << reply.Wait().status();
      }
    }
  }

  std::atomic<bool> over_{false};
  std::vector<std::thread> threads_;
};

class PropertyTest : public ::testing::TestWithParam<std::string> {
 protected:
  PropertyTest() {
    if (delays && GetParam() == "inproc") faults_ = std::make_shared<Delays>();
    cluster_ =
        std::make_unique<Cluster>(ClusterOptions{.workers = kWorkers,
                                                 .transport = GetParam(),
                                                 .faults = faults_,
                                                 .store = std::make_shared<SlowStore>(&look_ups_)});
    if (faults_ != nullptr) {
      releaser_ = std::thread([this] {
        std::mt19937_64 random(2);
        do {
          // More may pile up behind what is held.
          for (uint64_t i = random() % 200; i > 0; --i) std::this_thread::yield();
          cluster_->network().ReleaseHeld();
        } while (faults_->AwaitHeld());
      });
    }
    at::manual_seed(1);
    for (int w = 0; w <= kNewcomer; ++w) {
      parameters_.emplace_back();
      for (int i = 0; i < kParameters; ++i)
        parameters_[w].push_back(at::randn({2, 2}, at::kDouble).set_requires_grad(true));
    }
    for (int w = 0; w < kWorkers; ++w) {
      Worker& worker = (*cluster_)[w];
      EXPECT_TRUE(DistributedFrame::Register(worker, w).ok());
      EXPECT_TRUE(
          worker.Register("ignore", [](Request&) -> absl::StatusOr<Message> { return Message{}; })
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

  // What is wrong with the distributed run; empty if nothing.
  std::string Check(const Steps& program, absl::Duration patience) {
    auto run = std::make_unique<std::pair<Steps, State>>();
    run->first = program;
    State local, &distributed = run->second;
    local.parameters = distributed.parameters = parameters_;
    distributed.broken = broken_;
    distributed.look_ups = &look_ups_;
    LocalFrame(&local, 0).Run(run->first, {}, {});
    RunDistributed(run->first, patience, &distributed);
    std::string wrong = Difference(run->first, local, distributed);
    // Some of it may still be in flight.
    absl::MutexLock lock(&mu_);
    if (!wrong.empty()) failed_.push_back(std::move(run));
    return wrong;
  }
  void RunDistributed(const Steps& program, absl::Duration patience, State* run) {
    const absl::Time deadline = absl::Now() + patience;
    Worker& worker = (*cluster_)[0];
    std::unique_ptr<Worker> newcomer;
    if (CallsNewcomer(program)) {
      run->newcomer = absl::StrCat("newcomer", ++newcomers_);
      newcomer = cluster_->Join(run->newcomer);
      EXPECT_TRUE(DistributedFrame::Register(*newcomer, kNewcomer).ok());
    }
    {
      const Context context = worker.NewContext();
      const CallOptions options{.context = &context, .deadline = deadline};
      DistributedFrame(run, 0, &worker, options).Run(program, {}, {});
      for (int w = 0; w <= kNewcomer; ++w) {
        if (w == kNewcomer && newcomer == nullptr) continue;
        const absl::Status taken = DistributedFrame::TakeGradients(
            worker, w == kNewcomer ? run->newcomer : WorkerName(w), context, run);
        if (!taken.ok()) run->Fail(taken);
      }
    }
    if (newcomer == nullptr) return;
    const absl::Status left = newcomer->Leave(deadline);
    if (!left.ok()) run->Fail(left);
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

  absl::Mutex look_ups_;
  std::shared_ptr<Delays> faults_;
  std::unique_ptr<Cluster> cluster_;
  std::thread releaser_;
  std::vector<Tensors> parameters_;
  bool broken_ = false;
  std::atomic<int> newcomers_{0};
  absl::Mutex mu_;
  std::vector<std::unique_ptr<std::pair<Steps, State>>> failed_ ABSL_GUARDED_BY(mu_);
};

TEST_P(PropertyTest, GradientsAreThoseOfOneProcess) {
  for (uint64_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    const Steps program = RandomProgram(seed, features);
    const std::string wrong = Check(program, absl::Seconds(30));
    if (wrong.empty()) continue;
    const Steps small = Shrink(program, absl::Seconds(2));
    FAIL() << "seed " << seed << ": " << wrong << "\nthe smallest part that fails:\n"
           << Text(small) << Check(small, absl::Seconds(2));
  }
}

// If one operator is wrong on workers that are called, a program finds out, and what is left of it
// is a call of that operator, what it needs, and a backward.
TEST_P(PropertyTest, AnErrorIsFoundAndShrunk) {
  broken_ = true;
  int found = 0;
  for (uint64_t seed = first_seed; found < 3 && seed < first_seed + 200; ++seed) {
    const Steps program = RandomProgram(seed, features);
    if (Check(program, absl::Seconds(30)).empty()) continue;
    ++found;
    const Steps small = Shrink(program, absl::Seconds(30));
    EXPECT_FALSE(Check(small, absl::Seconds(30)).empty()) << Text(small);
    EXPECT_LE(CountSteps(small), 40) << "seed " << seed << ", of " << CountSteps(program) << ":\n"
                                     << Text(small);
    const std::string text = Text(small);
    EXPECT_TRUE(absl::StrContains(text, "call") || absl::StrContains(text, "async")) << text;
  }
  EXPECT_EQ(found, 3);
}

// The same programs in several contexts at once, which share workers and parameters.
TEST_P(PropertyTest, ContextsAtOnce) {
  for (uint64_t seed = first_seed; seed < first_seed + seeds / 8; ++seed) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([this, seed, t] {
        const Steps program = RandomProgram(seed * 3 + t, features);
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

// Each worker but the first computes something at the same time, and multiplies.
Steps FanOut() {
  Steps steps = {{Step::kParameter}};
  for (int w = 1; w < kWorkers; ++w)
    steps.push_back({Step::kAsync, w, 0, 0, {0}, {1}, {{Step::kOp, 0, 0, 1}}});
  steps.push_back({Step::kJoin});
  for (int w = 1; w < kWorkers; ++w) steps.push_back({Step::kOperator, 0, 0, w});
  steps.push_back({Step::kBackward, 0, 0, 0, {1, 2, 3, 4, 5, 6, 7, 8}});
  return steps;
}

// What other threads send, in modes of theirs, changes nothing.
TEST_P(PropertyTest, WhileOthersSendInOtherModes) {
  if ((features & kSendersInOtherModes) == 0) GTEST_SKIP() << "--features is without it";
  const SendersInOtherModes senders(cluster_.get());
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([this, t] {
      // Small ones too, for many messages in little time.
      const auto check = [&](const std::string& name, const Steps& program) {
        const std::string wrong = Check(program, absl::Seconds(30));
        EXPECT_TRUE(wrong.empty()) << name << ": " << wrong << "\n" << Text(program);
      };
      for (uint64_t seed = first_seed; seed < first_seed + seeds; ++seed) {
        if (t == 0) check(absl::StrCat("seed ", seed), RandomProgram(seed, features));
        check(absl::StrCat("round ", seed), FanOut());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(Transports, PropertyTest, ::testing::Values("inproc", "socket"),
                         [](const auto& info) { return info.param; });

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
    } else if (absl::ConsumePrefix(&argument, "--features=")) {
      if (!absl::SimpleAtoi(argument, &distgrad::features)) return 2;
    }
  }
  return RUN_ALL_TESTS();
}
