"""Times of the simulated world: integers, in nanoseconds."""

MS = 1_000_000
SECOND = 1_000_000_000
