"""The router's gRPC services: validation, responses, health, and a gateway's protocol."""
