"""The gateway: runs the rounds of every request and speaks gRPC and OpenAI-style REST to clients."""
