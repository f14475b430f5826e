"""Serves a real language model through jrope layers: `python -m jrope.demo`."""
