// Traces of several workers, put together: whether a step's time can be followed through all.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/base/chrome_trace.h"
#include "tests/integration/team.h"
#include "tests/testing/trace_events.h"

namespace distgrad {
namespace {

constexpr int kWorkers = 3;

class TraceTest : public ::testing::TestWithParam<std::string> {
 protected:
  TraceTest() : team_(kWorkers, {.transport = GetParam()}) {}

  void Start(TraceOptions options = {}) {
    for (int w = 0; w < kWorkers; ++w) ASSERT_TRUE(team_[w].StartTrace(options).ok());
  }
  TraceEvents Stop() {
    std::vector<std::string> texts;
    for (int w = 0; w < kWorkers; ++w) texts.push_back(ToChromeTrace(*team_[w].StopTrace()));
    absl::StatusOr<TraceEvents> events = ReadTraces(texts);
    EXPECT_TRUE(events.ok()) << events.status();
    return *std::move(events);
  }
  static std::vector<const TraceSlice*> OfCategory(const TraceEvents& events,
                                                   const std::string& category) {
    std::vector<const TraceSlice*> found;
    for (const TraceSlice& slice : events.slices)
      if (slice.category == category && slice.depth == 0) found.push_back(&slice);
    return found;
  }

  Team team_;
};

TEST_P(TraceTest, AStepThroughThreeWorkers) {
  const at::Tensor w1 = Leaf({4, 4}, 1), w2 = Leaf({4, 4}, 2), x = Leaf({8, 4}, 3);
  ASSERT_TRUE(team_[2]
                  .Register("back",
                            [&](Request& request) -> absl::StatusOr<Message> {
                              return Message{"", {request.message.tensors[0].mm(w2)}};
                            })
                  .ok());
  ASSERT_TRUE(team_[1]
                  .Register("middle",
                            [&](Request& request) -> absl::StatusOr<Message> {
                              return team_[1].Call(2, "back",
                                                   {"", {request.message.tensors[0].mm(w1)}},
                                                   request.Nested());
                            })
                  .ok());
  const absl::Time before = absl::Now();
  Start();
  Context context = team_[0].NewContext();
  const absl::StatusOr<Message> reply =
      team_[0].Call(1, "middle", {"", {x}}, {.context = &context});
  ASSERT_TRUE(reply.ok()) << reply.status();
  const absl::Status done = context.Backward({reply->tensors[0].sum()});
  ASSERT_TRUE(done.ok()) << done;
  const TraceEvents events = Stop();
  const absl::Time after = absl::Now();

  const std::string id = std::to_string(context.id());
  const auto made = OfCategory(events, "client"), served = OfCategory(events, "server");
  ASSERT_EQ(made.size(), 2u);
  ASSERT_EQ(served.size(), 2u);
  for (const TraceSlice* call : made) {
    EXPECT_EQ(call->args.at("context"), id);
    const TraceSlice* other = OtherEnd(events, *call);
    ASSERT_NE(other, nullptr) << call->name;
    EXPECT_EQ(other->name, call->name);
    EXPECT_EQ(other->args.at("peer"), call->process);
    EXPECT_EQ(call->args.at("peer"), other->process);
    EXPECT_EQ(other->args.at("context"), id);
    EXPECT_EQ(other->args.at("bytes_received"), call->args.at("bytes_sent"));
    EXPECT_EQ(other->args.at("bytes_sent"), call->args.at("bytes_received"));
    // They share the machine's clock. In whole microseconds, and each worker's its own steady one.
    constexpr int64_t kRounding = 1000;
    EXPECT_GE(other->begin, call->begin - kRounding);
    EXPECT_LE(other->end, call->end + kRounding);
    EXPECT_GE(call->begin, absl::ToUnixMicros(before) - kRounding);
    EXPECT_LE(call->end, absl::ToUnixMicros(after) + kRounding);
  }
  EXPECT_EQ(std::count_if(events.slices.begin(), events.slices.end(),
                          [](const TraceSlice& s) { return s.name == "handler" && s.depth == 1; }),
            2);
  // The nested call lies in the handler that made it.
  const TraceSlice* inner = made[0]->name == "back" ? made[0] : made[1];
  const TraceSlice* outer = made[0]->name == "back" ? made[1] : made[0];
  EXPECT_GE(inner->begin, OtherEnd(events, *outer)->begin);
  EXPECT_LE(inner->end, OtherEnd(events, *outer)->end);

  const auto passes = OfCategory(events, "pass");
  ASSERT_EQ(passes.size(), 3u) << "on all workers, as soon as the initiator is through";
  for (int w = 0; w < kWorkers; ++w) {
    EXPECT_EQ(passes[w]->process, WorkerName(w));
    EXPECT_EQ(passes[w]->args.at("initiator"), WorkerName(0));
    EXPECT_EQ(passes[w]->args.at("context"), id);
    EXPECT_EQ(passes[w]->args.at("pass"), passes[0]->args.at("pass"));
  }
  // Each of the three ran nodes, as part of its pass.
  const auto nodes = OfCategory(events, "nodes");
  for (const TraceSlice* pass : passes) {
    EXPECT_TRUE(std::any_of(nodes.begin(), nodes.end(), [&](const TraceSlice* run) {
      return run->process == pass->process && run->args.at("pass") == pass->args.at("pass") &&
             run->begin >= pass->begin && run->end <= pass->end;
    })) << pass->process;
  }
}

TEST_P(TraceTest, ErrorsStandWhereTheyWere) {
  const at::Tensor x = Leaf({2}, 1);
  Start();
  Context context = team_[0].NewContext();
  EXPECT_FALSE(team_
                   .Try(0, 1, {.context = &context},
                        [](Tensors, Request&) { return absl::DataLossError("no such luck"); }, {x})
                   .ok());
  const at::Tensor y = team_.Run(0, 1, context,
                                 [](Tensors in, Request&) {
                                   at::Tensor squared = in[0].square();
                                   squared.register_hook([](const at::Tensor&) -> at::Tensor {
                                     throw std::runtime_error("the hook fails");
                                   });
                                   return Tensors{squared};
                                 },
                                 {x})[0];
  EXPECT_FALSE(context.Backward({y.sum()}).ok());
  team_.AwaitQuiet(/*contexts=*/1);
  const TraceEvents events = Stop();
  int failed = 0;
  for (const TraceSlice& slice : events.slices) {
    if (slice.args.count("error") == 0) continue;
    ++failed;
    const std::string& error = slice.args.at("error");
    EXPECT_TRUE(error.find(slice.category == "client" || slice.category == "server"
                               ? "no such luck"
                               : "the hook fails") != std::string::npos)
        << slice.category << ": " << error;
  }
  // The call at both ends, the pass at both, and the nodes that failed.
  EXPECT_EQ(failed, 5);
}

TEST_P(TraceTest, OffAgainAndAgain) {
  EXPECT_EQ(team_[0].StopTrace().status().code(), absl::StatusCode::kFailedPrecondition);
  const auto run = [&] {
    Context context = team_[0].NewContext();
    team_.Run(0, 1, context, [](Tensors in, Request&) { return in; }, {Leaf({2}, 1)});
  };
  run();
  Start();
  EXPECT_EQ(team_[0].StartTrace().code(), absl::StatusCode::kFailedPrecondition);
  run();
  EXPECT_EQ(OfCategory(Stop(), "client").size(), 1u);
  run();
  // Too small for anything: what is missing is said.
  Start({.max_bytes = 1});
  run();
  const TraceEvents events = Stop();
  EXPECT_TRUE(events.slices.empty());
  EXPECT_EQ(events.dropped, (std::vector<uint64_t>{1, 1, 0}));
  ASSERT_EQ(events.notes.size(), 2u);
  EXPECT_EQ(events.notes[0], "1 spans more did not fit into the trace");
}

INSTANTIATE_TEST_SUITE_P(All, TraceTest, ::testing::Values("inproc", "socket"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace distgrad
