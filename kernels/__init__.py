"""Device operations, one file an op: shapes in the docstring, a torch reference, and faster versions.

Not the Hugging Face package of the same name; SpecBridge never depends on that one.
"""

__version__ = "0.1.0"
