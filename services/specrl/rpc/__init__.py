"""gRPC as the rest of specrl sees it: typed clients, one way to serve, errors that keep their class across the wire."""
