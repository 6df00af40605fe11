// The JSON of a trace: slices, flows and rows, and names that a peer may have chosen.
#include "core/base/chrome_trace.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "tests/testing/trace_events.h"

namespace distgrad {
namespace {

using Kind = TraceSpan::Kind;

// A time of today: with more digits than a float has.
absl::Time At(double us) { return absl::FromUnixSeconds(1'800'000'000) + absl::Microseconds(us); }

Trace NewTrace(WorkerRank rank, std::string worker) {
  return {.worker = std::move(worker),
          .rank = rank,
          .incarnation = 100u + rank,
          .names = {{0, "front"}, {1, "back"}}};
}

std::vector<std::string> NamesOf(const TraceEvents& events) {
  std::vector<std::string> names;
  for (const TraceSlice& slice : events.slices)
    names.push_back(absl::StrCat(slice.thread, "/", slice.name));
  return names;
}

TEST(ChromeTraceTest, BothEndsOfACall) {
  Trace front = NewTrace(0, "front"), back = NewTrace(1, "back");
  front.spans.push_back({.kind = Kind::kCallMade,
                         .peer = 1,
                         .function = "square",
                         .call = 7,
                         .context = uint64_t{3} << 60,
                         .bytes_sent = 10,
                         .bytes_received = 20,
                         .begin = At(100),
                         .end = At(200)});
  back.spans.push_back({.kind = Kind::kCallServed,
                        .peer = 0,
                        .function = "square",
                        .call = 7,
                        .incarnation = 100,
                        .bytes_sent = 20,
                        .bytes_received = 10,
                        .begin = At(120),
                        .work = At(130),
                        .end = At(190)});
  const absl::StatusOr<TraceEvents> events =
      ReadTraces({ToChromeTrace(front), ToChromeTrace(back)});
  ASSERT_TRUE(events.ok()) << events.status();
  EXPECT_EQ(NamesOf(*events),
            (std::vector<std::string>{"client calls/square", "server calls/square",
                                      "server calls/queue", "server calls/handler"}));
  const TraceSlice& made = events->slices[0];
  const TraceSlice& served = events->slices[1];
  EXPECT_EQ(made.process, "front");
  EXPECT_EQ(made.begin, absl::ToUnixMicros(At(100)));
  EXPECT_EQ(made.end - made.begin, 100);
  EXPECT_EQ(made.args, (std::map<std::string, std::string>{{"peer", "back"},
                                                           {"call", "7"},
                                                           {"context", "3458764513820540928"},
                                                           {"bytes_sent", "10"},
                                                           {"bytes_received", "20"}}));
  EXPECT_EQ(served.process, "back");
  EXPECT_EQ(served.args.at("peer"), "front");
  EXPECT_FALSE(made.flow.empty());
  EXPECT_EQ(OtherEnd(*events, made), &served);
  EXPECT_EQ(OtherEnd(*events, served), &made);
  EXPECT_EQ(events->slices[2].end, absl::ToUnixMicros(At(130)));
  EXPECT_EQ(events->slices[2].depth, 1);
  EXPECT_EQ(events->slices[3].begin, absl::ToUnixMicros(At(130)));
  EXPECT_EQ(events->slices[3].end, served.end);
}

TEST(ChromeTraceTest, FlowsAreOfOneCallOfOneIncarnation) {
  Trace trace = NewTrace(0, "front");
  const auto served = [&](WorkerRank from, Incarnation incarnation, uint64_t call) {
    trace.spans.push_back(
        {.kind = Kind::kCallServed, .peer = from, .call = call, .incarnation = incarnation});
  };
  served(1, 5, 7);
  served(1, 5, 8);
  served(1, 6, 7);
  served(2, 5, 7);
  served(1, 5, 7);
  // Its own calls have its own incarnation.
  trace.spans.push_back({.kind = Kind::kCallMade, .call = 7});
  // Without a number: it never left.
  trace.spans.push_back({.kind = Kind::kCallMade, .call = 0});
  const absl::StatusOr<TraceEvents> events = ReadTraces({ToChromeTrace(trace)});
  ASSERT_TRUE(events.ok()) << events.status();
  std::map<std::string, int> flows;
  for (const TraceSlice& slice : events->slices) ++flows[slice.flow];
  EXPECT_EQ(flows.size(), 6u);
  EXPECT_EQ(flows[""], 1);
}

TEST(ChromeTraceTest, WhatOverlapsGetsRowsOfItsOwn) {
  Trace trace = NewTrace(0, "front");
  const auto add = [&](Kind kind, double begin, double end) {
    trace.spans.push_back({.kind = kind,
                           .function = absl::StrCat(begin),
                           .context = 1,
                           .pass = 2,
                           .begin = At(begin),
                           .work = At(begin + 0.3),
                           .end = At(end)});
  };
  // In the order of their ends, as they are recorded.
  add(Kind::kCallServed, 10, 20);
  add(Kind::kCallServed, 20, 25);  // fits behind the first
  add(Kind::kCallServed, 15, 30);
  add(Kind::kCallServed, 12, 40);
  add(Kind::kCallServed, 40.2, 40.4);  // less than what can be told
  add(Kind::kCallServed, 40.5, 40.6);
  add(Kind::kPass, 5, 50);
  add(Kind::kNodes, 10, 20);
  const std::string text = ToChromeTrace(trace);
  const absl::StatusOr<TraceEvents> events = ReadTraces({text});
  ASSERT_TRUE(events.ok()) << events.status() << "\n" << text;
  int rows = 0;
  for (size_t at = 0; (at = text.find("thread_name", at)) != std::string::npos; ++at) ++rows;
  EXPECT_EQ(rows, 3 + 1 + 1) << text;
  int outer = 0;
  for (const TraceSlice& slice : events->slices) {
    outer += slice.args.size() > 0;
    if (slice.category == "pass") {
      EXPECT_EQ(slice.args, (std::map<std::string, std::string>{
                                {"initiator", "front"}, {"context", "1"}, {"pass", "2"}}));
    }
  }
  EXPECT_EQ(outer, 8);
}

TEST(ChromeTraceTest, WhatNeverBeganHasNoHandler) {
  Trace trace = NewTrace(0, "front");
  trace.spans.push_back({.kind = Kind::kCallServed,
                         .function = "f",
                         .begin = At(1),
                         .end = At(5),
                         .status = absl::CancelledError("gone")});
  const absl::StatusOr<TraceEvents> events = ReadTraces({ToChromeTrace(trace)});
  ASSERT_TRUE(events.ok()) << events.status();
  EXPECT_EQ(NamesOf(*events), (std::vector<std::string>{"server calls/f", "server calls/queue"}));
  EXPECT_EQ(events->slices[0].args.at("error"), "CANCELLED: gone");
  EXPECT_EQ(events->slices[1].end, events->slices[0].end);
}

TEST(ChromeTraceTest, TextOfPeersIsHarmless) {
  std::string bytes;
  for (int c = 0; c < 256; ++c) bytes += static_cast<char>(c);
  Trace trace = NewTrace(0, bytes);
  trace.spans.push_back({.peer = 9, .function = bytes, .status = absl::InternalError(bytes)});
  const absl::StatusOr<TraceEvents> events = ReadTraces({ToChromeTrace(trace)});
  ASSERT_TRUE(events.ok()) << events.status();
  const std::string& name = events->slices[0].name;
  ASSERT_EQ(name.size(), 256u);
  for (int c = 0; c < 256; ++c)
    EXPECT_EQ(name[c], (c >= 0x20 && c < 0x7f) || c == '\n' ? static_cast<char>(c) : '?') << c;
  EXPECT_EQ(events->slices[0].process, name);
  EXPECT_EQ(events->slices[0].args.at("error"), "INTERNAL: " + name);
  EXPECT_EQ(events->slices[0].args.at("peer"), "9") << "whom nobody knows";
}

TEST(ChromeTraceTest, SaysWhatIsMissing) {
  Trace trace = NewTrace(0, "front");
  absl::StatusOr<TraceEvents> events = ReadTraces({ToChromeTrace(trace)});
  ASSERT_TRUE(events.ok()) << events.status();
  EXPECT_TRUE(events->slices.empty());
  EXPECT_TRUE(events->notes.empty());
  EXPECT_EQ(events->dropped, std::vector<uint64_t>{0});
  trace.dropped = 12;
  events = ReadTraces({ToChromeTrace(trace)});
  ASSERT_TRUE(events.ok()) << events.status();
  EXPECT_EQ(events->dropped, std::vector<uint64_t>{12});
  EXPECT_EQ(events->notes, std::vector<std::string>{"12 spans more did not fit into the trace"});
}

}  // namespace
}  // namespace distgrad
