"""Python's side of safetensors_python_test: files as the safetensors package writes and reads them.

  safetensors_python.py write FILE   a tensor of each dtype and shape below, and metadata
  safetensors_python.py read FILE    fails unless FILE has the same tensors
  safetensors_python.py refuse FILE  fails unless the package refuses FILE

The package works on bytes, so neither numpy nor torch is needed.
"""

import ctypes
import sys

import safetensors

# As torch calls them, with the bytes of an element (of the last, of two).
DTYPES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2, "uint32": 4,
    "uint64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8,
    "float8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2fnuz": 1, "float8_e4m3fnuz": 1,
    "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
}
SHAPES = {"matrix": [3, 2], "scalar": [], "empty": [2, 0]}
METADATA = {"format": "p\"t\n\u4e2d"}


def tensors():
  """Of each tensor: name, dtype, shape (as torch has it) and bytes."""
  for dtype, size in DTYPES.items():
    for what, shape in SHAPES.items():
      if dtype == "float4_e2m1fn_x2" and not shape:
        continue
      count = size
      for dimension in shape:
        count *= dimension
      seed = sum(f"{dtype}.{what}".encode())
      data = bytes((seed + 37 * i) % (2 if dtype == "bool" else 256) for i in range(count))
      yield f"{dtype}.{what}", dtype, shape, data


def write(path):
  keep = []
  specs = {}
  for name, dtype, shape, data in tensors():
    keep.append(ctypes.create_string_buffer(data, max(1, len(data))))
    specs[name] = safetensors.TensorSpec(
        dtype=dtype, shape=shape, data_ptr=ctypes.addressof(keep[-1]), data_len=len(data))
  safetensors.serialize_file(specs, path, METADATA)


def read(path):
  with open(path, "rb") as file:
    got = dict(safetensors.deserialize(file.read()))
  for name, dtype, shape, data in tensors():
    tensor = got.pop(name)
    spec = safetensors.TensorSpec(dtype=dtype, shape=shape, data_ptr=1, data_len=len(data))
    want = (spec.dtype, list(spec.shape), data)
    have = (tensor["dtype"], list(tensor["shape"]), bytes(tensor["data"]))
    if have != want:
      sys.exit(f"{name} is {have}, not {want}")
  if got:
    sys.exit(f"unexpected: {sorted(got)}")


def refuse(path):
  try:
    with open(path, "rb") as file:
      safetensors.deserialize(file.read())
  except safetensors.SafetensorError:
    return
  sys.exit("it was taken")


if __name__ == "__main__":
  {"write": write, "read": read, "refuse": refuse}[sys.argv[1]](sys.argv[2])
