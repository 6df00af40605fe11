#!/usr/bin/env python3
"""Finds dependencies that point up, and visibility that nobody uses, in BUILD files.

  tools/layers.py DOCUMENT BUILD_FILE...

DOCUMENT lists the layers, the highest first, in the code block of its section "Layers": each line
begins with a folder, or several. A package belongs to the layer whose folder is the nearest one
above it. Only tests and `testonly` libraries may depend on a layer above their own. A package that
`visibility` opens to one of the given packages has to be used from there, and only the lowest layer
below a folder may be open to all of that folder.

The BUILD files are named by their paths from the root of the repository. Ends with 1 if it has
something to say.
"""

import ast
import os
import re
import sys


def layers(document):
  """The folder of each layer, with its height."""
  with open(document, encoding="utf-8") as file:
    section = re.search(r"^## Layers\n.*?^```\n(.*?)^```", file.read(), re.M | re.S)
  lines = section.group(1).splitlines()
  height = {}
  for number, line in enumerate(reversed(lines)):
    for folder in re.split(r" {3,}", line.strip())[0].split():
      height[folder.rstrip("/")] = number
  return height


def strings(node):
  """All strings below `node`, those of select() and of if_cuda() among them."""
  return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def package_of(label):
  """The package of "//a/b:c", "" for one of the same package or of another repository."""
  return label[2:].split(":")[0] if label.startswith("//") else ""


def layer_of(package, height):
  while package and package not in height:
    package = os.path.dirname(package)
  return package


def main(document, builds):
  height = layers(document)
  said = []
  used = set()  # (who uses, what)
  opened = []  # (package, the label that it is open to)
  for build in builds:
    package = os.path.dirname(build)
    layer = layer_of(package, height)
    if not layer:
      said.append(f"{build}: its folder is in no layer of {document}")
      continue
    with open(build, encoding="utf-8") as file:
      calls = [s.value for s in ast.parse(file.read()).body if isinstance(s, ast.Expr)]
    for call in calls:
      if not isinstance(call, ast.Call):
        continue
      rule = call.func.id
      args = {k.arg: k.value for k in call.keywords}
      name = ast.literal_eval(args["name"]) if "name" in args else rule
      opened += [(package, label)
                for key in ("visibility", "default_visibility") if key in args
                for label in strings(args[key])]
      is_test = rule.endswith("_test") or "testonly" in args
      for label in (s for key, value in args.items() if "visibility" not in key
                    for s in strings(value)):
        other = package_of(label)
        used.add((package, other))
        below = layer_of(other, height)
        if other and not is_test and not below:
          said.append(f"//{package}:{name} depends on {label}, which is in no layer of {document}")
        elif other and not is_test and height[below] > height[layer]:
          said.append(f"//{package}:{name} depends on {label}: {layer} stands below {below}")
  packages = {os.path.dirname(build) for build in builds}
  for package, label in opened:
    other = package_of(label)
    everything_below = label.endswith(":__subpackages__")
    if other == package or not (other in packages or everything_below):
      continue
    within = [folder for folder in height if (folder + "/").startswith(other + "/")]
    layer = layer_of(package, height)
    if everything_below and layer in within and layer != min(within, key=height.get):
      said.append(f"//{package} is open to {label}, which is several layers: name those that use it")
    elif not any(what == package and (who == other or everything_below and who.startswith(other + "/"))
               for who, what in used):
      said.append(f"//{package} is open to {label}, which does not use it")
  print("\n".join(sorted(set(said))), end="\n" if said else "")
  return 1 if said else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1], sys.argv[2:]))
