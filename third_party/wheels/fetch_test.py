"""What fetch.py does with a store that is new, whole, changed, or of an earlier version.

No network: a wheel made here stands for what pip downloads.
"""
import contextlib
import io
import os
import sys
import tempfile
import zipfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import fetch  # noqa: E402

downloads = 0


def download(requirements, folder):
    global downloads
    downloads += 1
    os.makedirs(folder)
    with zipfile.ZipFile(os.path.join(folder, "a-1-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("a/lib.so", "the library")
        wheel.writestr("a/module.py", "x = 1")
        wheel.writestr("a/left_out.txt", "nobody wants it")


fetch.download = download


def run(cache, requirements):
    """Returns the store, and what was said."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        fetch.main("a", requirements, cache, 1, [r"a/.*", r"!a/left_out\.txt"])
    return out.getvalue().strip(), err.getvalue()


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def check(condition, what):
    if not condition:
        sys.exit("FAILED: " + what)


with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as scratch:
    requirements, cache = os.path.join(scratch, "requirements.txt"), os.path.join(scratch, "cache")
    write(requirements, "a==1")
    store, said = run(cache, requirements)
    library, module, sums = (os.path.join(store, path) for path in ("a/lib.so", "a/module.py", fetch.SUMS))
    check(downloads == 1 and said == "" and read(library) == "the library", "a new store")
    check(not os.path.exists(os.path.join(store, "a/left_out.txt")), "what is to be left out is there")

    check(run(cache, requirements) == (store, "") and downloads == 1, "a store that is whole is used as it is")
    os.makedirs(os.path.join(store, "a/__pycache__"))
    write(os.path.join(store, "a/__pycache__/module.pyc"), "Python's own")
    check(run(cache, requirements) == (store, "") and downloads == 1, "more files are no damage")

    for expected, (what, harm) in enumerate({
            "a/lib.so has changed": lambda: write(library, "the librarx"),
            "a/lib.so cannot be read": lambda: os.remove(library),
            "a/module.py has changed": lambda: write(module, ""),
            "sums.json is not readable": lambda: write(sums, "{"),
            "sums.json lists nothing": lambda: write(sums, "{}"),
    }.items(), start=2):
        harm()
        again, said = run(cache, requirements)
        check(again == store and downloads == expected, what + ": not fetched again")
        check(what in said and "fetching it again" in said, what + ": not said, but " + said)
        check(read(library) == "the library" and read(module) == "x = 1", what + ": not repaired")
        check(run(cache, requirements) == (store, ""), what + ": not whole then")

    # One of before there were sums gets some, and is watched from then on.
    os.remove(sums)
    before = downloads
    check(run(cache, requirements) == (store, "") and downloads == before, "a store of before is used")
    write(library, "changed later")
    check("a/lib.so has changed" in run(cache, requirements)[1] and downloads == before + 1, "and watched")
    run(cache, requirements)
    check(not [left for left in os.listdir(cache) if ".tmp." in left], "what was thrown away is still there")
print("all of it as it should be")
