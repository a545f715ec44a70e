//! Checkpoint files: sharded safetensors read through maps, manifests of hashes, synthetic weights by formula.
