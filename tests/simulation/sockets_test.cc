// Bytes over sockets that break, and the store's server and clients over them, by the seed.
#include "tests/simulation/sockets.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "core/base/deadline.h"
#include "core/membership/store/tcp_store.h"
#include "core/net/socket.h"
#include "tests/simulation/runner.h"
#include "tests/simulation/runner_tests.h"
#include "tests/simulation/scheduler.h"

namespace distgrad::simulation {
namespace {

constexpr int kServer = 1, kFirstClient = 2;  // processes

Runner* runner = nullptr;

class SocketsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kCanSimulate) GTEST_SKIP() << "a sanitizer has functions of its own in place of libc's";
  }
};

Deadline Soon() { return Deadline::After(absl::Minutes(10)); }

// What one end sends is what the other one receives, up to its end.
std::string Bytes() {
  SetSocketOptions({.slow_one_in = 10, .split_one_in = 2});
  Socket listener = Socket::Listen("127.0.0.1", 0).value();
  const uint16_t port = listener.LocalPort().value();
  std::string sent;
  for (int i = 0; i < 300000; ++i) sent.push_back(static_cast<char>(Draw()));
  std::thread sender([&] {
    Socket socket = Socket::Connect("127.0.0.1", port, Soon()).value();
    absl::string_view rest = sent;
    while (!rest.empty()) {
      const size_t size = std::min<size_t>(rest.size(), 1 + Draw() % 50000);
      if (!socket.Send(rest.substr(0, size), Deadline::Never()).ok()) return;
      rest.remove_prefix(size);
    }
  });
  pollfd entry = {listener.fd(), POLLIN, 0};
  if (poll(&entry, 1, 60000) != 1) return "nobody connects";
  Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  std::string received(sent.size(), '\0');
  const absl::Status status = socket.Receive(received.data(), received.size(), Deadline::Never());
  sender.join();
  char more;
  const absl::Status end = socket.Receive(&more, 1, Soon());
  if (!status.ok()) return status.ToString();
  if (received != sent) return "something else is received";
  return absl::IsUnavailable(end) ? "" : absl::StrCat("behind the end: ", end.ToString());
}

// Several processes count by one store, and wait for each other, while connections break, and while
// now and then one is cut off for longer than its client waits for an answer. Nothing is lost,
// nothing is done twice, and nobody hears of it.
std::string Count(uint32_t break_one_in) {
  constexpr int kClients = 3, kAdditions = 15;
  SetSocketOptions({.break_one_in = break_one_in,
                    .refuse_one_in = break_one_in,
                    .slow_one_in = 10,
                    .split_one_in = 3});
  std::unique_ptr<TcpStore> server;
  {
    const InProcess in_process(kServer);
    server = NewTcpStore({.is_server = true, .deadline = Soon()}).value();
  }
  std::mutex mu;
  std::set<int64_t> sums;
  std::string wrong;
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; ++i) {
    threads.emplace_back([&, i] {
      const InProcess in_process(kFirstClient + i);
      const auto fail = [&](absl::string_view what, const absl::Status& status) {
        std::lock_guard<std::mutex> lock(mu);
        if (wrong.empty()) wrong = absl::StrCat("client ", i, ", ", what, ": ", status.ToString());
      };
      const auto client = NewTcpStore({.port = server->port(), .deadline = Soon()});
      if (!client.ok()) return fail("connecting", client.status());
      const std::string own = absl::StrCat("own", i),
                        next = absl::StrCat("own", (i + 1) % kClients);
      Store::Value seen;
      int there = -1;  // as a number
      for (int k = 0; k < kAdditions; ++k) {
        const auto sum = (*client)->Add("n", 1, Soon());
        if (!sum.ok()) return fail("adding", sum.status());
        {
          std::lock_guard<std::mutex> lock(mu);
          sums.insert(*sum);
        }
        const absl::Status set = (*client)->Set(own, absl::StrCat(k), Soon());
        if (!set.ok()) return fail("setting", set);
        while (there < k) {
          const auto values = (*client)->AwaitChange({&next, 1}, {&seen, 1}, Soon());
          if (!values.ok()) return fail("waiting", values.status());
          if ((*values)[0] == seen) return fail("waiting", absl::DeadlineExceededError("in vain"));
          seen = (*values)[0];
          if (!absl::SimpleAtoi(*seen, &there)) return fail("reading", absl::DataLossError(*seen));
        }
        if (k % 5 == 4) {
          const std::string gone = absl::StrCat("gone", i);
          const absl::Status deleted = (*client)->Delete(gone, Soon());
          if (!deleted.ok()) return fail("deleting", deleted);
        }
      }
    });
  }
  for (int i = 0; i < 6; ++i) {
    absl::SleepFor(absl::Milliseconds(Draw() % 2000));
    CutOffSockets(kFirstClient + static_cast<int>(Draw() % kClients),
                  Now() + static_cast<int64_t>(Draw() % 8000) * 1000000);
  }
  for (std::thread& thread : threads) thread.join();
  CalmSockets();
  if (!wrong.empty()) return wrong;
  if (sums.size() != kClients * kAdditions || *sums.rbegin() != kClients * kAdditions) {
    return absl::StrCat(sums.size(), " sums, up to ", *sums.rbegin());
  }
  return "";
}

// One that is cut off hears nothing until that is over, then goes on; one that is killed is gone.
std::string CutOff() {
  std::unique_ptr<TcpStore> server;
  {
    const InProcess in_process(kServer);
    server = NewTcpStore({.is_server = true, .deadline = Soon()}).value();
  }
  const InProcess in_process(kFirstClient);
  const auto client = NewTcpStore({.port = server->port(), .deadline = Soon()}).value();
  const auto hours = [](int64_t from) { return static_cast<double>(Now() - from) / 3.6e12; };
  int64_t from = Now();
  CutOffSockets(kFirstClient, Now() + int64_t{3600} * 1000000000);
  const absl::Status early = client->Set("key", "early", Soon());
  if (!absl::IsDeadlineExceeded(early)) return absl::StrCat("while cut off: ", early.ToString());
  const absl::Status late = client->Set("key", "late", Deadline::After(absl::Hours(2)));
  if (!late.ok()) return absl::StrCat("when that is over: ", late.ToString());
  if (hours(from) < 1 || hours(from) > 1.01) return absl::StrCat("after ", hours(from), " hours");
  from = Now();
  KillSockets(kFirstClient, /*silently=*/true);
  const absl::Status dead = client->Set("key", "dead", Deadline::After(absl::Hours(2)));
  if (!absl::IsUnavailable(dead)) return absl::StrCat("when killed: ", dead.ToString());
  if (hours(from) > 0.01) return absl::StrCat("which takes ", hours(from), " hours");
  const auto value = server->Get("key", Soon());
  return value.ok() ? (*value == "late" ? "" : *value) : value.status().ToString();
}

std::string Scenario(absl::string_view order, Course* course) {
  const std::vector<absl::string_view> words = absl::StrSplit(order, ' ');
  Schedule schedule;
  if (!absl::SimpleAtoi(words[1], &schedule.seed)) return "no seed";
  schedule.preempt_one_in = 8;
  schedule.spurious_one_in = 50;
  Begin(schedule);
  std::string result = "no such scenario";
  if (words[0] == "bytes") result = Bytes();
  if (words[0] == "count") result = Count(1000);
  if (words[0] == "breaks") result = Count(20);
  if (words[0] == "storm") result = Count(5);
  if (words[0] == "cut") result = CutOff();
  if (result.empty() && OpenSockets() > 0) result = absl::StrCat(OpenSockets(), " are left");
  *course = End();
  return result;
}

TEST_F(SocketsTest, EverySeed) {
  for (const char* const name : {"bytes", "count", "breaks", "storm", "cut"}) {
    for (int seed = 0; seed < 100; ++seed) {
      const Outcome outcome = runner->Run(absl::StrCat(name, " ", seed));
      EXPECT_EQ(outcome.wrong, "") << name << ", seed " << seed << "\n" << outcome.printed;
    }
  }
}

TEST_F(SocketsTest, TheSameSeedGivesTheSameCourse) {
  for (int seed = 0; seed < 5; ++seed) {
    const std::string order = absl::StrCat("breaks ", seed);
    EXPECT_EQ(runner->Run(order).course.hash, runner->Run(order).course.hash) << order;
  }
}

}  // namespace
}  // namespace distgrad::simulation

int main(int argc, char** argv) {
  namespace simulation = distgrad::simulation;
  return simulation::RunTests(
      argc, argv, simulation::Scenario, [] {}, &simulation::runner);
}
