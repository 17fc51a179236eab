"""What distinguishes one decoder from another, as values."""
