"""One trace of requests through static, dynamic and continuous batching: throughput, latency and waste."""
