// A trace as text for Perfetto (ui.perfetto.dev) and chrome://tracing.
#ifndef DISTGRAD_CORE_BASE_CHROME_TRACE_H_
#define DISTGRAD_CORE_BASE_CHROME_TRACE_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "core/base/trace.h"

namespace distgrad {

// A span of the caller's own, which stands in a row of that name below the worker's. Spans of one
// row do not overlap.
struct RowSpan {
  std::string row = {};
  std::string name = {};
  std::string category = {};
  absl::Time begin = {};
  absl::Time end = {};
  std::vector<std::pair<std::string, std::string>> args = {};
};

// Writes a trace in Chrome's trace event format, a JSON object. The worker is a process; spans of
// one kind that overlap stand on threads of their own, below each other. A call has the same flow
// at both ends, so that the traces of several workers, put together, have an arrow from one to the
// other. docs/trace.md.
std::string ToChromeTrace(const Trace& trace, const std::vector<RowSpan>& more = {});

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_CHROME_TRACE_H_
