"""Files of distributed checkpoints: checksums, and checks that they hold only data."""
