"""What distgrad is made of, as a software bill of materials in CycloneDX's JSON, version 1.5.

Of everything that the tree pins (WORKSPACE, the requirements of the wheels, the crate's Cargo.lock) it
has name, version, SHA-256 and licence. A component's scope says where it ends up: `required` is in the
released library or crate, or loaded by it; `optional` comes with a feature of the crate; `excluded` is
for building and testing alone.
"""
import glob
import hashlib
import os
import re
import tomllib
import uuid

# Of what is pinned by a file without licences. One of SPDX's, or a sentence where there is none.
NVIDIA = "NVIDIA's, redistributable: CUDA Toolkit End User License Agreement"
LICENCES = {
    "abseil": "Apache-2.0",
    "accessible-pygments": "BSD-3-Clause",
    "alabaster": "BSD-3-Clause",
    "babel": "BSD-3-Clause",
    "beautifulsoup4": "MIT",
    "benchmark": "Apache-2.0",
    "bible-kjv-text": "public domain: its copyright has expired",
    "certifi": "MPL-2.0",
    "charset-normalizer": "MIT",
    "clang-tidy": "Apache-2.0 WITH LLVM-exception",
    "dataset-fashion-mnist": "MIT",
    "docutils": "BSD-2-Clause AND GPL-3.0-or-later AND Python-2.0",
    "furo": "MIT",
    "googletest": "BSD-3-Clause",
    "idna": "BSD-3-Clause",
    "imagesize": "MIT",
    "jinja2": "BSD-3-Clause",
    "libcli11-dev": "BSD-3-Clause",
    "libgoogle-perftools-dev": "BSD-3-Clause",
    "libnop-dev": "Apache-2.0",
    "libtensorpipe-dev": "BSD-3-Clause",
    "libuv1-dev": "MIT",
    "markdown-it-py": "MIT",
    "markupsafe": "BSD-3-Clause",
    "mdit-py-plugins": "MIT",
    "mdurl": "MIT",
    "myst-parser": "MIT",
    "nlohmann-json3-dev": "MIT",
    "nvidia-nccl-cu13": "BSD-3-Clause",
    "packaging": "Apache-2.0 OR BSD-2-Clause",
    "pygments": "BSD-2-Clause",
    "pyyaml": "MIT",
    "requests": "Apache-2.0",
    "roman-numerals": "0BSD OR CC0-1.0",
    "safetensors": "Apache-2.0",
    "snowballstemmer": "BSD-3-Clause",
    "soupsieve": "MIT",
    "sphinx": "BSD-2-Clause",
    "sphinx-basic-ng": "MIT",
    "sphinx-design": "MIT",
    "sphinxcontrib-applehelp": "BSD-2-Clause",
    "sphinxcontrib-devhelp": "BSD-2-Clause",
    "sphinxcontrib-htmlhelp": "BSD-2-Clause",
    "sphinxcontrib-jsmath": "BSD-2-Clause",
    "sphinxcontrib-qthelp": "BSD-2-Clause",
    "sphinxcontrib-serializinghtml": "BSD-2-Clause",
    "torch": "BSD-3-Clause",
    "typing-extensions": "PSF-2.0",
    "urllib3": "MIT",
    "zlib1g-dev": "Zlib",
}
# What the released library contains or comes with; the rest of what is pinned for C++ only builds and
# tests it.
SHIPPED = {
    "abseil": "compiled into libdistgrad.so.1, changed by third_party/abseil/exceptions.patch",
    "nlohmann-json3-dev": "compiled into libdistgrad.so.1 (headers)",
    "libtensorpipe-dev": "compiled into libdistgrad.so.1 (headers)",
    "libnop-dev": "compiled into libdistgrad.so.1 (headers)",
    "torch": "lib/distgrad: libtorch_cpu.so, libc10.so, libgomp.so.1 (GPL-3.0-or-later WITH "
             "GCC-exception-3.1) and headers; parts of libtorch are under licences of their own, which "
             "stand with its licence",
    "nvidia-cuda-runtime": "lib/distgrad/libcudart.so.13, which libtorch_cpu.so needs to load",
    "nvidia-cuda-cupti": "lib/distgrad/libcupti.so.13, which libtorch_cpu.so needs to load",
}


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def lock_of(root):
    return tomllib.loads(read(os.path.join(root, "bindings/rust/Cargo.lock")))["package"]


def pins(root):
    """Everything that the tree pins, with a hash: dicts of kind, name, version and sha256, sorted."""
    found = []
    workspace = read(os.path.join(root, "WORKSPACE"))
    for kind, body in re.findall(r"^debian_(package|source)\(\n(.*?)^\)", workspace, re.MULTILINE | re.DOTALL):
        value = dict(re.findall(r'(\w+) = "([^"]*)"', body))
        found.append({"kind": "deb", "name": value["package"], "version": value["version"],
                      "sha256": value["sha256"], "suffix": "?arch=source" if kind == "source" else "?arch=amd64"})
    for path in glob.glob(os.path.join(glob.escape(root), "third_party/*/*requirements.txt")):
        pinned = re.findall(r"^([\w-]+)==(\S+) \\\n +--hash=sha256:(\w+)$", read(path), re.MULTILINE)
        for name, version, digest in pinned:
            # One wheel may be in several lists, and its name in two spellings (PEP 503).
            pin = {"kind": "pypi", "name": name.replace("_", "-").lower(), "version": version, "sha256": digest,
                   "suffix": ""}
            if pin not in found:
                found.append(pin)
    for package in lock_of(root):
        if "checksum" in package:
            found.append({"kind": "cargo", "name": package["name"], "version": package["version"],
                          "sha256": package["checksum"], "suffix": ""})
    # What several files pin stands once.
    return [dict(pin) for pin in sorted({tuple(sorted(pin.items())) for pin in found},
                                        key=lambda pin: (dict(pin)["kind"], dict(pin)["name"], pin))]


def scopes_of_crates(root):
    """(name, version) of each crate to `required` or `optional`, by what the crate itself asks for."""
    packages = {}
    for package in lock_of(root):
        packages.setdefault(package["name"], []).append(package)

    def named(text):
        """What a line of `dependencies` means: a name, and a version where there are several."""
        name, _, version = text.partition(" ")
        return [package for package in packages[name] if version in ("", package["version"].split(" ")[0])]

    manifest = tomllib.loads(read(os.path.join(root, "bindings/rust/Cargo.toml")))
    own = next(package for package in packages["distgrad"] if "checksum" not in package)
    scopes = {}
    for scope in ("required", "optional"):
        asked = dict(manifest["build-dependencies"], **manifest["dependencies"])
        wanted = {name for name, value in asked.items() if isinstance(value, dict) == (scope == "optional")}
        queue = [package for line in own["dependencies"] if line.split(" ")[0] in wanted for package in named(line)]
        while queue:
            package = queue.pop()
            key = package["name"], package["version"]
            if key not in scopes:
                scopes[key] = scope
                queue += [other for line in package.get("dependencies", []) for other in named(line)]
    return scopes


def licence_of_crate(vendor, name, version):
    """What a crate in a folder of `cargo vendor` says of itself."""
    package = tomllib.loads(read(os.path.join(vendor, "%s-%s" % (name, version), "Cargo.toml")))["package"]
    return package["license"].replace("/", " OR ")


def licence(text):
    if " OR " in text or " AND " in text or " WITH " in text:
        return {"expression": text}
    return {"license": {"id": text} if re.fullmatch(r"[A-Za-z0-9.+-]+", text) else {"name": text}}


def component(pin, scope, text, note):
    made = {
        "type": "library",
        "bom-ref": "pkg:%s/%s%s@%s%s" % (pin["kind"], "debian/" if pin["kind"] == "deb" else "", pin["name"],
                                         pin["version"].replace(":", "%3A").replace("+", "%2B"), pin["suffix"]),
        "name": pin["name"],
        "version": pin["version"],
        "scope": scope,
        "hashes": [{"alg": "SHA-256", "content": pin["sha256"]}],
        "licenses": [licence(text)],
    }
    made["purl"] = made["bom-ref"]
    if note:
        made["properties"] = [{"name": "distgrad:where", "value": note}]
    return made


def sbom(root, version, timestamp, crate_licence, properties):
    """The document, whose bytes depend on its arguments alone.

    `crate_licence(name, version)` gives a crate's licence; `properties` of the release, by name.
    """
    scopes = scopes_of_crates(root)
    components = []
    for pin in pins(root):
        name = pin["name"]
        if pin["kind"] == "cargo":
            scope = scopes.get((name, pin["version"]), "excluded")
            text, note = crate_licence(name, pin["version"]), ""
        else:
            scope = "required" if name in SHIPPED else "excluded"
            text = NVIDIA if name.startswith("nvidia-") and name not in LICENCES else LICENCES[name]
            note = SHIPPED.get(name, "")
        components.append(component(pin, scope, text, note))
    # The machine's own, so that its fixes reach distgrad: of no version that the tree would know.
    components.append({
        "type": "library", "bom-ref": "openssl", "name": "openssl", "version": "3", "scope": "required",
        "licenses": [licence("Apache-2.0")],
        "properties": [
            {"name": "distgrad:where", "value": "loaded from the machine: libssl.so.3 and libcrypto.so.3"}],
    })
    own = "pkg:cargo/distgrad@" + version
    serial = hashlib.sha256(("%s %s" % (own, [made["bom-ref"] for made in components])).encode()).hexdigest()
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": "urn:uuid:%s" % uuid.UUID(serial[:32], version=4),
        "version": 1,
        "metadata": {
            "timestamp": timestamp,
            "component": {
                "type": "library", "bom-ref": own, "name": "distgrad", "version": version,
                "licenses": [licence("Apache-2.0")],
            },
            "properties": [{"name": "distgrad:" + name, "value": value} for name, value in sorted(properties.items())],
        },
        "components": components,
        "dependencies": [{
            "ref": own,
            "dependsOn": [made["bom-ref"] for made in components if made["scope"] == "required"],
        }],
    }
