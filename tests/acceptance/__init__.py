"""The acceptance list, a test for each row: `*_rows` on what is built, `*_records` on what was measured. `reference.py` is float64
numpy.
"""
