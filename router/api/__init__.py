"""gRPC services of the router: generation, health, and a gateway's protocol; their messages, text."""
