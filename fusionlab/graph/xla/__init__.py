"""The program as compiled by XLA. `tagging` names every equation by its node, `hlo_text` reads the compiled module's text, `modules`
maps its kernels to nodes, `collectives` counts the traffic between devices.
"""
