// A trace as text for Perfetto (ui.perfetto.dev) and chrome://tracing.
#ifndef DISTGRAD_CORE_BASE_CHROME_TRACE_H_
#define DISTGRAD_CORE_BASE_CHROME_TRACE_H_

#include <string>

#include "core/base/trace.h"

namespace distgrad {

// Writes a trace in Chrome's trace event format, a JSON object. The worker is a process; spans of
// one kind that overlap stand on threads of their own, below each other. A call has the same flow
// at both ends, so that the traces of several workers, put together, have an arrow from one to the
// other. docs/trace.md.
std::string ToChromeTrace(const Trace& trace);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_CHROME_TRACE_H_
