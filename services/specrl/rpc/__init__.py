"""gRPC between the processes of a run: typed clients, one server, and errors that keep their class over the wire."""
