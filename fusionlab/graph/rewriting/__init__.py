"""The program again, with fused ops in place of regions. Everything outside a site is the traced equation itself.

Read `rewrite` first; the others save work beside fused backward passes once it is rewritten (`peephole` asks them in turn).
"""
