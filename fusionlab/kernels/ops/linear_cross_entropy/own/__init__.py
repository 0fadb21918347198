"""The softmax of the logits by FusionLab's own kernel. Read `softmax_part` first (which logits it takes), then `part_plan` (how it is laid
over rows, compiled and launched) and `softmax_part.cu`.
"""
