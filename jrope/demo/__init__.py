"""Serves a language model through jrope layers: `python -m jrope.demo`."""
