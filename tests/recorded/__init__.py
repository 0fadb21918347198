"""Files that earlier versions of FusionLab wrote, and the program that they are of: they are read by `tests/test_recorded.py`."""
