"""Tests of the passes: a folder for each, as in `fusionlab/fusers/passes`; `engine`, `report` and `devices` for what all of them
share.

`checks.py` has the assertions (found, right in values and gradients); the other modules that are no tests hold programs.
"""
