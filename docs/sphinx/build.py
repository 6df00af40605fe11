"""Builds the documentation site: see docs/sphinx/site.sh, which calls this.

build.py --packages STORE --tree FOLDER --output FOLDER [--rustdoc TAR] [--partial]

Copies the tree's files into a scratch folder, adds the pages of the reference that are made of the
public headers, and runs Sphinx over it, where a warning is an error. Pages that cargo's documentation
names become links there. The output is made whole, and put in the place of a site that was made
before; a folder that is anything else is left as it is.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import headers  # noqa: E402

# Tells a site from a folder of somebody's.
MARK = ".distgrad-site"
REDIRECT = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>distgrad</title>
<meta http-equiv="refresh" content="0; url=docs/index.html"></head>
<body><a href="docs/index.html">distgrad</a></body></html>
"""


def files_of(tree, all_of_it):
    """Those that git has or would add; all, if it is asked for or git knows nothing of them."""
    git = ["git", "-C", tree, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = None if all_of_it else subprocess.run(git, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if listed and listed.returncode == 0 and listed.stdout:
            return [path for path in listed.stdout.decode().split("\0") if path]
    except FileNotFoundError:
        pass
    found = []
    for folder, folders, names in os.walk(tree, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith("bazel-") and name != ".git"]
        found += [os.path.relpath(os.path.join(folder, name), tree) for name in names]
    return found


def stage(tree, folder, all_of_it):
    for path in files_of(tree, all_of_it):
        source, target = os.path.join(tree, path), os.path.join(folder, path)
        if not os.path.isfile(source):
            continue  # git has it, and it was removed
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copyfile(source, target)


def sphinx(packages, source, output, doctrees, options):
    # Sets are gone through in the same order each time.
    environment = dict(os.environ, PYTHONPATH=packages, PYTHONDONTWRITEBYTECODE="1", PYTHONHASHSEED="0")
    environment.setdefault("SOURCE_DATE_EPOCH", "0")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-E", "-c", HERE,
               "-d", doctrees]
    for name, value in options.items():
        command += ["-D", "%s=%d" % (name, value)]
    return subprocess.run(command + [source, output], env=environment).returncode


def link_pages(folder, site):
    """In the HTML below `folder`, rustdoc's, names of the site's pages become links: docs/trace.md."""
    unknown = set()
    for place, folders, names in os.walk(folder):
        # Code is shown as it stands.
        folders[:] = sorted(name for name in folders if os.path.join(place, name) != os.path.join(folder, "src"))
        up = os.path.relpath(site, place)

        def link(found):
            page = "docs/%s.html" % found.group(1)
            if not os.path.exists(os.path.join(site, page)):
                unknown.add(found.group())
            return '<a href="%s/%s">%s</a>' % (up, page, found.group())

        for path in (os.path.join(place, name) for name in names if name.endswith(".html")):
            with open(path, encoding="utf-8") as file:
                text = file.read()
            # Text, and tags between: attributes are no place for links.
            parts = re.split(r"(<[^>]*>)", text)
            parts[::2] = [re.sub(r"\bdocs/([a-z0-9_/]+)\.md\b", link, part) for part in parts[::2]]
            with open(path, "w", encoding="utf-8") as file:
                file.write("".join(parts))
    if unknown:
        sys.exit("the crate's documentation names pages that the site does not have: %s" % ", ".join(sorted(unknown)))


def check_output(output):
    if os.path.isdir(output) and os.listdir(output) and not os.path.exists(os.path.join(output, MARK)):
        sys.exit("%s is no site that was made here, and not empty; name another folder by --output" % output)


def replace(output, new):
    if os.path.isdir(output):
        shutil.rmtree(output)
    os.makedirs(os.path.dirname(output), exist_ok=True)
    shutil.move(new, output)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--packages", required=True)
    parser.add_argument("--tree", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--rustdoc")
    parser.add_argument("--partial", action="store_true", help="the tree has what the pages are made of, and no more")
    options = parser.parse_args()
    if sys.version_info < (3, 11):
        sys.exit("the site needs a python3 that is 3.11 or later, and this is %d.%d" % sys.version_info[:2])
    check_output(options.output)
    with tempfile.TemporaryDirectory(prefix="distgrad-site.") as scratch:
        source, built = os.path.join(scratch, "tree"), os.path.join(scratch, "site")
        stage(options.tree, source, options.partial)
        try:
            headers.make(os.path.join(source, "capi", "include", "distgrad"), os.path.join(source, "docs", "reference"))
        except headers.Mistake as mistake:
            sys.exit("the reference of the headers cannot be made: %s" % mistake)
        status = sphinx(options.packages, source, built, os.path.join(scratch, "doctrees"),
                        {"tree_is_partial": options.partial, "tree_has_rustdoc": bool(options.rustdoc)})
        if status:
            sys.exit("Sphinx found what stands above; paths below %s are the tree's" % source)
        os.remove(os.path.join(built, ".buildinfo"))
        if options.rustdoc:
            with tarfile.open(options.rustdoc) as archive:
                archive.extractall(os.path.join(built, "rust"))
            link_pages(os.path.join(built, "rust"), built)
        for name, text in (("index.html", REDIRECT), (MARK, "")):
            with open(os.path.join(built, name), "w", encoding="utf-8") as file:
                file.write(text)
        replace(os.path.abspath(options.output), built)
    print("the site: file://%s/index.html" % os.path.abspath(options.output))


if __name__ == "__main__":
    main()
