"""What SpecBridge's processes share: domain types, the wire, the hidden-state channel, server lifecycle."""

__version__ = "0.1.0"

__all__ = ["__version__"]
