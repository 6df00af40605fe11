// Writes the spans of a trace as JSON, in rows that do not overlap.
#include "core/base/chrome_trace.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <queue>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace distgrad {
namespace {

using Kind = TraceSpan::Kind;

// What stands in a string. Not UTF-8: functions are named by whoever calls.
std::string Escaped(absl::string_view text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      absl::StrAppend(&escaped, "\\", absl::string_view(&c, 1));
    } else if (c == '\n') {
      absl::StrAppend(&escaped, "\\n");
    } else {
      escaped += c < 0x20 || c > 0x7e ? '?' : c;
    }
  }
  return escaped;
}

// In whole microseconds: as a double, which is what JSON's readers make of it, a time of today has
// not much more, and what is nested stays so when it is rounded.
int64_t Micros(absl::Time time) { return absl::ToUnixMicros(time); }

// The same at both ends of a call, and unlikely to be that of another one.
uint64_t FlowOf(WorkerRank caller, Incarnation incarnation, uint64_t call) {
  uint64_t flow = 0;
  for (const uint64_t part : {uint64_t{caller}, incarnation, call}) {
    // The finalizer of MurmurHash3 (A. Appleby): each bit of the input changes half of the
    // output's.
    flow ^= part + 0x9e3779b97f4a7c15;
    flow = (flow ^ (flow >> 33)) * 0xff51afd7ed558ccd;
    flow = (flow ^ (flow >> 33)) * 0xc4ceb9fe1a85ec53;
    flow ^= flow >> 33;
  }
  return flow;
}

// The first row of a kind; those below it take what overlaps.
constexpr int kRows = 100'000;
// The first row of spans that are the caller's own.
constexpr int kOwnRows = 10 * kRows;
struct KindNames {
  absl::string_view row;
  absl::string_view category;
};
KindNames NamesOf(Kind kind) {
  switch (kind) {
    case Kind::kCallMade:
      return {"client calls", "client"};
    case Kind::kCallServed:
      return {"server calls", "server"};
    case Kind::kPass:
      return {"passes", "pass"};
    case Kind::kNodes:
      return {"nodes of passes", "nodes"};
  }
  return {};
}

// Gives each span, by its begin, the first row that is free then. Not thread-safe.
class Rows {
 public:
  int Take(int64_t begin, int64_t end) {
    while (!taken_.empty() && taken_.top().first <= begin) {
      free_.insert(taken_.top().second);
      taken_.pop();
    }
    if (free_.empty()) free_.insert(count_++);
    const int row = free_.extract(free_.begin()).value();
    taken_.emplace(end, row);
    return row;
  }
  int count() const { return count_; }

 private:
  using Taken = std::pair<int64_t, int>;  // until when, and which

  std::priority_queue<Taken, std::vector<Taken>, std::greater<Taken>> taken_;
  std::set<int> free_;
  int count_ = 0;
};

// Appends the events of one trace. Not thread-safe.
class Writer {
 public:
  Writer(const Trace& trace, std::string* out)
      : trace_(trace), pid_(absl::StrCat(trace.rank + 1)), out_(out) {}

  void Write(const std::vector<RowSpan>& more) {
    absl::StrAppend(out_, R"({"displayTimeUnit":"ms","otherData":{"worker":")",
                    Escaped(trace_.worker), R"(","rank":)", trace_.rank, R"(,"incarnation":")",
                    trace_.incarnation, R"(","dropped_spans":)", trace_.dropped,
                    "},\"traceEvents\":[\n");
    Meta("process_name", 0, Quoted("name", trace_.worker));
    Meta("process_sort_index", 0, absl::StrCat("\"sort_index\":", trace_.rank));
    std::vector<const TraceSpan*> spans;
    for (const TraceSpan& span : trace_.spans) spans.push_back(&span);
    std::sort(spans.begin(), spans.end(),
              [](const TraceSpan* a, const TraceSpan* b) { return a->begin < b->begin; });
    for (const TraceSpan* span : spans) WriteSpan(*span);
    for (const auto& [kind, rows] : rows_) {
      for (int row = 0; row < rows.count(); ++row) {
        const int tid = Tid(kind, row);
        Meta("thread_name", tid, Quoted("name", NamesOf(kind).row));
        Meta("thread_sort_index", tid, absl::StrCat("\"sort_index\":", tid));
      }
    }
    WriteRows(more);
    if (trace_.dropped > 0) {
      Event("i", absl::StrCat(trace_.dropped, " spans more did not fit into the trace"), "trace",
            Tid(Kind::kCallMade, 0), Micros(trace_.end), R"(,"s":"p")");
    }
    absl::StrAppend(out_, "\n]}\n");
  }

 private:
  static int Tid(Kind kind, int row) { return static_cast<int>(kind) * kRows + row + 1; }
  static std::string Quoted(absl::string_view key, absl::string_view value) {
    return absl::StrCat("\"", key, "\":\"", Escaped(value), "\"");
  }

  void WriteRows(const std::vector<RowSpan>& spans) {
    std::map<std::string, int> tids;
    for (const RowSpan& span : spans) {
      const int tid =
          tids.try_emplace(span.row, kOwnRows + static_cast<int>(tids.size())).first->second;
      std::string args;
      for (const auto& [key, value] : span.args) {
        absl::StrAppend(&args, args.empty() ? "" : ",", Quoted(key, value));
      }
      const int64_t begin = Micros(span.begin);
      Slice(span.name, Escaped(span.category), tid, begin, std::max(begin, Micros(span.end)), args);
    }
    for (const auto& [row, tid] : tids) {
      Meta("thread_name", tid, Quoted("name", row));
      Meta("thread_sort_index", tid, absl::StrCat("\"sort_index\":", tid));
    }
  }

  void WriteSpan(const TraceSpan& span) {
    const int64_t begin = Micros(span.begin), end = std::max(begin, Micros(span.end));
    const int tid = Tid(span.kind, rows_[span.kind].Take(begin, end));
    const bool is_call = span.kind == Kind::kCallMade || span.kind == Kind::kCallServed;
    const auto peer = trace_.names.find(span.peer);
    std::string args = Quoted(is_call ? "peer" : "initiator",
                              peer == trace_.names.end() ? absl::StrCat(span.peer) : peer->second);
    // Ids are text: they have more bits than a double.
    if (span.context != 0) absl::StrAppend(&args, ",\"context\":\"", span.context, "\"");
    if (span.pass != 0) absl::StrAppend(&args, ",\"pass\":\"", span.pass, "\"");
    if (is_call) {
      absl::StrAppend(&args, ",\"call\":", span.call, ",\"bytes_sent\":", span.bytes_sent,
                      ",\"bytes_received\":", span.bytes_received);
    }
    if (!span.status.ok()) {
      absl::StrAppend(&args, ",", Quoted("error", span.status.ToString()));
    }
    const absl::string_view category = NamesOf(span.kind).category;
    Slice(is_call                    ? span.function
          : span.kind == Kind::kPass ? "backward"
                                     : "nodes",
          category, tid, begin, end, args);
    if (is_call && span.call != 0) {
      const bool made = span.kind == Kind::kCallMade;
      const uint64_t flow = made ? FlowOf(trace_.rank, trace_.incarnation, span.call)
                                 : FlowOf(span.peer, span.incarnation, span.call);
      Event(made ? "s" : "f", "call", "call", tid, begin,
            absl::StrCat(",\"id\":\"0x", absl::Hex(flow, absl::kZeroPad16), "\"",
                         made ? "" : ",\"bp\":\"e\""));
    }
    if (span.kind != Kind::kCallServed) return;
    const int64_t work = std::clamp(Micros(std::min(span.work, span.end)), begin, end);
    if (work > begin) Slice("queue", category, tid, begin, work, "");
    if (span.work <= span.end) Slice("handler", category, tid, work, end, "");
  }

  void Slice(absl::string_view name, absl::string_view category, int tid, int64_t begin,
             int64_t end, absl::string_view args) {
    Event("X", name, category, tid, begin,
          absl::StrCat(",\"dur\":", end - begin, ",\"args\":{", args, "}"));
  }
  void Event(absl::string_view phase, absl::string_view name, absl::string_view category, int tid,
             int64_t at, absl::string_view rest) {
    Begin(phase, name, tid);
    absl::StrAppend(out_, ",\"cat\":\"", category, "\",\"ts\":", at, rest, "}");
  }
  void Meta(absl::string_view name, int tid, absl::string_view args) {
    Begin("M", name, tid);
    absl::StrAppend(out_, ",\"args\":{", args, "}}");
  }
  void Begin(absl::string_view phase, absl::string_view name, int tid) {
    absl::StrAppend(out_, is_first_ ? "" : ",\n", "{\"ph\":\"", phase, "\",\"name\":\"",
                    Escaped(name), "\",\"pid\":", pid_, ",\"tid\":", tid);
    is_first_ = false;
  }

  const Trace& trace_;
  const std::string pid_;  // 0 is the idle process to Perfetto
  std::string* const out_;
  std::map<Kind, Rows> rows_;
  bool is_first_ = true;
};

}  // namespace

std::string ToChromeTrace(const Trace& trace, const std::vector<RowSpan>& more) {
  std::string text;
  Writer(trace, &text).Write(more);
  return text;
}

}  // namespace distgrad
