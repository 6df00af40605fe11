#!/usr/bin/env python3
"""Times on one GPU what PyTorch has beside the rows of //benchmarks:gpu, where that is not in libtorch.

  python3 gpu_pytorch.py calls [NAME...]      calls of its RPC with a tensor, to another process on the GPU
  python3 gpu_pytorch.py replicas             a step of its DataParallel, over the GPU twice
  python3 gpu_pytorch.py all_reduce           all-reduces of its ProcessGroupNCCL, by one rank

It needs a python3 with torch for CUDA, and prints a line of JSON for each row: the median time in seconds.
NAMEs are TensorPipe's transports (uv, shm) and channels; without them PyTorch takes the best that it has, which
within a machine is cuda_ipc: the receiver opens the sender's memory. With "uv cuda_basic basic" tensors go
through memory of the host and a TCP connection, as any do between two machines.
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as distributed
import torch.distributed.rpc as rpc
import torch.multiprocessing as processes

GPU = torch.device("cuda:0")


def seconds(call, calls=20):
  """The median time of a call, with all of what it launched."""
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


def say(name, size, took):
  print(json.dumps({"name": name, "bytes": size, "seconds": took}), flush=True)


def take(_):
  """What the other process does: the tensor has arrived."""
  torch.cuda.synchronize()


def rpc_options(names, peer):
  transports = [name for name in names if name in ("uv", "shm")]
  channels = [name for name in names if name not in transports]
  chosen = {"_transports": transports or None, "_channels": channels or None}
  return rpc.TensorPipeRpcBackendOptions(init_method="tcp://127.0.0.1:%s" % os.environ["MASTER_PORT"],
                                         device_maps={peer: {0: 0}}, rpc_timeout=120, **chosen)


def serve(_, names):
  rpc.init_rpc("worker1", rank=1, world_size=2, rpc_backend_options=rpc_options(names, "worker0"))
  rpc.shutdown()


def time_calls(names):
  context = processes.spawn(serve, (names,), nprocs=1, join=False)
  rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=rpc_options(names, "worker1"))
  size = 4096
  while size <= 1 << 30:
    tensor = torch.rand(size // 4, device=GPU)
    took = seconds(lambda: rpc.rpc_sync("worker1", take, (tensor,)), 5 if size > 64 << 20 else 20)
    say("call with a tensor, " + (" ".join(names) or "its own choice of channels"), size, took)
    size *= 8
  rpc.shutdown()
  while not context.join():
    pass


def time_replicas():
  layers = [module for _ in range(8) for module in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
  net = torch.nn.Sequential(*layers).to(GPU)
  batch = torch.rand(1024, 1024, device=GPU)
  say("forward and backward of the plain module", 0, seconds(lambda: net(batch).sum().backward()))
  parallel = torch.nn.DataParallel(net, device_ids=[0, 0])
  say("forward and backward of two replicas on one GPU", 0, seconds(lambda: parallel(batch).sum().backward()))


def time_all_reduces():
  distributed.init_process_group("nccl", init_method="tcp://127.0.0.1:%s" % os.environ["MASTER_PORT"],
                                 rank=0, world_size=1)
  size = 4096
  while size <= 256 << 20:
    tensor = torch.zeros(size // 4, device=GPU)
    say("all-reduce by 1 rank", size, seconds(lambda: distributed.all_reduce(tensor)))
    size *= 16
  distributed.destroy_process_group()


def main():
  os.environ.setdefault("MASTER_PORT", "29655")
  what = sys.argv[1] if len(sys.argv) > 1 else ""
  if what == "calls":
    time_calls(sys.argv[2:])
  elif what == "replicas":
    time_replicas()
  elif what == "all_reduce":
    time_all_reduces()
  else:
    sys.exit(__doc__)


if __name__ == "__main__":
  main()
