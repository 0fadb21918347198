"""Tests of README and the pages of docs/: their snippets run, their outputs, links and numbers are right."""
