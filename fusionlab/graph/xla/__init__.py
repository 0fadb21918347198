"""What XLA made of a program. `tagging` names every equation by its node, `hlo_text` reads the compiled module's text, `modules` maps
its kernels to nodes, `collectives` counts what devices send each other.
"""
