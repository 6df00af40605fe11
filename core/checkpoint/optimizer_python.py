"""Optimizers of Python's torch for the tests of SaveOptimizer() and LoadOptimizer().

  optimizer_python.py make FOLDER          what has been trained for some steps, by case
  optimizer_python.py check FOLDER OURS    fails unless OURS/CASE.optimizer.safetensors, which was
                                           saved by SaveOptimizer() from that of FOLDER, goes on here
                                           as the one in FOLDER does, to the last bit

It needs torch and safetensors, and nothing else that they need: not numpy, nor torch's compiler,
which needs sympy and which optimizers import only to keep it off. core/checkpoint/testdata is what `make` has made with torch 2.11.0:

  CASE.optimizer.safetensors   as save_optimizer() saves it, after 3 steps
  CASE.run.safetensors         start.NAME: a parameter at that time; gradient.STEP.NAME: of the next
                               3 steps; end.NAME: the parameter after them
"""

import copy
import os
import sys
import types
import warnings

# The same kernels on every machine: others may add and multiply in one step. And MKL's, whose square
# roots otherwise differ by the processor in their last bits.
os.environ["ATEN_CPU_CAPABILITY"] = "default"
os.environ["MKL_CBWR"] = "COMPATIBLE"
warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import safetensors
import safetensors.torch
import torch
from safetensors.torch import load_file

torch._dynamo = sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
torch._dynamo.disable = lambda function, *args, **kwargs: function
torch._dynamo.graph_break = lambda: None


def save_file(tensors, path, metadata=None):
  """As safetensors.torch.save_file, which needs numpy."""
  safetensors.serialize_file({
      name: safetensors.TensorSpec(
          dtype=str(tensor.dtype).split(".")[-1], shape=list(tensor.shape),
          data_ptr=tensor.data_ptr(), data_len=tensor.nbytes)
      for name, tensor in tensors.items()
  }, path, metadata)


safetensors.torch.save_file = save_file

from optimizer_state_dict import load_optimizer, save_optimizer  # noqa: E402: with our save_file

STEPS = 3
SHAPES = {"fc.weight": [2, 3], "fc.bias": [2], "embedding.weight": [4], "unused": [2]}
DOUBLE = "fc.bias"


def adam(kind, **options):
  return lambda p, lr: kind(p.values(), lr=lr, betas=(0.8, 0.99), eps=1e-6, **options)


CASES = {
    "sgd": lambda p, lr: torch.optim.SGD(
        p.values(), lr=lr, momentum=0.9, weight_decay=0.01, nesterov=True),
    "sgd_plain": lambda p, lr: torch.optim.SGD(p.values(), lr=lr),
    "sgd_groups": lambda p, lr: torch.optim.SGD([
        {"params": [p["fc.weight"], p["unused"]], "momentum": 0.5, "dampening": 0.1},
        {"params": [p["embedding.weight"], p["fc.bias"]], "lr": lr / 2, "momentum": 0.25},
    ], lr=lr),
    "adam": adam(torch.optim.Adam, weight_decay=0.02),
    "amsgrad": adam(torch.optim.Adam, amsgrad=True),
    "adamw": adam(torch.optim.AdamW),
    "adagrad": lambda p, lr: torch.optim.Adagrad(
        p.values(), lr=lr, lr_decay=0.01, weight_decay=0.02, initial_accumulator_value=0.5,
        eps=1e-6),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(
        p.values(), lr=lr, alpha=0.8, eps=1e-6, weight_decay=0.02, momentum=0.5),
    "rmsprop_centered": lambda p, lr: torch.optim.RMSprop(p.values(), lr=lr, centered=True),
}


def parameters(case):
  torch.manual_seed(list(CASES).index(case))
  return {name: torch.randn(shape, dtype=torch.float64 if name == DOUBLE else torch.float32)
                .requires_grad_() for name, shape in SHAPES.items()}


def step(optimizer, params, gradients):
  for name, parameter in params.items():
    parameter.grad = gradients.get(name)
  optimizer.step()


def random_gradients(params):
  return {name: torch.randn_like(p) for name, p in params.items() if name != "unused"}


def make(folder):
  for case, new in CASES.items():
    params = parameters(case)
    optimizer = new(params, 0.1)
    for _ in range(STEPS):
      step(optimizer, params, random_gradients(params))
    save_optimizer(optimizer, params.items(), os.path.join(folder, f"{case}.optimizer.safetensors"))
    run = {f"start.{name}": p.detach().clone() for name, p in params.items()}
    for i in range(STEPS):
      gradients = random_gradients(params)
      run.update({f"gradient.{i}.{name}": g for name, g in gradients.items()})
      step(optimizer, params, gradients)
    run.update({f"end.{name}": p.detach().clone() for name, p in params.items()})
    save_file(run, os.path.join(folder, f"{case}.run.safetensors"))


def check(folder, ours):
  for case, new in CASES.items():
    run = load_file(os.path.join(folder, f"{case}.run.safetensors"))
    states = []
    for source in (folder, ours):
      params = {name: run[f"start.{name}"].clone().requires_grad_() for name in SHAPES}
      optimizer = new(params, 7.0)
      # One parameter has another name, too, as tied weights have, and goes by that here.
      named = [("a.tied.weight", params["fc.weight"]), *params.items()]
      load_optimizer(os.path.join(source, f"{case}.optimizer.safetensors"), named, optimizer)
      states.append(copy.deepcopy(optimizer.state_dict()))  # the steps change its tensors
      for i in range(STEPS):
        step(optimizer, params, {name: run[f"gradient.{i}.{name}"] for name in SHAPES
                                 if f"gradient.{i}.{name}" in run})
      for name, parameter in params.items():
        assert torch.equal(parameter.detach(), run[f"end.{name}"]), (case, source, name)
    theirs, mine = states
    assert theirs["param_groups"] == mine["param_groups"], (case, theirs, mine)
    assert theirs["state"].keys() == mine["state"].keys(), (case, theirs, mine)
    for index, state in theirs["state"].items():
      assert state.keys() == mine["state"][index].keys(), (case, state, mine)
      for key, value in state.items():
        other = mine["state"][index][key]
        assert value.dtype == other.dtype and torch.equal(value, other), (case, index, key)


if __name__ == "__main__":
  {"make": make, "check": check}[sys.argv[1]](*sys.argv[2:])
