// TensorPipe's way from GPU to GPU, in builds with CUDA: cuda_basic, which copies through pinned
// memory of both hosts, piece by piece, while the connection carries the piece before.
//
// The others trust what the other end says. With cuda_ipc a handle of memory that is gone with its
// process, or a number out of range, ends this process too; cuda_xth, within a process, takes
// pointers from a peer that lies about its process. See docs/cuda.md.
#ifndef DISTGRAD_CORE_TRANSPORT_TENSORPIPE_GPU_CHANNEL_H_
#define DISTGRAD_CORE_TRANSPORT_TENSORPIPE_GPU_CHANNEL_H_

#include <memory>

#include "core/transport/packet.h"
#include "tensorpipe/tensorpipe.h"

namespace distgrad {

// Makes the channel; null in a build without CUDA, and where CUDA finds no GPU.
std::shared_ptr<tensorpipe::channel::Context> NewGpuChannel();

// What TensorPipe knows a segment of a GPU as. Only if there is a channel.
tensorpipe::Buffer GpuBuffer(const Segment& segment);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_TENSORPIPE_GPU_CHANNEL_H_
