"""gRPC ports: errors, interceptors, credentials, limits and health, the same for both services."""
