"""DOT, SVG and hulls."""
