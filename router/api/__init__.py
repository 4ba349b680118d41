"""gRPC services of the router: validation, responses, health, and a gateway's protocol."""
