"""Decoder families, config-driven: shapes, weights of one rank, and the forward pass over packed rows."""
