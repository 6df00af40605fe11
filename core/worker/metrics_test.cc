// The text that Prometheus reads: all families, and names that a peer may have chosen.
#include "core/worker/metrics.h"

#include <gtest/gtest.h>

#include "absl/time/time.h"

namespace distgrad {
namespace {

TEST(MetricsTest, AllFamilies) {
  const WorkerMetrics metrics{.worker = "front",
                              .names = {{1, "back"}},
                              .calls = {{.peer = 1,
                                         .served = false,
                                         .function = "step",
                                         .calls = 11,
                                         .errors = 2,
                                         .in_flight = 3,
                                         .bytes_sent = 400,
                                         .bytes_received = 50,
                                         .run_time = absl::Milliseconds(1500)},
                                        {.peer = 7,
                                         .served = true,
                                         .function = "odd \"\\\n\xc3 name",
                                         .calls = 1,
                                         .queue_time = absl::Milliseconds(250)}},
                              .queued_bytes = {{1, 4096}},
                              .contexts = 5,
                              .passes_ended = 60,
                              .passes_failed = 7,
                              .passes_in_flight = 8};
  const auto both = [](const std::string& name, const std::string& type, const std::string& help,
                       const std::string& made, const std::string& served) {
    const std::string family = "distgrad_" + name;
    return "# HELP " + family + " " + help + "\n# TYPE " + family + " " + type + "\n" + family +
           R"({worker="front",peer="back",function="step",side="client"} )" + made + "\n" + family +
           R"({worker="front",peer="7",function="odd \"\\\n? name",side="server"} )" + served +
           "\n";
  };
  EXPECT_EQ(ToPrometheus(metrics),
            both("calls_total", "counter", "Calls begun.", "11", "1") +
                both("call_errors_total", "counter", "Calls that ended with an error.", "2", "0") +
                both("calls_in_flight", "gauge", "Calls that have not ended.", "3", "0") +
                both("call_sent_bytes_total", "counter",
                     "Bytes of messages sent, tensors included.", "400", "0") +
                both("call_received_bytes_total", "counter",
                     "Bytes of messages received, tensors included.", "50", "0") +
                both("call_queue_seconds_total", "counter",
                     "Time that served calls waited for their handler to begin.", "0", "0.25") +
                both("call_seconds_total", "counter",
                     "Time in handlers (served), or until the answer (made), of calls that ended.",
                     "1.5", "0") +
                R"(# HELP distgrad_queued_bytes Bytes that wait to be sent.
# TYPE distgrad_queued_bytes gauge
distgrad_queued_bytes{worker="front",peer="back"} 4096
# HELP distgrad_contexts Contexts that are open.
# TYPE distgrad_contexts gauge
distgrad_contexts{worker="front"} 5
# HELP distgrad_passes_total Backward passes that ended on this worker.
# TYPE distgrad_passes_total counter
distgrad_passes_total{worker="front"} 60
# HELP distgrad_pass_errors_total Backward passes that failed.
# TYPE distgrad_pass_errors_total counter
distgrad_pass_errors_total{worker="front"} 7
# HELP distgrad_passes_in_flight Backward passes that run.
# TYPE distgrad_passes_in_flight gauge
distgrad_passes_in_flight{worker="front"} 8
)");
}

}  // namespace
}  // namespace distgrad
