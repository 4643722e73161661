"""The bytes of a checkpoint: tensors, manifest and fingerprints."""
