"""What arrives: response lengths, latencies of rewards and tools, and failures."""
