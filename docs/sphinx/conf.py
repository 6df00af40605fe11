"""How Sphinx makes the site: see build.py, which calls it over a copy of the tree."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

project = "distgrad"
author = "the distgrad authors"
root_doc = "docs/index"
# The pages of the tree as they are, and those that build.py makes of the headers. Links between them
# are those that lead from file to file in any reader of Markdown.
include_patterns = ["**/*.md", "*.md", "docs/reference/*/*.rst"]
extensions = ["myst_parser", "sphinx_design", "tree"]
myst_enable_extensions = ["colon_fence"]
# Those that links begin with; rustdoc: is tree.py's.
myst_url_schemes = ["http", "https", "mailto", "rustdoc"]
# Of headings, as GitHub makes them; links go by them.
myst_heading_anchors = 6
highlight_language = "text"
add_function_parentheses = False
# `--option` is no dash.
smartquotes = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "distgrad"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_domain_indices = False
html_theme_options = {"top_of_page_buttons": []}
