"""Which part of a program is to blame: `drift` compares it value by value; `program` cuts a small program out of another, `faults` judges
one, `search` looks for the smallest, `source` writes it as Python, `repro` the whole file.
"""
