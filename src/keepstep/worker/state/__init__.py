"""What a rank has: `rank` are its facts, `state` what its replicas share, `cells`, `gradients`,
`flags`, `objects` what a step must be able to undo. `codec` makes bytes of it, `shards` says who
has the same, `witness` compares; `serving` and `transfer` move it to a newcomer."""
