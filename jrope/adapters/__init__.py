"""Other JAX stacks' calling forms, a module each: see docs/pages/migration.md.

Import the one of your stack; none of them imports the stack. They hold no arrays, so a
model that takes one keeps its parameters, its checkpoints and its scan over layers as
they were; rows are computed in the program (`jrope._phases`), off by less than 2^-23 at
any position. `jrope.nnx` is for models that can hold a table and share a step's rows.
"""
