// Writes metrics in Prometheus' text format.
#include "core/worker/metrics.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace distgrad {
namespace {

// As a label's value: functions are named by whoever calls.
std::string Escaped(absl::string_view text) {
  std::string escaped = absl::StrReplaceAll(text, {{"\\", "\\\\"}, {"\"", "\\\""}, {"\n", "\\n"}});
  // A scraper refuses what is not UTF-8, and with it everything else.
  for (char& c : escaped) {
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) c = '?';
  }
  return escaped;
}

std::string NameOf(const WorkerMetrics& metrics, WorkerRank worker) {
  const auto found = metrics.names.find(worker);
  return found == metrics.names.end() ? absl::StrCat(worker) : found->second;
}

// Appends the families of one worker. Not thread-safe.
class Writer {
 public:
  Writer(const WorkerMetrics& metrics, std::string* out)
      : metrics_(metrics), worker_(Escaped(metrics.worker)), out_(out) {}

  void Begin(absl::string_view name, absl::string_view type, absl::string_view help) {
    name_ = name;
    absl::StrAppend(out_, "# HELP distgrad_", name, " ", help, "\n# TYPE distgrad_", name, " ",
                    type, "\n");
  }
  template <typename Value>
  void Sample(absl::string_view labels, Value value) {
    absl::StrAppend(out_, "distgrad_", name_, "{worker=\"", worker_, "\"", labels, "} ", value,
                    "\n");
  }

  // One sample for each of the calls of one way (or of both).
  template <typename Get>
  void Calls(absl::string_view name, absl::string_view type, absl::string_view help, Get get) {
    Begin(name, type, help);
    for (const CallStats& call : metrics_.calls) {
      Sample(absl::StrCat(",peer=\"", Escaped(NameOf(metrics_, call.peer)), "\",function=\"",
                          Escaped(call.function), "\",side=\"", call.served ? "server" : "client",
                          "\""),
             get(call));
    }
  }

 private:
  const WorkerMetrics& metrics_;
  const std::string worker_;
  std::string* const out_;
  absl::string_view name_;
};

}  // namespace

std::string ToPrometheus(const WorkerMetrics& metrics) {
  std::string text;
  Writer writer(metrics, &text);
  using Call = const CallStats&;
  writer.Calls("calls_total", "counter", "Calls begun.", [](Call c) { return c.calls; });
  writer.Calls("call_errors_total", "counter", "Calls that ended with an error.",
               [](Call c) { return c.errors; });
  writer.Calls("calls_in_flight", "gauge", "Calls that have not ended.",
               [](Call c) { return c.in_flight; });
  writer.Calls("call_sent_bytes_total", "counter", "Bytes of messages sent, tensors included.",
               [](Call c) { return c.bytes_sent; });
  writer.Calls("call_received_bytes_total", "counter",
               "Bytes of messages received, tensors included.",
               [](Call c) { return c.bytes_received; });
  writer.Calls("call_queue_seconds_total", "counter",
               "Time that served calls waited for their handler to begin.",
               [](Call c) { return absl::ToDoubleSeconds(c.queue_time); });
  writer.Calls("call_seconds_total", "counter",
               "Time in handlers (served), or until the answer (made), of calls that ended.",
               [](Call c) { return absl::ToDoubleSeconds(c.run_time); });
  writer.Begin("queued_bytes", "gauge", "Bytes that wait to be sent.");
  for (const auto& [peer, bytes] : metrics.queued_bytes) {
    writer.Sample(absl::StrCat(",peer=\"", Escaped(NameOf(metrics, peer)), "\""), bytes);
  }
  writer.Begin("contexts", "gauge", "Contexts that are open.");
  writer.Sample("", metrics.contexts);
  writer.Begin("passes_total", "counter", "Backward passes that ended on this worker.");
  writer.Sample("", metrics.passes_ended);
  writer.Begin("pass_errors_total", "counter", "Backward passes that failed.");
  writer.Sample("", metrics.passes_failed);
  writer.Begin("passes_in_flight", "gauge", "Backward passes that run.");
  writer.Sample("", metrics.passes_in_flight);
  return text;
}

}  // namespace distgrad
