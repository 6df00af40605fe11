// A TensorPipe transport whose listeners outlive what they accept.
//
// TensorPipe's own listener gives up for good when one connection breaks between being accepted
// and its first message, which any client can bring about by going away early. Here such a
// connection is dropped, and the listener never hears of it.
#ifndef DISTGRAD_CORE_TRANSPORT_TENSORPIPE_STEADY_LISTENERS_H_
#define DISTGRAD_CORE_TRANSPORT_TENSORPIPE_STEADY_LISTENERS_H_

#include <memory>

#include "tensorpipe/transport/context.h"

namespace distgrad {

// The same transport in all other respects. Thread-safe.
std::shared_ptr<tensorpipe::transport::Context> WithSteadyListeners(
    std::shared_ptr<tensorpipe::transport::Context> transport);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_TENSORPIPE_STEADY_LISTENERS_H_
