"""Builds and runs a crate with an installed library, as anybody would who has cargo.

outside.py SYSROOT STORE MANIFEST FEATURES TAR PREFIX

TAR is what cargo.py has built that the crate depends on. Works in the current folder.
"""
import os
import shutil
import subprocess
import sys

from cargo import Cargo, name_of

# A crate of somebody else's, as the README says how it finds the library.
USER = {
    "Cargo.toml": """[package]
name = "user"
version = "0.1.0"
edition = "2021"
[dependencies]
%(name)s = { path = "%(folder)s", features = ["%(features)s"] }
""",
    "build.rs": """\
// build.rs, with distgrad among the dependencies
fn main() {
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", std::env::var("DEP_DISTGRAD_LIB").unwrap());
}
""",
    "src/main.rs": """fn main() -> distgrad::Result<()> {
    let x = distgrad::Tensor::from_slice(&[1.0f32, 2.0, 3.0], &[3])?;
    println!("the sum is {}", x.sum()?.item::<f32>()?);
    Ok(())
}
""",
}


def outside(sysroot, store, manifest, features, tar, prefix):
    manifest, tar, prefix = (os.path.abspath(path) for path in (manifest, tar, prefix))
    crate = os.path.dirname(manifest)
    cargo = Cargo(sysroot, store, crate, features, tar=tar)

    def expect(what, code, said, command, variables, folder=None):
        """That `command` ends with 0, or not, and says all of `said`."""
        result = subprocess.run(["cargo", *command, "--offline"], env=dict(cargo.environment, **variables), cwd=folder,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        missing = [text for text in said if text not in result.stdout]
        if missing or (result.returncode == 0) != (code == 0):
            sys.exit("%s: ended with %d, and did not say %s:\n%s" % (what, result.returncode, missing, result.stdout))
        print("%s: as it should be" % what)

    ours = ["--frozen", "--features", features, "--manifest-path", manifest]
    nowhere = {"PKG_CONFIG_PATH": "", "PKG_CONFIG_LIBDIR": cargo.home}
    advice = ["libdistgrad was not found", "set DISTGRAD_DIR=PREFIX", "PREFIX/lib/pkgconfig on PKG_CONFIG_PATH"]
    expect("without the library", 1, advice + ["DISTGRAD_DIR is not set, and pkg-config"], ["build"] + ours, nowhere)
    later = os.path.abspath("later")
    shutil.copytree(os.path.join(prefix, "include"), os.path.join(later, "include"))
    os.symlink(os.path.join(prefix, "lib"), os.path.join(later, "lib"))
    header = os.path.join(later, "include", "distgrad", "distgrad.h")
    with open(header) as file:
        text = file.read().replace("#define DG_ABI_MAJOR 1\n", "#define DG_ABI_MAJOR 2\n")
    os.chmod(header, 0o644)
    with open(header, "w") as file:
        file.write(text)
    expect("with another version of the interface", 1, ["this crate is made for version 1"], ["build"] + ours,
           {"DISTGRAD_DIR": later})
    # It is looked for again where it was not found before.
    installed = os.path.abspath("installed")
    hello = ["run", "--example", "hello"] + ours
    os.mkdir(installed)
    expect("with a folder that has none", 1,
           advice + ["DISTGRAD_DIR is %s, but %s/include/distgrad/distgrad.hpp is not there" % (installed, installed)],
           hello, {"DISTGRAD_DIR": installed})
    for name in ("include", "lib"):
        os.symlink(os.path.join(prefix, name), os.path.join(installed, name))
    expect("by DISTGRAD_DIR, once it is installed", 0, ["Hello process one"], hello, {"DISTGRAD_DIR": installed})
    # From the crate's folder, where cargo builds; and the program runs in any.
    expect("by a relative path that is wrong", 1, ["%s/nowhere/include/distgrad/distgrad.hpp is not there" % crate],
           hello, {"DISTGRAD_DIR": "nowhere"})
    expect("by a relative path", 0, ["Hello process one"], hello, {"DISTGRAD_DIR": os.path.relpath(installed, crate)},
           folder="/")

    if not shutil.which("pkg-config"):
        return  # the test has said that this part is left out
    user = os.path.abspath("user")
    values = {"name": name_of(manifest), "folder": crate, "features": features}
    for path, text in USER.items():
        path = os.path.join(user, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text % values if path.endswith(".toml") else text)
    # The same versions; the lock does not have this crate yet.
    shutil.copyfile(os.path.join(crate, "Cargo.lock"), os.path.join(user, "Cargo.lock"))
    expect("another crate, by pkg-config", 0, ["the sum is 6"], ["run", "--manifest-path", os.path.join(user, "Cargo.toml")],
           {"PKG_CONFIG_PATH": os.path.join(prefix, "lib", "pkgconfig")})


if __name__ == "__main__":
    outside(*sys.argv[1:])
