// Reads what ToChromeTrace() wrote, and checks what every reader of it counts on.
//
//   absl::StatusOr<TraceEvents> events = ReadTraces({one, another});
//   for (const TraceSlice& call : events->slices) ...
#ifndef DISTGRAD_TESTS_TESTING_TRACE_EVENTS_H_
#define DISTGRAD_TESTS_TESTING_TRACE_EVENTS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace distgrad {

struct TraceSlice {
  std::string process;  // the worker
  std::string thread;   // what the row says
  std::string category;
  std::string name;
  int64_t begin = 0;  // in us
  int64_t end = 0;
  int depth = 0;     // in how many others it lies
  std::string flow;  // that begins or ends with it; "": none
  std::map<std::string, std::string> args;
};

struct TraceEvents {
  std::vector<TraceSlice> slices;  // of one trace after the other, by their begins
  std::vector<std::string> notes;  // what stands there beside
  std::vector<uint64_t> dropped;   // of each trace
};

// Reads traces. An error names what is wrong: no JSON, an event without one of its fields, slices
// of one thread that overlap without one lying in the other, or a flow that lies in no slice.
absl::StatusOr<TraceEvents> ReadTraces(const std::vector<std::string>& texts);

// Returns the slice with the other end of its flow; null if there is none.
const TraceSlice* OtherEnd(const TraceEvents& events, const TraceSlice& slice);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_TRACE_EVENTS_H_
