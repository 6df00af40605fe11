"""Optimizers of Python's torch in the files of SaveOptimizer() and LoadOptimizer().

Copy it into your program: docs/checkpoints.md ("Optimizers") says what is in such a file.
"""

import json

from safetensors import safe_open
from safetensors.torch import save_file


def _groups_of_names(optimizer, named_parameters):
  """Returns the names by groups, and for each name the one that its parameter goes by."""
  names = {}
  goes_by = {}
  for name, parameter in named_parameters:
    goes_by[name] = names.setdefault(id(parameter), name)
  groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
  return groups, goes_by


def save_optimizer(optimizer, named_parameters, path):
  """Saves an SGD, Adam, AdamW, Adagrad or RMSprop.

  named_parameters is as of Module.named_parameters().
  """
  saved = optimizer.state_dict()
  name_of = {}
  groups = []
  all_names, _ = _groups_of_names(optimizer, named_parameters)
  for group, names in zip(saved["param_groups"], all_names):
    name_of.update(zip(group["params"], names))
    groups.append({**group, "param_names": names})
  tensors = {
      f"state.{name_of[parameter]}.{key}": value.contiguous()
      for parameter, state in saved["state"].items()
      for key, value in state.items()
      if value is not None
  }
  save_file(tensors, path, {
      "format": "pt",
      "optimizer": type(optimizer).__name__,
      "param_groups": json.dumps(groups, default=float),  # a learning rate may be a tensor
  })


def load_optimizer(path, named_parameters, optimizer):
  """Loads what save_optimizer() or SaveOptimizer() have saved of the same kind of optimizer.

  Tied weights may have any of their names there: give those of
  Module.named_parameters(remove_duplicate=False).
  """
  all_names, goes_by = _groups_of_names(optimizer, named_parameters)
  states = {}
  with safe_open(path, framework="pt") as file:
    metadata = file.metadata()
    for key in file.keys():
      name, slot = key[len("state."):].rsplit(".", 1)
      states.setdefault(goes_by.get(name, name), {})[slot] = file.get_tensor(key)
  if metadata["optimizer"] != type(optimizer).__name__:
    raise ValueError(f"{path} is of {metadata['optimizer']}")
  saved = {frozenset(goes_by.get(name, name) for name in group["param_names"]): group
           for group in json.loads(metadata["param_groups"])}
  here = optimizer.state_dict()["param_groups"]
  index_of = {}
  groups = []
  for group, names in zip(here, all_names):
    if frozenset(names) not in saved:
      raise ValueError(f"{path} has no group of the parameters {names}")
    index_of.update(zip(names, group["params"]))
    groups.append({**group, **saved.pop(frozenset(names)), "params": group["params"]})
    groups[-1].pop("param_names")
  if saved:
    raise ValueError(f"{path} has groups that the optimizer lacks")
  optimizer.load_state_dict({
      "state": {index_of[name]: state for name, state in states.items()},
      "param_groups": groups,
  })
