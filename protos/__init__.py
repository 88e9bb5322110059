"""The wire contract: .proto files and the stubs generated from them (see generate.py)."""
