"""How Sphinx builds the site: `sphinx-build -W --keep-going docs docs/_build/html`, or `bash .ci/run docs` in an environment of its own.

Nothing is fetched while it is built, and nothing when a page is read: no intersphinx, no fonts, styles or scripts of others' servers.
Notebooks are shown from their committed outputs. Pages under docs/generated/ are written here, before Sphinx looks for documents.
"""

import shutil
import sys
from pathlib import Path

import fusionlab

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS)]

import pages  # noqa: E402 - in docs/_ext
from generate import write  # noqa: E402

GENERATED = DOCS / "generated"
shutil.rmtree(GENERATED, ignore_errors=True)
GENERATED.mkdir()
write(GENERATED)  # passes, rejections and performance, from the registry and the records
pages.write_notebooks(GENERATED / "notebooks")
pages.write_root_files(GENERATED)

project = "FusionLab"
project_copyright = "the FusionLab authors"
version = release = fusionlab.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docstrings",
    "repository_links",
]
exclude_patterns = ["_build", "_ext", "generate", "README.md", "**.ipynb_checkpoints"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
needs_sphinx = "8.0"
smartquotes_action = "D"  # dashes alone: a quoted word is often a literal

html_theme = "furo"  # its fonts are the reader's own
html_title = "FusionLab"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_sourcelink = False
html_copy_source = False
html_domain_indices = False  # the API pages list the modules
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072b2", "color-brand-content": "#0072b2"},
    "dark_css_variables": {"color-brand-primary": "#56b4e9", "color-brand-content": "#56b4e9"},
}

myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js = {}  # they would come from others' servers; the pages have pictures

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"Array": "jax.Array"}
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
