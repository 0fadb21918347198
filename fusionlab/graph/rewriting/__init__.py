"""The program rewritten, with fused ops in place of regions. Everything outside a site is the traced equation itself.

Read `rewrite` first; the others save work next to fused backward passes after rewriting (`peephole` applies them in turn).
"""
