#!/usr/bin/env python3
"""Times calls of PyTorch's RPC with a tensor on a GPU, to another process that has it on the same GPU.

  python3 gpu_pytorch_rpc.py [CHANNEL...]

It stands beside "call with a tensor ... from GPU to GPU" of //benchmarks:gpu, on a machine whose python3
has torch for CUDA. CHANNELs are TensorPipe's; without them PyTorch takes the best that it has, which within
a machine is cuda_ipc: the receiver opens the sender's memory. With "cuda_basic basic" tensors go through
memory of the host, as those of distgrad do, and as any between two machines. Prints a line of JSON for each
size: the median of 20 calls (5 above 64 MiB), in seconds.
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as processes


def take(tensor):
  """Has arrived; what is returned is small."""
  torch.cuda.synchronize()
  return tensor.numel()


def options(channels, peer):
  chosen = {"_channels": channels} if channels else {}
  return rpc.TensorPipeRpcBackendOptions(init_method="tcp://127.0.0.1:%s" % os.environ["MASTER_PORT"],
                                         device_maps={peer: {0: 0}}, rpc_timeout=120, **chosen)


def serve(_, channels):
  rpc.init_rpc("worker1", rank=1, world_size=2, rpc_backend_options=options(channels, "worker0"))
  rpc.shutdown()


def seconds(call, calls):
  for _ in range(3):
    call()
  times = []
  for _ in range(calls):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    times.append(time.perf_counter() - begin)
  return statistics.median(times)


def main():
  channels = sys.argv[1:]
  os.environ.setdefault("MASTER_PORT", "29655")
  context = processes.spawn(serve, (channels,), nprocs=1, join=False)
  rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options(channels, "worker1"))
  size = 4096
  while size <= 1 << 30:
    tensor = torch.rand(size // 4, device="cuda:0")
    took = seconds(lambda: rpc.rpc_sync("worker1", take, (tensor,)), 5 if size > 64 << 20 else 20)
    print(json.dumps({"name": "PyTorch's RPC with a tensor of %d bytes, %s" %
                              (size, " ".join(channels) or "its own choice of channels"),
                      "bytes": size, "seconds": took}), flush=True)
    size *= 8
  rpc.shutdown()
  context.join()


if __name__ == "__main__":
  main()
