"""What a run did, written and read; shared by real and simulated runs."""
