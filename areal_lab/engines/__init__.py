"""The engine protocol, the embedded server, the client, weight transfer."""
