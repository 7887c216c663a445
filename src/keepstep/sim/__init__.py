"""The control plane in a world made from one seed: see docs/internals/simulation.md."""
