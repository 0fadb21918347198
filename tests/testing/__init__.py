"""Tests of `fusionlab/testing`: assertions, the fixture, the plugin."""
