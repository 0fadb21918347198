"""Tests of the command line: `cli.py` and `fusionlab/commands`."""
