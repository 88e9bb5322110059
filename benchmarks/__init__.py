"""Measurements of the stack and its parts. Not part of the wheel."""

from specbridge.process import rpc_environment
from specbridge.settings import default_environment

default_environment(**rpc_environment())  # as the services do: before gRPC is imported
