"""For Sphinx: links into the source tree, names of the interface, and rustdoc.

- A link to a file or folder of the tree that is no page gets a page that shows it. Where the site is
  built from the pages alone (its test), such a link is left to tools/documents.py.
- `dg_...`, `DG_...` and `dg::...` in a page are links into the reference; one that the headers do not
  have is a warning.
- A link to rustdoc:PATH leads into cargo's documentation, or is plain text where there is none.
"""
import os
import re

from docutils import nodes
from pygments.lexers.rust import RustLexer
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

LOG = logging.getLogger(__name__)
LANGUAGES = {".cc": "cpp", ".h": "cpp", ".hpp": "cpp", ".cu": "cpp", ".c": "c", ".rs": "rust", ".py": "python",
             ".bzl": "python", ".bazel": "python", ".sh": "bash", ".toml": "toml", ".cmake": "cmake"}
# Stand for several names, or for none yet.
PATTERN = re.compile(r"dg_T_|_\.\.\.|\*|…")


class SourceLinks(SphinxTransform):
    """Runs before Sphinx looks for files to download."""

    default_priority = 5

    def apply(self, **kwargs):
        for node in list(self.document.findall(addnodes.download_reference)):
            self.link(node, node["reftarget"])
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node.get("reftype") == "myst" and node.get("refdomain") != "doc":
                self.link(node, node["reftarget"])

    def link(self, node, target):
        path = target.partition("#")[0]
        if not path:
            return
        place = os.path.normpath(os.path.join(os.path.dirname(self.env.docname), path))
        full = os.path.join(self.env.srcdir, place)
        if os.path.exists(full):
            page = "source/" + (place if place != "." else "tree")
            self.env.app.distgrad_sources.add(place)
        elif self.config.tree_is_partial and not place.endswith(".md"):
            page = None
        else:
            return  # Sphinx says what is wrong
        self.replace(node, page)

    def replace(self, node, page):
        new = nodes.inline()
        if page:
            uri = self.env.app.builder.get_relative_uri(self.env.docname, page)
            new = nodes.reference("", "", internal=True, refuri=uri)
        for child in node.children:
            new += child
        node.replace_self(new)


class RustdocLinks(SphinxTransform):
    default_priority = 6

    def apply(self, **kwargs):
        for node in list(self.document.findall(nodes.reference)):
            uri = node.get("refuri", "")
            if not uri.startswith("rustdoc:"):
                continue
            if self.config.tree_has_rustdoc:
                up = "../" * self.env.docname.count("/")
                node["refuri"] = up + "rust/" + uri[len("rustdoc:"):]
                node["internal"] = True
            else:
                node.replace_self(nodes.inline("", "", *node.children))


def known_names(app):
    """Declared in the headers: name to page and anchor."""
    names = {}
    for domain in ("c", "cpp"):
        for name, _, kind, page, anchor, _ in app.env.get_domain(domain).get_objects():
            if kind not in ("functionParam", "templateParam", "functionparam"):
                names.setdefault(name, (page, anchor))
    return names


def link_names(app, doctree, docname):
    if not hasattr(app, "distgrad_names"):
        app.distgrad_names = known_names(app)
    for node in list(doctree.findall(nodes.literal)):
        text = node.astext()
        found = re.match(r"((?:dg|DG)_\w+|dg(?:::\w+)+)(?:\(.*\))?$", text)
        if not found or PATTERN.search(text) or isinstance(node.parent, (nodes.reference, addnodes.pending_xref)):
            continue
        if found.group(1) not in app.distgrad_names:
            LOG.warning("the headers have no %s", found.group(1), location=node)
            continue
        page, anchor = app.distgrad_names[found.group(1)]
        uri = app.builder.get_relative_uri(docname, page) + "#" + anchor
        link = nodes.reference("", "", internal=True, refuri=uri)
        node.replace_self(link)
        link += node


def first_comment(path):
    """What a file says first that it is."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read(2000).splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    if lines and lines[0].startswith("#!"):
        lines = lines[1:]
    said = []
    for line in lines:
        found = re.match(r'\s*(?://+!?|/\*+|\*|#|""")\s?(.*)', line)
        text = found.group(1) if found else line if said and lines[0].startswith('"""') else None
        if text is None or not text.strip() or not re.match(r"[\w`(]", text.strip()):
            break
        said.append(text.strip().rstrip('"').replace("*/", "").strip())
    return re.split(r"(?<=[.])\s", " ".join(said))[0]


def source_pages(app):
    """A page for each file and folder that is linked to, and for what is in these folders."""
    bridge = app.builder.highlighter
    wanted = set(app.distgrad_sources)
    for place in sorted(wanted):
        full = os.path.join(app.srcdir, place)
        name = "source/" + (place if place != "." else "tree")
        if os.path.isdir(full):
            rows = []
            for child in sorted(os.listdir(full)):
                path = os.path.normpath(os.path.join(place, child))
                inside = os.path.join(full, child)
                text = escape(child + ("/" if os.path.isdir(inside) else ""))
                if path in wanted:
                    text = '<a href="%s">%s</a>' % (app.builder.get_relative_uri(name, "source/" + path), text)
                rows.append("<tr><td><code>%s</code></td><td>%s</td></tr>" % (text, escape(first_comment(inside))))
            body = '<div class="table-wrapper"><table class="docutils"><tbody>%s</tbody></table></div>' % "\n".join(rows)
        else:
            with open(full, encoding="utf-8", errors="replace") as file:
                text = file.read()
            language = LANGUAGES.get(os.path.splitext(place)[1], "text")
            body = bridge.highlight_block(text, language, force=True, linenos=False)
        title = place if place != "." else "Folders"
        yield name, {"title": title, "body": "<h1>%s</h1>\n%s" % (escape(title), body)}, "page.html"


def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def setup(app):
    app.distgrad_sources = set()
    app.add_config_value("tree_is_partial", False, "env")
    app.add_config_value("tree_has_rustdoc", False, "env")
    app.add_lexer("rust,ignore", RustLexer)  # as rustdoc marks what it does not run
    app.add_transform(SourceLinks)
    app.add_transform(RustdocLinks)
    app.connect("doctree-resolved", link_names)
    app.connect("html-collect-pages", source_pages)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": False}
