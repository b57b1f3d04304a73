"""`quantkit serve`: starts an engine's own server, requests a first answer, and runs it until it ends."""
