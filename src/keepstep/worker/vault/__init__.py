"""State that no other rank has. `redundancy` says what must be kept and when; `vault` and `lane`
are the line to the node that keeps it, `early` and `staging` bring gradients there before the
fence; `replay` and `rebuild` are the way back."""
