"""The target service: owns the large model, verifies trees, commits tokens, captures hidden states."""
