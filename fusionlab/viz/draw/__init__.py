"""From a picture's data to an image: `dot` (text), `render` (Graphviz, if there is one), `layered` (our own layout, if not)."""
