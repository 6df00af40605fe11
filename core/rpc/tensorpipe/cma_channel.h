// A channel for TensorPipe between processes of one machine: the receiver copies what is sent
// straight out of the sender's memory (cross-memory attach, process_vm_readv).
//
// TensorPipe's own hands each copy to a thread and back, which costs more than copying a megabyte
// where a sleeping thread is slow to wake. Here the thread copies that hears of it, which is
// often the one that waits for it; what is large is copied in pieces by several threads at once.
//
// A sender that closes takes its memory back at once, as with TensorPipe's own: a copy that runs at
// that moment may bring what that process has there by then.
//
// Two connections go with each channel. On the first a sender says where its memory lies, on the
// second the receiver says that it has it, each in the order in which they were asked to.
#ifndef DISTGRAD_CORE_RPC_TENSORPIPE_CMA_CHANNEL_H_
#define DISTGRAD_CORE_RPC_TENSORPIPE_CMA_CHANNEL_H_

#include <memory>

#include "tensorpipe/channel/context.h"

namespace distgrad {

// Null where one process may not read another's memory. Between which machines, users and
// namespaces it works is what TensorPipe's own says of itself.
std::shared_ptr<tensorpipe::channel::Context> NewCmaChannel();

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_TENSORPIPE_CMA_CHANNEL_H_
