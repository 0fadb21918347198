def hulls(compiled, view):
    return []


def with_hulls(svg, hulls, id_prefix):
    return svg
