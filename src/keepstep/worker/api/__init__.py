"""What a script calls: `attach`, the `session` it gets under `keepstep run`, and the `plain` one
it gets without."""
