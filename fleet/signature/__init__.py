"""Sign a run and verify it: SHA256SUMS has the checksums of its files, and an SSH key signs SHA256SUMS."""
