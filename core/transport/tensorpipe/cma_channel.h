// A channel for TensorPipe between processes of one machine: the receiver copies what is sent
// straight out of the sender's memory (cross-memory attach, process_vm_readv).
//
// TensorPipe's own hands each copy to a thread and back, which costs more than copying a megabyte
// where a sleeping thread is slow to wake. Here the thread copies that hears of it, which is
// often the one that waits for it; what is large is copied in pieces by several threads at once.
//
// A sender may fail, and be told so, while the receiver is about to copy or copies; then the memory
// is soon something else. So all memory that is sent has a lease, a random number that lies in the
// sender's memory too, and that the sender clears before any code on its side hears that sending
// has failed. The receiver reads the lease when it has copied the last byte, and reports nothing
// without it. So the sender confirms each copy, and without a message that it would have to answer.
//
// Whose memory it is the kernel says (SO_PEERCRED), never the other end: a process can only offer
// memory of its own. So the channel needs Unix-domain connections, and fails on others.
//
// Two connections go with each channel. On the first a sender says where its memory lies, on the
// second the receiver says that it has it, each in the order in which they were asked to.
#ifndef DISTGRAD_CORE_TRANSPORT_TENSORPIPE_CMA_CHANNEL_H_
#define DISTGRAD_CORE_TRANSPORT_TENSORPIPE_CMA_CHANNEL_H_

#include <memory>

#include "tensorpipe/channel/context.h"

namespace distgrad {

// Makes the channel; null where one process may not read another's memory, or there are no
// Unix-domain sockets. It works between processes that can meet on those, and of which TensorPipe's
// own says that it does.
std::shared_ptr<tensorpipe::channel::Context> NewCmaChannel();

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_TENSORPIPE_CMA_CHANNEL_H_
