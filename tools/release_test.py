"""What tools/release.py refuses and writes, and that the bill of materials has all that is pinned."""
import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import unittest

import release
import release_sbom
import run_path

ROOT = os.getcwd()


def text_of(path):
    return release.read(os.path.join(ROOT, path))


def digest_of(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


class RefusalTest(unittest.TestCase):
    def refused(self, said, function, *arguments):
        with self.assertRaisesRegex(release.Refusal, said):
            function(*arguments)

    def test_versions_of_the_tree_agree(self):
        manifest, lock = text_of("bindings/rust/Cargo.toml"), text_of("bindings/rust/Cargo.lock")
        version = release.tree_version(manifest, lock)
        release.check_version(version, version)
        other = lock.replace('name = "distgrad"\nversion = "%s"' % version, 'name = "distgrad"\nversion = "9.8.7"')
        self.refused("Cargo.toml has version %s, and Cargo.lock 9.8.7; run cargo update" % re.escape(version),
                     release.tree_version, manifest, other)

    def test_versions(self):
        release.check_version("1.2.3-rc.1", "1.2.3")
        release.check_version("1.2.3-rc.1", "1.2.3-rc.1")
        self.refused("the tree is of version 1.2.3, not 1.2.4; change it in", release.check_version, "1.2.4", "1.2.3")
        self.refused("not 1.2.4-rc.1", release.check_version, "1.2.4-rc.1", "1.2.3")
        self.refused("not 1.2.3; change", release.check_version, "1.2.3", "1.2.3-rc.1")
        for wrong in ("1.2", "v1.2.3", "1.2.3-", "1.2.3-rc/..", "01.2.3", "1.2.3+x", "--output", "1.2.3\n"):
            self.refused("is no version such as", release.check_version, wrong, wrong)

    def test_changelog(self):
        text = "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2030-01-01\n"
        release.check_changelog("1.2.3", text)
        release.check_changelog("1.2.4-rc.1", text)
        self.refused(r"has no '## \[1.2.4\]'; name what is below", release.check_changelog, "1.2.4", text)
        self.refused("has no", release.check_changelog, "1.2.4-rc.1", "## [1.2.3]\n")
        release.check_changelog("0.0.0-x", text_of("CHANGELOG.md"))

    def test_the_interface_is_frozen(self):
        with tempfile.TemporaryDirectory() as root:
            header = "#define DG_ABI_MAJOR 3\n#define DG_ABI_MINOR 14\n"
            build, copy = os.path.join(root, "capi/BUILD.bazel"), "abi/3.14/distgrad/distgrad.h"
            release.write(os.path.join(root, "capi/include/distgrad/distgrad.h"), header)
            release.write(build, 'args = ["$(location include/distgrad/distgrad.h)"]')
            release.check_interface("0.1.0-rc.1", root)
            self.refused(r"version 3.14 of the C interface .* there is not capi/%s, a copy of the header, nor that file in "
                         r"the arguments of abidiff_test, nor a test frozen_header_3.14_\*; docs/abi.md" % copy,
                         release.check_interface, "0.1.0", root)
            release.write(os.path.join(root, "capi", copy), header)
            self.refused("is not that file", release.check_interface, "0.1.0", root)
            release.write(build, 'args = ["$(location %s)"]' % copy)
            self.refused("is not a test", release.check_interface, "0.1.0", root)
            release.write(build, 'args = ["$(location %s)"]\nname = "frozen_header_3.14_worker_test"' % copy)
            release.check_interface("0.1.0", root)

    def test_maintainer(self):
        for right in (release.NOBODY, "Ada Lovelace <ada@example.org>", "distgrad <packages@lists.example.org>"):
            release.check_maintainer(right)
        for wrong in ("", "Ada", "ada@example.org", "<ada@example.org>", " <ada@example.org>", "Ada <ada>",
                      "Ada <a@b> <c@d>", "Ada\nX: y <ada@example.org>", "Ada <ada@example.org>\n"):
            self.refused("is no maintainer such as", release.check_maintainer, wrong)

    def test_what_who_publishes_has_to_say(self):
        somebody, of_nowhere = "Ada Lovelace <ada@example.org>", '[package]\nname = "distgrad"\n'
        placed = of_nowhere + 'repository = "https://example.org/distgrad"\n'
        self.assertEqual(release.not_set_yet(somebody, placed), [])
        (said,) = release.not_set_yet(release.NOBODY, placed)
        self.assertIn("say --maintainer", said)
        (said,) = release.not_set_yet(somebody, of_nowhere)
        self.assertIn("repository = ", said)
        self.assertEqual(len(release.not_set_yet(release.NOBODY, of_nowhere)), 2)

    def test_changes_that_are_not_committed(self):
        with tempfile.TemporaryDirectory() as folder:
            git = ["git", "-C", folder, "-c", "user.name=x", "-c", "user.email=x"]
            subprocess.run(git + ["init", "-q"], check=True)
            release.write(os.path.join(folder, "a"), "1")
            self.refused(r"changes \(\?\? a\); commit them, or say --allow-dirty", release.check_clean, folder)
            subprocess.run(git + ["add", "a"], check=True)
            subprocess.run(git + ["commit", "-q", "-m", "x"], check=True)
            release.check_clean(folder)
            release.write(os.path.join(folder, "a"), "2")
            release.write(os.path.join(folder, "b"), "2")
            self.refused(r"changes \(M a, and 1 more\)", release.check_clean, folder)


class ArchiveTest(unittest.TestCase):
    """Two trees that differ in what must not matter: the order in which they were made, times,
    permissions."""

    SECONDS = 1700000000

    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        files = [("lib/libx.so.1", "x" * 5000), ("include/x/x.h", "int x;\n"), ("include/x-y", ""),
                 ("lib/" + "n" * 120, "n")]
        self.trees = [self.tree("one", files, 0o644, 1e9), self.tree("two", files[::-1], 0o755, 1.5e9)]

    def tree(self, name, files, mode, time):
        root = os.path.join(self.folder, name)
        for path, text in files:
            path = os.path.join(root, path)
            release.write(path, text)
            os.chmod(path, mode)
            os.utime(path, (time, time))
        os.symlink("libx.so.1", os.path.join(root, "lib/libx.so"))
        return root

    def test_tarballs_are_the_same_and_of_nobody(self):
        made = []
        for number, tree in enumerate(self.trees):
            made.append(os.path.join(self.folder, "%d.tar.gz" % number))
            release.write_tar(tree, "x-1", made[-1], self.SECONDS)
        self.assertEqual(digest_of(made[0]), digest_of(made[1]))
        with tarfile.open(made[0]) as archive:
            members = archive.getmembers()
        self.assertEqual([member.name for member in members], [
            "x-1", "x-1/include", "x-1/include/x", "x-1/include/x-y", "x-1/include/x/x.h", "x-1/lib",
            "x-1/lib/libx.so", "x-1/lib/libx.so.1", "x-1/lib/" + "n" * 120])
        for member in members:
            self.assertEqual((member.uid, member.gid, member.uname, member.gname), (0, 0, "", ""))
            self.assertEqual(member.mtime, self.SECONDS)
            self.assertEqual(member.mode, 0o777 if member.issym() else 0o755 if member.isdir() else 0o644)
        with open(made[0], "rb") as file:
            head = file.read(10)
        self.assertEqual(head[3], 0)  # no name of a file in gzip's header
        # And that a difference that matters is one.
        release.write(os.path.join(self.trees[1], "include/x-y"), "y")
        release.write_tar(self.trees[1], "x-1", made[1], self.SECONDS)
        self.assertNotEqual(digest_of(made[0]), digest_of(made[1]))

    def test_debian_packages_are_the_same(self):
        made = []
        for number, tree in enumerate(self.trees):
            made.append(os.path.join(self.folder, "%d.deb" % number))
            fields = release.control_of("1.0.0-rc.1", "Ada Lovelace <ada@example.org>", "libc6")
            release.write_deb(tree, made[-1], self.SECONDS, fields, "activate-noawait ldconfig\n")
        self.assertEqual(digest_of(made[0]), digest_of(made[1]))
        said = release.run("dpkg-deb", "--info", made[0])
        for field in ("Version: 1.0.0~rc.1", "Maintainer: Ada Lovelace <ada@example.org>", "Depends: libc6",
                      "Installed-Size: "):
            self.assertIn(field, said)
        self.assertIn("root/root", release.run("dpkg-deb", "--contents", made[0]))

    def test_paths_of_this_machine_are_found(self):
        tree = self.trees[0]
        release.check_paths(tree, ["/nowhere"])
        release.write(os.path.join(tree, "lib/x.pc"), "prefix=/nowhere/x\n")
        with self.assertRaisesRegex(release.Refusal, "lib/x.pc has the path /nowhere of this machine"):
            release.check_paths(tree, ["/nowhere"])
        for target in ("/etc", "../../one/lib/libx.so.1", "gone"):
            link = os.path.join(tree, "lib/link")
            os.symlink(target, link)
            with self.assertRaisesRegex(release.Refusal, "lib/link leads to " + target):
                release.check_paths(tree, [])
            os.remove(link)


class DocumentsTest(unittest.TestCase):
    def test_links_to_what_is_not_packed_are_words(self):
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        for path, text in (
                ("README.md", "[a](docs/a.md), [`core`](core), [x [y]](gone.md#z) and [a](docs/a.md#no)\n"
                              "\n```cpp\n[f](core)\n```\n\n[far](https://example.org)\n"),
                ("docs/a.md", "# A\n\n- [up](../README.md), [a head](#a), ![picture](gone.svg), [out](../../etc)\n"),
                ("docs/start.md", "```{literalinclude} ../bindings/x.c\n```\n"),
                ("x.dist-info/licenses/x.md", "[gone](gone)\n")):
            release.write(os.path.join(folder, path), text)
        release.drop_dead_links(folder)
        self.assertEqual(release.read(os.path.join(folder, "README.md")),
                         "[a](docs/a.md), `core`, x [y] and a\n\n```cpp\n[f](core)\n```\n\n"
                         "[far](https://example.org)\n")
        self.assertEqual(release.read(os.path.join(folder, "docs/a.md")),
                         "# A\n\n- [up](../README.md), [a head](#a), ![picture](gone.svg), out\n")
        self.assertEqual(release.read(os.path.join(folder, "docs/start.md")), "```{literalinclude} ../bindings/x.c\n```\n")
        self.assertEqual(release.read(os.path.join(folder, "x.dist-info/licenses/x.md")), "[gone](gone)\n")

    def test_licences_of_what_the_site_has(self):
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        for path in ("furo-1.dist-info/licenses/LICENSE", "furo-1.dist-info/METADATA", "sphinx-2.dist-info/LICENSE.rst",
                     "sphinx_design-1.dist-info/METADATA"):
            release.write(os.path.join(folder, "store", path), path)
        for name in ("furo", "sphinx"):
            release.add_licences(os.path.join(folder, "store"), name, os.path.join(folder, "doc"))
        self.assertEqual([path for path in release.entries(os.path.join(folder, "doc")) if "LICENSE" in path],
                         ["furo-1.dist-info/licenses/LICENSE", "sphinx-2.dist-info/LICENSE.rst"])
        self.assertNotIn("furo-1.dist-info/METADATA", release.entries(os.path.join(folder, "doc")))
        with self.assertRaisesRegex(release.Refusal, "the wheel of sphinx_design has no licence"):
            release.add_licences(os.path.join(folder, "store"), "sphinx_design", os.path.join(folder, "doc"))


class LibraryTest(unittest.TestCase):
    """Run paths and needs of a library that is made here."""

    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def library(self, run_path_of_it, name="libdistgrad.so.1", more=()):
        path = os.path.join(self.folder, "lib", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        source = os.path.join(self.folder, "x.cc")
        # What it has of GLIBC and of GLIBCXX.
        release.write(source, "#include <string>\n#include <cstdlib>\n"
                      "std::string f(const char* x) { return std::to_string(atof(x)) + getenv(x); }\n")
        subprocess.run(["g++", "-shared", "-fPIC", "-o", path, source, "-Wl,--enable-new-dtags",
                        "-Wl,-rpath," + run_path_of_it, *more], check=True)
        return path

    def test_only_the_last_folder_is_left(self):
        path = self.library("$ORIGIN/../_solib_k8/_U@torch:$ORIGIN/../_U:$ORIGIN/distgrad")
        with self.assertRaisesRegex(release.Refusal, "the run path of libdistgrad.so.1 is .*_solib"):
            release.check_libraries(self.folder)
        with open(path, "rb") as file:
            data = bytearray(file.read())
        self.assertEqual(run_path.shorten(data), "$ORIGIN/distgrad")
        self.assertNotIn(b"_solib_k8", data)
        with open(path, "wb") as file:
            file.write(data)
        needs = release.check_libraries(self.folder)
        self.assertRegex(needs["glibc"], r"^2\.\d+")
        self.assertRegex(needs["libstdcxx"], r"^GLIBCXX_3\.4\.\d+$")
        self.assertEqual(run_path.shorten(data), "$ORIGIN/distgrad")  # a second time nothing happens
        with self.assertRaises(ValueError):
            run_path.shorten(bytearray(b"#!/bin/sh\n" * 20))

    def test_what_is_neither_here_nor_the_systems(self):
        self.library("$ORIGIN/distgrad")
        other = self.library("/somewhere", "libother.so", ["-Wl,-soname,libother.so"])
        with self.assertRaisesRegex(release.Refusal, "libother.so looks for libraries in .*/somewhere"):
            release.check_libraries(self.folder)
        self.library("$ORIGIN/distgrad", more=["-Wl,--no-as-needed", other])
        os.remove(other)
        with self.assertRaisesRegex(release.Refusal, r"libdistgrad.so.1 needs \['libother.so'\], which neither"):
            release.check_libraries(self.folder)


class BillTest(unittest.TestCase):
    def bill(self):
        return release_sbom.sbom(ROOT, "1.2.3", "2030-01-01T00:00:00Z", lambda name, version: "MIT OR Apache-2.0",
                                 {"glibc": "2.34"})

    def test_it_has_all_that_is_pinned(self):
        """By the hashes, which the files below have in forms that are easily found."""
        requirements = [path for path in release.entries(os.path.join(ROOT, "third_party"))
                        if path.endswith("requirements.txt")]
        self.assertGreaterEqual(len(requirements), 6)
        pinned = set(re.findall(r'sha256 = "(\w+)"', text_of("WORKSPACE")))
        self.assertGreaterEqual(len(pinned), 10)
        for path in requirements:
            found = re.findall(r"--hash=sha256:(\w+)", text_of("third_party/" + path))
            self.assertTrue(found, path)
            pinned.update(found)
        pinned.update(re.findall(r'checksum = "(\w+)"', text_of("bindings/rust/Cargo.lock")))
        has = [made["hashes"][0]["content"] for made in self.bill()["components"] if "hashes" in made]
        self.assertEqual(set(has), pinned)
        self.assertEqual(len(has), len(pinned))

    def test_its_form(self):
        bill = self.bill()
        self.assertEqual((bill["bomFormat"], bill["specVersion"], bill["version"]), ("CycloneDX", "1.5", 1))
        self.assertRegex(bill["serialNumber"], r"^urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
        references = [made["bom-ref"] for made in bill["components"]]
        self.assertEqual(len(references), len(set(references)))
        for made in bill["components"]:
            self.assertIn(made["scope"], ("required", "optional", "excluded"))
            for digest in made.get("hashes", []):
                self.assertRegex(digest["content"], "^[0-9a-f]{64}$")
            (licence,) = made["licenses"]
            self.assertTrue(licence.get("expression") or licence["license"].get("id") or licence["license"]["name"])
            if "purl" in made:
                self.assertRegex(made["purl"], r"^pkg:(deb/debian|pypi|cargo)/[\w-]+@[\w.%~+-]+(\?arch=\w+)?$")
        (needs,) = bill["dependencies"]
        self.assertEqual(needs["ref"], bill["metadata"]["component"]["bom-ref"])
        self.assertLessEqual(set(needs["dependsOn"]), set(references))
        names = {made["name"]: made["scope"] for made in bill["components"]}
        wanted = {"torch": "required", "cxx": "required", "openssl": "required", "tch": "optional",
                  "googletest": "excluded", "tokio": "excluded"}
        self.assertEqual({name: names.get(name) for name in wanted}, wanted)
        self.assertEqual(json.dumps(bill), json.dumps(self.bill()))
        said = release.copyright_of(bill)
        for name in release_sbom.SHIPPED:
            self.assertIn("\n%s " % name, said)
        for name in release.IN_SITE:
            self.assertRegex(said, r"\n%s \S+: [A-Z0-9-]+[^\n]*\. html: " % name.replace("_", "-"))

    def test_no_licence_is_of_what_is_gone(self):
        pinned = {pin["name"] for pin in release_sbom.pins(ROOT)}
        self.assertLessEqual(set(release_sbom.LICENCES) | set(release_sbom.SHIPPED), pinned)


if __name__ == "__main__":
    unittest.main()
