"""State that no other rank has, kept in the memory of another node.

Read `redundancy` first: what happens in a step. `inventory` finds what must be kept (`units`),
`bases` says when which bases go there, `destination` whose vault it is. `vault`, `lane`, `parity`
are the line; `early` and `staging` (with `copies`) bring gradients of a GPU there before the
fence. `replay` and `rebuild` are the way back, `vaultfile` is for checkpoints."""
