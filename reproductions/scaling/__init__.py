"""What limits a run on more nodes and larger batches than the paper's."""
