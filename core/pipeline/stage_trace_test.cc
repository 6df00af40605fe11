// What is recorded of a step: each action of each rank's list, in its order, with its times.
#include "core/pipeline/stage_trace.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/schedule.h"
#include "core/pipeline/stages.h"
#include "tests/testing/cluster.h"
#include "tests/testing/fail_allocation.h"
#include "tests/testing/trace_events.h"

namespace distgrad {
namespace {

using Tensors = std::vector<at::Tensor>;

TEST(StageTraceTest, HasEachActionOfEachRank) {
  Cluster cluster({.workers = 2, .thread_count = 1});
  const Schedule schedule = *ZeroBubbleH1(2, 3);
  const at::Tensor weight = at::ones({1}).requires_grad_(true);
  std::vector<StageTrace> traces(2);
  std::vector<std::unique_ptr<PipelineStages>> stages;
  for (int s = 0; s < 2; ++s) {
    stages.push_back(*PipelineStages::Create(
        &cluster[s], "model",
        {{s,
          {.forward = [&](Tensors in) -> Tensors { return {in[0] * weight}; },
           .loss = [](Tensors out, Tensors) { return out[0].sum(); },
           .targets = 0}}},
        {.on_action = traces[s].Recorder()}));
  }
  const auto pipeline = *Pipeline::Create(
      &cluster[0],
      {.name = "model", .workers = {WorkerName(0), WorkerName(1)}, .schedule = schedule});
  const absl::Time begin = absl::Now();
  for (int step = 0; step < 2; ++step) {
    const Context context = cluster[0].NewContext();
    ASSERT_EQ(pipeline->Train(context, {at::ones({3, 1})}, {}).status(), absl::OkStatus());
  }
  const absl::Time end = absl::Now();
  stages.clear();

  std::vector<std::string> texts;
  for (int s = 0; s < 2; ++s) {
    const std::vector<RowSpan> spans = traces[s].Take();
    ASSERT_EQ(spans.size(), 2 * schedule.lists[s].size());
    for (size_t i = 0; i < spans.size(); ++i) {
      const Action& action = schedule.lists[s][i % schedule.lists[s].size()];
      const std::map<std::string, std::string> args(spans[i].args.begin(), spans[i].args.end());
      EXPECT_EQ(args.at("stage"), absl::StrCat(action.stage));
      EXPECT_EQ(args.at("micro_batch"), absl::StrCat(action.micro_batch));
      EXPECT_TRUE(absl::StartsWith(spans[i].name, args.at("action")));
      EXPECT_EQ(spans[i].row, absl::StrCat("pipeline, rank ", s));
      EXPECT_LE(i == 0 ? begin : spans[i - 1].end, spans[i].begin);
      EXPECT_LE(spans[i].begin, spans[i].end);
      EXPECT_LE(spans[i].end, end);
    }
    EXPECT_TRUE(traces[s].Take().empty());
    texts.push_back(
        ToChromeTrace({.worker = WorkerName(s), .rank = static_cast<WorkerRank>(s)}, spans));
  }
  const absl::StatusOr<TraceEvents> events = ReadTraces(texts);
  ASSERT_TRUE(events.ok()) << events.status();
  EXPECT_EQ(events->slices.size(), 2 * (schedule.lists[0].size() + schedule.lists[1].size()));
  for (const TraceSlice& slice : events->slices) {
    EXPECT_EQ(slice.category, "pipeline");
    EXPECT_TRUE(absl::StartsWith(slice.thread, "pipeline, rank ")) << slice.thread;
  }
}

TEST(StageTraceTest, KeepsTheFirstSpans) {
  StageTrace trace(/*max_spans=*/2);
  const auto record = trace.Recorder();
  for (int m = 0; m < 3; ++m) record({.action = {Action::Kind::kForward, 0, m}});
  EXPECT_EQ(trace.dropped(), 1U);
  const std::vector<RowSpan> spans = trace.Take();
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[1].name, "forward 1");
}

// Who trains has not asked for the trace, or not at this price.
TEST(StageTraceTest, DropsWhatThereIsNoMemoryFor) {
  StageTrace trace;
  const auto record = trace.Recorder();
  FailAllocation(0);
  record({.action = {Action::Kind::kForward, 0, 0}});
  EXPECT_TRUE(FailAllocation(-1));
  record({.action = {Action::Kind::kForward, 0, 1}});
  EXPECT_EQ(trace.dropped(), 1U);
  EXPECT_EQ(trace.Take().size(), 1U);
}

TEST(StageTraceTest, AStepFailsWithWhatTheRecorderThrows) {
  Cluster cluster({.workers = 1, .thread_count = 1});
  const at::Tensor weight = at::ones({1}).requires_grad_(true);
  const auto stages = *PipelineStages::Create(
      &cluster[0], "model",
      {{0,
        {.forward = [&](Tensors in) -> Tensors { return {in[0] * weight}; },
         .loss = [](Tensors out, Tensors) { return out[0].sum(); },
         .targets = 0}}},
      {.on_action = [](const StageSpan&) { throw std::runtime_error("the disk is full"); }});
  const auto pipeline = *Pipeline::Create(
      &cluster[0], {.name = "model", .workers = {WorkerName(0)}, .schedule = *GPipe(1, 1)});
  const Context context = cluster[0].NewContext();
  const absl::Status status = pipeline->Train(context, {at::ones({3, 1})}, {}).status();
  EXPECT_TRUE(absl::StrContains(status.message(), "the disk is full")) << status;
}

}  // namespace
}  // namespace distgrad
